"""Showing runs to others: one HTML page that opens from disk, Markdown for a pull request, a picture for a slide."""

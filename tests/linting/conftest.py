"""The fixtures are read, never imported: they are full of mistakes, and of libraries that are not installed."""

from __future__ import annotations

collect_ignore_glob = ["fixtures/*"]

"""Looking at runs while they train: in the terminal, and in the browser. It reads; it never writes to a run."""

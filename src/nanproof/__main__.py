"""``python -m nanproof`` is the command line."""

from .cli import main

main()

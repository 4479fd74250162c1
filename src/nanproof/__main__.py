"""``python -m nanproof`` is the command line."""

from .cli import program

program()

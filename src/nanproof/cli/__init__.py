"""The command line: one thin file per verb in this folder, loaded when it is asked for."""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from .shell import nanproof

    nanproof(prog_name="nanproof")

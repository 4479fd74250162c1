"""The command line: one thin file per verb in this folder, loaded when it is asked for."""

from __future__ import annotations


def main() -> None:
    """The console script."""
    import atexit
    import gc

    from .shell import nanproof

    atexit.register(gc.freeze)  # the end of the process frees all memory; looking for cycles first takes longer

    nanproof(prog_name="nanproof")

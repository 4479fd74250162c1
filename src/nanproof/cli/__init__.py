"""The command line: one thin file per verb in this folder, loaded when it is asked for."""

from __future__ import annotations

import sys

from ..collector import loading


def main() -> None:
    """Run what ``sys.argv`` says; ends with SystemExit."""
    from .shell import nanproof

    nanproof(prog_name="nanproof")


def program() -> None:
    """The console script. A verb that ran nothing of the user's ends at once, without taking the interpreter apart."""
    try:
        with loading():
            from .shell import Done
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        raise SystemExit(130) from None
    try:
        main()
    except Done as end:
        import atexit
        import os

        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            raise end from None  # Python says what could not be written, and ends with 120
        atexit._run_exitfuncs()
        os._exit(end.code)

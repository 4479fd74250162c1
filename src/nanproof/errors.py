"""Every error that nanproof raises on purpose.

    NanproofError
    ├── UsageError       an argument or a call is wrong
    ├── NonFiniteError   a model, a checkpoint or a test holds NaN or Inf where it must not
    ├── DriftError       what a checkpoint would restore disagrees with what was configured
    ├── DesyncError      the ranks of a distributed run fell out of step
    ├── LockedError      a folder belongs to another live process
    └── FormatError      a file is not what it claims to be, or comes from a newer nanproof

    GuardStop            the guard ended the run on purpose: a SystemExit with code 66, not an Exception

Each carries one sentence that says what happened and, in ``hint``, what to do next:

>>> str(UsageError("max_norm is -1", hint="give a positive number, or None to switch clipping off"))
'max_norm is -1. Next: give a positive number, or None to switch clipping off'
"""

from __future__ import annotations

from typing import ClassVar


class NanproofError(Exception):
    """The root: ``except NanproofError`` catches every error of this package and nothing else."""

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message.rstrip('.')}. Next: {self.hint}" if self.hint else self.message


class UsageError(NanproofError, ValueError):
    """An argument or a call is wrong; nothing was done."""


def missing(path: object, hint: str) -> UsageError:
    """What to raise for a path with nothing there.

    >>> missing("runs/b", "give a run folder").message
    'runs/b does not exist'
    >>> missing("https:/wandb.ai/me/runs/1", "give a run folder").hint  # a slash is lost on the way through pathlib
    'download it, then give the path of the copy (only nanproof scan reads addresses)'
    """
    scheme, found, rest = str(path).partition(":/")
    if found and len(scheme) > 1 and scheme.isalnum():
        address = f"{scheme}://{rest.lstrip('/')}"
        return UsageError(
            f"{address} is an address, not a file on this machine",
            hint="download it, then give the path of the copy (only nanproof scan reads addresses)",
        )
    return UsageError(f"{path} does not exist", hint=hint)


class NonFiniteError(NanproofError, ArithmeticError):
    """NaN or Inf stands where it must not: in a model at the start, in a state to be saved, in a test."""


class DriftError(NanproofError):
    """A checkpoint would restore something other than what was configured."""


class DesyncError(NanproofError, RuntimeError):
    """The ranks of a distributed run disagree about where they are."""


class LockedError(NanproofError):
    """Another live process owns this folder."""


class FormatError(NanproofError, ValueError):
    """A file is not what it claims to be, or was written by a newer nanproof."""


class GuardStop(SystemExit):
    """The guard ended the run on purpose.

    A SystemExit and not an Exception: ``except Exception: continue`` cannot swallow it, and a script that does not
    catch it ends with exit code 66, so that a launcher can tell a stop on purpose from a crash.
    """

    exit_code: ClassVar[int] = 66

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(self.exit_code)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message.rstrip('.')}. Next: {self.hint}" if self.hint else self.message

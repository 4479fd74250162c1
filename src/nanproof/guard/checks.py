"""Values that a user has set, checked before anything runs."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import UsageError


def one_of(name: str, value: str, *known: str) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}", hint=f"use one of {', '.join(known)}")


def at_least(least: int, or_none: Collection[str] = (), /, **values: int | None) -> None:
    """Whole numbers by name; those in ``or_none`` may be None."""
    for name, value in values.items():
        if name not in or_none if value is None else not (isinstance(value, int | float) and value >= least):
            raise UsageError(f"{name} is {value}", hint=f"give {least} or more")


def positive(or_none: Collection[str] = (), /, **values: float | None) -> None:
    """Numbers by name; those in ``or_none`` may be None."""
    for name, value in values.items():
        if name not in or_none if value is None else not (isinstance(value, int | float) and value > 0):
            unset = ", or None" if name in or_none else ""
            raise UsageError(f"{name} is {value}", hint=f"give a positive number{unset}")

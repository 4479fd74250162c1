"""What the guard says while a program runs: on standard error, so that the program's output stays its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..text import clean_record


class _Heard(logging.Logger):
    """Whatever the program does to the loggers it finds: `logging.disable`, dictConfig, a level for all of them."""

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None: ...

    def isEnabledFor(self, level: int) -> bool:
        return True  # the handler knows the level


@contextmanager
def show_messages(*, quiet: bool = False) -> Iterator[None]:
    """A block in which the guard's messages are shown; with ``quiet`` only warnings and worse."""
    logger = logging.getLogger("nanproof")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(clean_record)
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    before = logger.__class__, logger.propagate
    logger.addHandler(handler)
    logger.__class__, logger.propagate = _Heard, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.__class__, logger.propagate = before

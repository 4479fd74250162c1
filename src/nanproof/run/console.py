"""What the guard says while a program runs: on standard error, so that the program's output stays its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..text import clean_record


@contextmanager
def show_messages(*, quiet: bool = False) -> Iterator[None]:
    """A block in which the guard's messages are shown; with ``quiet`` only warnings and worse."""
    logger = logging.getLogger("nanproof")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(clean_record)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]

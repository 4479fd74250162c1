"""The boundary around all work that is nanproof's own: whatever is raised there, training goes on.

    with self.surviving("taking a snapshot"):
        self.snapshots.take()

A failure is recorded each time and printed once. The engine, `nanproof run` and DeepSpeed's guard share this boundary;
each says in `_record_failure` where it keeps its records.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from .hooks import Hook

log = logging.getLogger("nanproof")


class Boundary:
    """Whoever works inside a user's training."""

    def __init__(self) -> None:
        self._failed_parts: set[str] = set()

    def _record_failure(self, doing: str, said: str, *, first: bool) -> None:
        raise NotImplementedError

    def failed(self, doing: str, error: Exception) -> str:
        # torch lists every backend below its first line
        said = f"{doing}: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        first = doing not in self._failed_parts
        self._failed_parts.add(doing)
        if first:
            log.error("nanproof: guard-failed, %s", said, exc_info=error)
        self._record_failure(doing, said, first=first)
        return said

    @contextmanager
    def surviving(self, doing: str) -> Iterator[None]:
        """A block of our own work: if it fails, that is recorded and printed once, and training goes on."""
        try:
            yield
        except Exception as error:
            self.failed(doing, error)

    @contextmanager
    def around(self, doing: str, ours: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """A block of the loop's own work inside one of ours: if ours fails, the loop's goes on."""
        with ExitStack() as stack:
            with self.surviving(doing):
                stack.enter_context(ours())
            yield

    def hook(self, doing: str, call: Callable[..., Any]) -> Hook:
        """A hook on one of the loop's own modules: if it fails, the forward pass goes on."""
        return Hook(call, functools.partial(self.failed, doing))

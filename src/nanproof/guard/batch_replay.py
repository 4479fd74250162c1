"""The loader as the guard hands it out: a step that is run again sees the same batches again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

from ..errors import UsageError

T = TypeVar("T")


class BatchReplay(Generic[T]):
    """Counts batches, remembers those of the current pass, and serves them again during a replay.

    >>> batches = BatchReplay()
    >>> it = batches.through("abc")
    >>> next(it), next(it)
    ('a', 'b')
    >>> batches.begin(); _ = next(it)
    >>> with batches.replaying()():
    ...     next(it)
    'c'
    """

    def __init__(self) -> None:
        self.position = 0
        self.batch: Any = None
        self._served: list[Any] = []
        self._again: Iterator[Any] | None = None

    def through(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches, for a loop or for ``next`` inside a closure."""
        batches = iter(loader)
        while True:
            if self._again is not None:
                try:
                    yield next(self._again)
                except StopIteration:
                    raise UsageError(
                        "the closure asked for more batches when it was run again than at first",
                        hint="fetch the batch before guard.step, outside the closure",
                    ) from None
                continue
            try:
                self.batch = next(batches)
            except StopIteration:
                return
            self.position += 1
            self._served.append(self.batch)
            yield self.batch

    def begin(self) -> None:
        """A new pass: what was served before it belongs to its loop, not to its closure."""
        self._served = []

    def replaying(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes blocks in which the current pass sees the batches that it fetched at first."""
        served = self._served

        @contextmanager
        def block() -> Iterator[None]:
            self._again = iter(list(served))
            try:
                yield
            finally:
                self._again = None

        return block

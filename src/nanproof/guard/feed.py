"""The loader as the guard hands it out: a step that is run again sees the same batches again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A batch that a loader has handed out, and which one it was."""

    batch: Any
    about: str


class Feed(Generic[T]):
    """Counts batches, remembers those of the current step, and serves them again during a replay.

    >>> feed = Feed()
    >>> it = feed.through("abc")
    >>> next(it), next(it)
    ('a', 'b')
    >>> feed.begin(); _ = next(it)
    >>> with feed.replaying():
    ...     next(it)
    'c'
    """

    def __init__(self) -> None:
        self.position = 0
        self.batch: Any = None
        self.about = ""
        """Which batch it is, in words, where that is known."""
        self.played: Any = None
        """What went into the model, where that is a copy of the batch; a replay knows the copy."""
        self.delivered: Callable[[], Sequence[Delivered]] = lambda: ()
        """What loaders handed out last, where somebody watches them."""
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

    def given(self, batch: Any) -> None:
        """The batch as the loop itself names it, if it does."""
        self.batch = batch if batch is not None else self.batch

    def begin(self) -> None:
        """A new step: what was served before it belongs to its loop, not to its closure."""
        self._served = []

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A block in which the step's closure sees the batches that it fetched at first."""
        self._again = iter(list(self._served))
        try:
            yield
        finally:
            self._again = None

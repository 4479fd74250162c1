"""The batches that loaders handed out last, and which samples they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ..guard.feed import Delivered
from ..tensors import tensors_in

T = TypeVar("T")
KEPT, KEPT_BYTES = 8, 256 << 20


class Deliveries:
    """Remembers a few batches; loaders may be some batches ahead of the training step.

    >>> deliveries = Deliveries()
    >>> class Loader: pass
    >>> loader = Loader()
    >>> _ = deliveries.asked(loader, [4, 5, 6, 7]); deliveries.handed_out(loader, "batch")
    >>> [d.about for d in deliveries.recent()]
    ['batch 0 of its loader, samples 4–7']
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, Delivered]] = deque()
        self._asked: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def asked(self, loader: Any, indices: T) -> T:
        """A loader's iterator has drawn the indices of a batch to come; they are given back."""
        self._asked.setdefault(loader, deque()).append(indices)
        return indices

    def pass_on(self, loader: Any, batch: T) -> T:
        """A batch on its way from the loader's iterator to the loop."""
        self.handed_out(loader, batch)
        return batch

    def handed_out(self, loader: Any, batch: Any) -> None:
        """It has handed a batch out: the one whose indices it drew first."""
        number = self._counts.get(loader, 0)
        self._counts[loader] = number + 1
        drawn = self._asked.get(loader)
        samples = _words(drawn.popleft()) if drawn else ""
        size = sum(t.nbytes for _, t in tensors_in(batch))
        self._recent.append((size, Delivered(batch=batch, about=f"batch {number:,} of its loader{samples}")))
        while len(self._recent) > 2 and (len(self._recent) > KEPT or sum(s for s, _ in self._recent) > KEPT_BYTES):
            self._recent.popleft()

    def recent(self) -> Sequence[Delivered]:
        return [d for _, d in self._recent]


def _words(indices: Any) -> str:
    if not isinstance(indices, Sequence) or not indices or not all(isinstance(i, int) for i in indices):
        return ""
    first, last = indices[0], indices[-1]
    if list(indices) == list(range(first, last + 1)):
        return f", samples {first}–{last}" if last > first else f", sample {first}"
    shown = ", ".join(map(str, indices[:16]))
    return f", samples {shown}{' …' if len(indices) > 16 else ''}"

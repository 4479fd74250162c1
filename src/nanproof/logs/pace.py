"""Where a record stands: its row, its step, and the segments of a log whose steps go back.

>>> pacer = Pacer()
>>> [pacer.place(step, None) for step in (10, 20, 30, 20)], pacer.returns
([(0, 10), (1, 20), (2, 30), (3, 20)], [Return(row=3, before=30, after=20)])
>>> loop = Pacer()   # a counter that starts again with every epoch is added up
>>> [loop.place(step, epoch)[1] for epoch in (1, 2) for step in (100, 200)]
[100, 200, 300, 400]
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from .series import Floats, Ints, Unit

MANY = 10_000
"""How many returns of the step counter are remembered."""


class Return(NamedTuple):
    """The step counter went back."""

    row: int
    before: int
    after: int


class Pacer:
    """Gives every record of a log its row and its step."""

    def __init__(self) -> None:
        self.row = 0
        self.unit: Unit | None = None
        self.last = 0
        self.first: int | None = None
        self.returns: list[Return] = []
        self.returned = 0
        """All returns, also those no longer remembered."""
        self._raw: int | None = None
        self._epoch: float | None = None
        self._offset = 0

    def next_row(self) -> int:
        row, self.row = self.row, self.row + 1
        return row

    def place(self, step: int | None, epoch: float | None, *, counts: bool = True) -> tuple[int, int]:
        """The row and the step of a record; one that does not count stands beside the record before it."""
        row = self.next_row()
        if step is None:
            step = self._without_step(epoch, counts)
            if step is None:
                return row, self.last
        elif self.unit != "step":
            self.unit, self._raw = "step", None
        if self._raw is not None and step <= self._raw and self.unit == "step" and _next_epoch(self._epoch, epoch):
            self._offset = self.last
        elif self._raw is not None and step < self._raw:
            self._offset = 0
            self.note(row, self.last, step)
        self._raw = step
        self._epoch = epoch if epoch is not None else self._epoch
        self.last = step + self._offset
        if self.first is None:
            self.first = self.last
        return row, self.last

    def _without_step(self, epoch: float | None, counts: bool) -> int | None:
        if self.unit in (None, "epoch") and epoch is not None and epoch == int(epoch):
            self.unit = "epoch"
            return int(epoch)
        if self.unit in ("step", "epoch") or not counts:
            return None
        self.unit = "row"
        return 1 if self._raw is None else self._raw + 1

    def place_many(self, steps: Ints, epochs: Floats | None = None) -> tuple[Ints, Ints]:
        """The same for records in a row whose steps, and perhaps epochs, are known."""
        row, first = self.place(int(steps[0]), None if epochs is None else float(epochs[0]))
        if _stops_counting(steps, epochs):
            places = [None] * (len(steps) - 1) if epochs is None else epochs[1:].tolist()
            rest = [self.place(s, e) for s, e in zip(steps[1:].tolist(), places, strict=True)]
            placed = np.array([(row, first), *rest], np.int64)
            return placed[:, 0], placed[:, 1]
        offset = first - int(steps[0])
        self.row = row + len(steps)
        self._raw, self._epoch = int(steps[-1]), float(epochs[-1]) if epochs is not None else self._epoch
        self.last = self._raw + offset
        return np.arange(row, self.row), steps + offset

    def begin(self, first: int, last: int) -> None:
        """Steps of a source that numbers its points itself."""
        self.unit, self.last = "step", last
        self.first = first if self.first is None else self.first

    def recount(self) -> None:
        """From here on another counter counts; that it differs from the one before is no return."""
        self._raw = None

    def note(self, row: int, before: int, after: int) -> None:
        self.returned += 1
        if len(self.returns) < MANY:
            self.returns.append(Return(row, before, after))

    def note_column(self, previous_row: int, row: int, before: int, after: int) -> None:
        """The steps of one column went back; several columns that do so together are one return."""
        known = bisect_right(self.returns, (row, 2**63))
        if known == 0 or self.returns[known - 1].row <= previous_row:
            self.returned += 1
            if len(self.returns) < MANY:
                self.returns.insert(known, Return(row, before, after))


def _stops_counting(steps: Ints, epochs: Floats | None) -> bool:
    """Whether steps go back, or stay where they are while an epoch begins."""
    moves = np.diff(steps)
    return bool((moves < 0).any() or (epochs is not None and ((moves == 0) & (np.diff(epochs) > 0)).any()))


def _next_epoch(last: float | None, epoch: float | None) -> bool:
    return last is not None and epoch is not None and epoch > last and epoch == int(epoch)

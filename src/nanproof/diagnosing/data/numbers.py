"""Running statistics of one column: how many numbers, their range, and the first that is NaN or Inf."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .piece import Values


class Tally:
    """What was seen of a column so far; numbers inside nested lists count too.

    >>> tally = Tally(); tally.add(0, [[1.0, 2.0], [float("nan")]]); tally.bad, tally.first_bad
    (1, 1)
    """

    def __init__(self) -> None:
        self.rows = 0
        self.numbers = 0
        self.nan = 0
        self.inf = 0
        self.missing = 0
        """Empty cells: NaN as soon as pandas reads them."""
        self.first_missing: int | None = None
        self.first_bad: int | None = None
        self.low, self.high = math.inf, -math.inf

    @property
    def bad(self) -> int:
        return self.nan + self.inf

    def add(self, first: int, values: Values) -> None:
        self.rows += len(values) if isinstance(values, list) or values.ndim else 1
        if isinstance(values, np.ndarray):
            self._array(first, values)
            return
        for offset, value in enumerate(values):
            if value is None:
                self.missing += 1
                self.first_missing = first + offset if self.first_missing is None else self.first_missing
            flat = _flat(value)
            if flat is not None and flat.size:
                self._array(first + offset, flat[None])

    def _array(self, first: int, values: np.ndarray[Any, Any]) -> None:
        if values.dtype.kind not in "fciub" or not values.size:
            return
        self.numbers += values.size
        if values.dtype.kind in "fc":
            bad = ~np.isfinite(values)
            if bad.any():
                nan = int(np.isnan(values).sum())
                self.nan += nan
                self.inf += int(bad.sum()) - nan
                if self.first_bad is None:
                    rows = bad.reshape(len(bad), -1).any(1) if bad.ndim else bad[None]
                    self.first_bad = first + int(np.argmax(rows))
                values = values[~bad]
                if not values.size:
                    return
        if values.dtype.kind == "c":
            values = np.abs(values)
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))


def _flat(value: Any) -> np.ndarray[Any, Any] | None:
    """The numbers of a number or of a nested list of them; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | list | tuple):
        return None
    if isinstance(value, int | float):
        return np.asarray([value], np.float64)
    parts = [p for v in value if (p := _flat(v)) is not None]
    return np.concatenate(parts) if parts else None

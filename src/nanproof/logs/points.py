"""The points of one column, in bounded memory.

>>> points = Points()
>>> for row in range(10_000):
...     points.add(row, row, float("nan") if row == 77 else row % 100)
>>> points.thin(1_000)
>>> rows, steps, values = points.arrays()
>>> len(rows) <= 1_003, points.total, np.flatnonzero(np.isnan(values)).size, float(np.nanmax(values))
(True, 10000, 1, 99.0)

When a column grows beyond its limit, rows are put into buckets of equal width, and of each bucket the finite minimum
and maximum stay; so do the first and the last point and every non-finite one. Widths are powers of two: however often
a column is thinned, the result is the exact minimum and maximum of each bucket.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np

from .series import Floats, Ints


class Points:
    """Rows, steps and values, 24 bytes a point."""

    __slots__ = ("rows", "steps", "total", "values")

    def __init__(self) -> None:
        self.rows, self.steps, self.values = array("q"), array("q"), array("d")
        self.total = 0

    def __len__(self) -> int:
        return len(self.values)

    def add(self, row: int, step: int, value: float) -> None:
        self.rows.append(row)
        self.steps.append(step)
        self.values.append(value)
        self.total += 1

    def extend(self, rows: Ints, steps: Ints, values: Floats) -> None:
        self.rows.frombytes(rows.tobytes())
        self.steps.frombytes(steps.tobytes())
        self.values.frombytes(values.tobytes())
        self.total += len(values)

    def arrays(self, since: int = 0) -> tuple[Ints, Ints, Floats]:
        """Copies of rows, steps and values, from a row on."""
        start = bisect_left(self.rows, since) if since else 0
        rows, steps, values = (np.frombuffer(a[start:], a.typecode) for a in (self.rows, self.steps, self.values))
        return rows, steps, values

    def thin(self, limit: int) -> None:
        """Keep at most ``limit`` finite points, and all others."""
        rows, steps, values = self.arrays()
        keep = _keep(rows, values, limit)
        self.rows, self.steps, self.values = array("q"), array("q"), array("d")
        total = self.total
        self.extend(rows[keep], steps[keep], values[keep])
        self.total = total


def _keep(rows: Ints, values: Floats, limit: int) -> Ints:
    """The indices of the points that stay."""
    finite = np.flatnonzero(np.isfinite(values))
    bad = np.flatnonzero(~np.isfinite(values))
    if len(finite) <= limit:
        return np.arange(len(values))
    width = 1
    while (int(rows[-1]) // width - int(rows[0]) // width + 1) * 2 > limit:
        width *= 2
    bucket = rows[finite] // width
    starts = np.flatnonzero(np.diff(bucket, prepend=bucket[0] - 1))
    sizes = np.diff(starts, append=len(finite))
    chosen = values[finite]
    extremes = [
        finite[_first_in_each(chosen == np.repeat(extreme.reduceat(chosen, starts), sizes), bucket)]
        for extreme in (np.minimum, np.maximum)
    ]
    ends = np.array([0, len(values) - 1])
    return np.unique(np.concatenate([*extremes, bad, ends]))


def _first_in_each(hit: np.ndarray[tuple[int], np.dtype[np.bool_]], bucket: Ints) -> Ints:
    found = np.flatnonzero(hit)
    first: Ints = found[np.diff(bucket[found], prepend=bucket[0] - 1) != 0]
    return first

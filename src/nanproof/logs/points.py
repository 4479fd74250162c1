"""The points of one column, in bounded memory.

>>> points = Points()
>>> rows = np.arange(10_000)
>>> points.extend(rows, rows, np.where(rows == 77, np.nan, rows % 100))
>>> points.thin(1_000)
>>> rows, steps, values = points.arrays()
>>> len(rows) <= 1_005, points.total, np.flatnonzero(np.isnan(values)).size, float(np.nanmax(values))
(True, 10000, 1, 99.0)

When a column grows beyond its limit, rows are put into buckets of equal width, and of each bucket the finite minimum
and maximum stay; so do the first and the last point, every non-finite one, and the points on either side of it. Widths
are powers of two: however often a column is thinned, the result has the exact minimum and maximum of each bucket.
"""

from __future__ import annotations

import numpy as np

from .series import Floats, Ints

Arrays = tuple[Ints, Ints, Floats]


class Points:
    """Rows, steps and values, 24 bytes a point; less where columns share the arrays of their rows and steps."""

    __slots__ = ("_blocks", "_size", "total")

    def __init__(self) -> None:
        self.total = 0
        self._blocks: list[Arrays] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, rows: Ints, steps: Ints, values: Floats) -> None:
        """Many points; the arrays must not be changed afterwards. Many small blocks become one."""
        if len(self._blocks) > 500:
            self._blocks = [_join(self._blocks)]
        self._blocks.append((rows, steps, values))
        self._size += len(values)
        self.total += len(values)

    def arrays(self, since: int = 0) -> Arrays:
        """Rows, steps and values, from a row on."""
        first = len(self._blocks)
        while first > 0 and self._blocks[first - 1][0][-1] >= since:
            first -= 1
        rows, steps, values = _join(self._blocks[first:])
        start = int(np.searchsorted(rows, since))
        return rows[start:], steps[start:], values[start:]

    def thin(self, limit: int) -> None:
        """Keep at most ``limit`` finite points, and all others."""
        rows, steps, values = self.arrays()
        kept = keep(rows, values, limit)
        self._blocks = [(rows[kept], steps[kept], values[kept])]
        self._size = len(kept)


def _join(blocks: list[Arrays]) -> Arrays:
    if not blocks:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64)
    rows, steps, values = zip(*blocks, strict=True)
    return np.concatenate(rows), np.concatenate(steps), np.concatenate(values)


def keep(rows: Ints, values: Floats, limit: int) -> Ints:
    """The indices of the points that stay."""
    finite = np.flatnonzero(np.isfinite(values))
    broken = ~np.isfinite(values)
    edges = np.flatnonzero(np.diff(broken))  # the last value before it broke, and the first one after
    if len(finite) <= limit:
        return np.arange(len(values))
    shift = 0
    while ((int(rows[-1]) >> shift) - (int(rows[0]) >> shift) + 1) * 2 > limit:
        shift += 1
    bucket = rows[finite] >> shift
    starts = np.flatnonzero(np.diff(bucket, prepend=bucket[0] - 1))
    sizes = np.diff(starts, append=len(finite))
    chosen = values[finite]
    extremes = [
        finite[_first_in_each(chosen == np.repeat(extreme.reduceat(chosen, starts), sizes), bucket)]
        for extreme in (np.minimum, np.maximum)
    ]
    stays = np.zeros(len(values), np.bool_)
    stays[[0, -1]] = True
    for kept in (*extremes, broken, edges, edges + 1):
        stays[kept] = True
    return np.flatnonzero(stays)


def _first_in_each(hit: np.ndarray[tuple[int], np.dtype[np.bool_]], bucket: Ints) -> Ints:
    found = np.flatnonzero(hit)
    first: Ints = found[np.diff(bucket[found], prepend=bucket[0] - 1) != 0]
    return first

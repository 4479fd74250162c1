"""The segments of a log: where its steps go back, and whether that means anything."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .pace import Pacer, Return
from .series import Floats, Ints, Segment

Arrays = Mapping[str, tuple[Ints, Ints, Floats]]


def cut(pacer: Pacer, arrays: Arrays) -> tuple[tuple[Segment, ...], Arrays, tuple[str, ...]]:
    """The segments, the columns with their steps put right, and what there is to say about it."""
    if pacer.first is None:
        return (), arrays, ()
    returns = pacer.returns
    if _interleaved(pacer):
        words = f"steps go back {pacer.returned:,} times: several processes seem to write into one log"
        return (_segment(pacer.first, pacer.last, 0, returns),), arrays, (words,)
    if _restarts_regularly(pacer):
        return _add_up(pacer, arrays)
    starts = [(0, pacer.first), *((r.row, r.after) for r in returns)]
    ends = [*(r.before for r in returns), pacer.last]
    found = tuple(
        Segment(first_row=row, first_step=step, last_step=end) for (row, step), end in zip(starts, ends, strict=True)
    )
    return found, arrays, ()


def _segment(first: int, last: int, row: int, returns: list[Return]) -> Segment:
    return Segment(first_row=row, first_step=first, last_step=max([last, *(r.before for r in returns)]))


def _interleaved(pacer: Pacer) -> bool:
    """Many small steps back are several ranks in one file, not resumes."""
    if pacer.returned < 20 or pacer.returned * 50 < pacer.row:
        return False
    small = [r for r in pacer.returns if r.before - r.after <= max(2, (pacer.last - (pacer.first or 0)) // 100)]
    return len(small) * 10 > len(pacer.returns) * 9


def _restarts_regularly(pacer: Pacer) -> bool:
    """A counter that always restarts at its first value, after the same number of steps, counts within epochs."""
    returns = pacer.returns
    if len(returns) < 2 or any(r.after != pacer.first for r in returns):
        return False
    lengths = {r.before for r in returns}
    return max(lengths) - min(lengths) <= max(lengths) // 50


def _add_up(pacer: Pacer, arrays: Arrays) -> tuple[tuple[Segment, ...], Arrays, tuple[str, ...]]:
    first, returns = pacer.first or 0, pacer.returns
    befores = [r.before for r in returns]
    # an epoch is as long as its last step, or one more when it is counted from 0
    offsets = np.cumsum([0, *(b + (1 if first == 0 else 0) for b in befores)])
    rows = np.array([r.row for r in returns])
    fixed = {
        name: (place, steps + offsets[np.searchsorted(rows, place, side="right")], values)
        for name, (place, steps, values) in arrays.items()
    }
    last = pacer.last + int(offsets[-1])
    words = f"the step counter restarts {len(returns):,} times, once an epoch, and is added up"
    return (Segment(first_row=0, first_step=first, last_step=last),), fixed, (words,)

"""The learning rate: where it jumps, and where it stands still although the schedule moves."""

from __future__ import annotations

import dataclasses
from decimal import Decimal

import numpy as np

from ..series import Column, Floats, Series
from .moment import Moment, at, many, show, span

MOST = 50


def find_jumps(series: Series) -> list[Moment]:
    """Where the rate changes at once by more than the schedule does, and whether a resume stands there."""
    rate = series.lr
    if rate is None or len(rate) < 3:
        return []
    good = rate.only(~rate.bad)
    if len(good) < 3:
        return []
    change = np.abs(np.diff(good.values))
    gap = np.maximum(np.abs(np.diff(good.steps)), 1)
    larger = np.maximum(np.abs(good.values[1:]), np.abs(good.values[:-1]))
    jumps = np.flatnonzero((change > 0.2 * larger) & (change > 8 * _usual(change / gap) * gap))
    found = []
    for i in jumps[:MOST].tolist():
        if _crawls(good.values[max(0, i - 64) : i + 64]):
            continue
        before, after, step = float(good.values[i]), float(good.values[i + 1]), int(good.steps[i + 1])
        resumed = _resumed(series, int(good.rows[i]), int(good.rows[i + 1]))
        warming = not resumed and bool((np.diff(good.values[: i + 2]) >= 0).all())  # a warm-up in stairs, by epochs
        text = f"the learning rate goes at once from {show(before)} to {show(after)} at {at(series, step)}"
        numbers = {"before": before, "after": after, "resumed": float(resumed)}
        if before > 0:
            numbers["ratio"] = after / before
        found.append(
            Moment(
                kind="lr-jump",
                step=step,
                row=int(good.rows[i + 1]),
                text=text + (", at a resume" if resumed else ""),
                column=rate.name,
                value=after,
                benign=warming or (after < before and not resumed),
                numbers=numbers,
            )
        )
    return _restarts(found)


def _restarts(jumps: list[Moment]) -> list[Moment]:
    """Jumps upwards that come again and again, evenly, to the same rate or along one that decays: restarts by plan."""
    up = [m for m in jumps if not m.numbers["resumed"] and m.numbers["after"] > m.numbers["before"]]
    if len(up) < 2:
        return jumps
    tops = np.array([m.numbers["after"] for m in up])
    waits = np.diff([0, *(m.step for m in up)]).astype(np.float64)
    if tops.min() <= 0 or waits.min() <= 0:
        return jumps
    ratio = tops[1:] / tops[:-1]
    even = bool((np.abs(waits / waits[0] - 1) < 0.05).all()) or bool((np.abs(waits[1:] / waits[:-1] - 2) < 0.1).all())
    planned = even and bool((ratio < 1.02).all()) and float(ratio.max() / ratio.min()) < 1.1
    return [dataclasses.replace(m, benign=True) if planned and m in up else m for m in jumps]


ABSURD = 10.0
"""No optimizer takes such a rate; one that has grown a thousandfold to get there runs away."""


def find_negative(series: Series) -> list[Moment]:
    """A learning rate below zero, where training climbs the loss, or one that grows without end."""
    for rate in series.of("lr"):
        good = rate.values[~rate.bad & (rate.values > 0)]
        if len(good) >= 5 and good[-1] >= good.max() > max(ABSURD, 1_000 * float(good[0])):
            begin, end = show(float(good[0])), show(float(good[-1]))
            text = f"the learning rate grows from {begin} to {end}, to the end of the log"
            last, row = int(rate.steps[-1]), int(rate.rows[-1])
            return [Moment(kind="lr-grown", step=last, row=row, text=text, column=rate.name, value=float(good[-1]))]
        below = np.flatnonzero(rate.values < 0)
        if len(below):
            step, lowest = int(rate.steps[below[0]]), float(rate.values[below].min())
            text = f"the learning rate is negative from {at(series, step)} on ({show(lowest)} at the lowest)"
            return [
                Moment(
                    kind="lr-negative",
                    step=step,
                    row=int(rate.rows[below[0]]),
                    text=text,
                    column=rate.name,
                    value=lowest,
                    numbers={"lowest": lowest},
                )
            ]
    return []


def _crawls(rates: Floats) -> bool:
    """Whether a rate moves again and again by its last printed digit: no jump, however large it looks."""
    moves = np.abs(np.diff(rates))
    moves = moves[moves > 0]
    return len(moves) >= 4 and bool(moves.max() < 1.5 * _last_digit(rates))


def _usual(slopes: Floats) -> Floats:
    """How fast the rate moves around each change: the median of the three before and the three after it."""
    padded = np.concatenate([slopes[:1].repeat(3), slopes, slopes[-1:].repeat(3)])
    padded[:3], padded[-3:] = np.nan, np.nan
    around = np.lib.stride_tricks.sliding_window_view(padded, 7)[:, [0, 1, 2, 4, 5, 6]]
    return np.asarray(np.nanmedian(around, axis=1), np.float64)


def _resumed(series: Series, before: int, after: int) -> bool:
    boundaries = any(before < s.first_row <= after for s in series.segments[1:])
    return boundaries or any(e.kind == "resume" and before < e.row <= after for e in series.events)


def find_frozen(series: Series) -> list[Moment]:
    """Stretches in which the rate stands still within a schedule that moves at every point: no step was taken.

    The scaler skips the optimizer's step, and the trainer the schedule's with it. A rate that has reached its end, or
    is printed with too few digits to move, does not count.
    """
    rate = series.lr
    if rate is None or len(rate) < 8:
        return []
    good = rate.only(~rate.bad)
    new_step = np.diff(good.steps) > 0
    moves = np.diff(good.values)
    still = (moves == 0) & new_step
    moving = np.flatnonzero((moves != 0) & new_step)
    if len(moving) < 4 or float(np.median(np.diff(moving))) > 1.5:
        return []
    found = []
    runs = np.flatnonzero(np.diff(still.astype(np.int8), prepend=0, append=0))
    for start, end in zip(runs[::2].tolist(), runs[1::2].tolist(), strict=True):
        if start < moving[0] or not (_goes_on(good.values, start, end) or _bad_norms(series, good, start, end)):
            continue
        first, last = int(good.steps[start]), int(good.steps[end])
        text = f"the learning rate stands at {show(float(good.values[start]))} over {span(series, first, last)}"
        text += " while the schedule moves: the steps between were skipped"
        found.append(
            Moment(
                kind="lr-frozen",
                step=first,
                until=last,
                row=int(good.rows[start + 1]),
                text=text,
                column=rate.name,
                value=float(good.values[start]),
                numbers={"points": float(end - start)},
            )
        )
    return found if len(found) <= 3 else [_together(series, found)]


def _together(series: Series, found: list[Moment]) -> Moment:
    begin, end = found[0], found[-1]
    text = (
        f"the learning rate stands still {many(len(found), 'time')} between {at(series, begin.step)} and {end.until:,}"
        " while the schedule moves: steps were skipped"
    )
    points = sum(m.numbers["points"] for m in found)
    return dataclasses.replace(begin, until=end.until, text=text, numbers={"points": points})


def _goes_on(rates: Floats, start: int, end: int) -> bool:
    """Whether the schedule moves on after a halt as it did before; at a peak or a plateau of its own it does not."""
    if start == 0 or end + 1 >= len(rates):
        return False
    before, after = float(rates[start] - rates[start - 1]), float(rates[end + 1] - rates[end])
    as_before = before * after > 0 and 1 / 3 < after / before < 3
    return as_before and min(abs(before), abs(after)) > 2.5 * _last_digit(rates[max(0, start - 10) : end + 10])


def _last_digit(values: Floats) -> float:
    """What the last printed digit is worth: a rate that moves by one or two of them halts by being rounded.

    >>> round(_last_digit(np.array([0.00125, 0.00124])), 9), _last_digit(np.array([1 / 3])) < 1e-15
    (1e-05, True)
    """
    return float(10.0 ** min(int(Decimal(repr(v)).as_tuple().exponent) for v in values.tolist()))


def _bad_norms(series: Series, rate: Column, start: int, end: int) -> bool:
    """Whether the gradients were bad from the beginning of a halt on; a rate that is constant by plan outlives them."""
    norm = series.grad_norm
    if norm is None:
        return False
    mine = (norm.rows >= rate.rows[start + 1]) & (norm.rows <= rate.rows[end])
    return bool(mine.any()) and float(norm.bad[mine].mean()) > 0.8

"""Finite but useless: a loss that is flat, at chance, negative, or rising again."""

from __future__ import annotations

import math

import numpy as np

from ..series import Column, Series
from .moment import Moment, MomentKind, at, many, show

POINTS, FEW = 20, 10
"""With fewer points a loss may well look flat, unless it hardly moves at all."""
CHANCES = (
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    20,
    50,
    80,
    91,
    100,
    150,
    200,
    256,
    365,
    400,
    1000,
    1024,
    21841,
    30522,
    32000,
    50257,
    50304,
    128256,
)
"""Numbers of classes and words that are common; the chance level is their logarithm."""


def find_level(series: Series) -> list[Moment]:
    """What is wrong with the level of a loss that is finite."""
    return [*_flat(series), *_frozen(series), *_negative(series), *_divergence(series)]


STILL = 20
"""At how many points a loss must be exactly the same to its end, all digits of it, to be called frozen."""
NONE = 5
"""At how many last points gradients must be exactly 0."""


def _frozen(series: Series) -> list[Moment]:
    """A loss that fell and then stands still to the last digit; gradients that are exactly 0 beside a loss."""
    found = []
    loss, norm = series.loss, series.grad_norm
    tail = _constant(loss) if loss is not None else 0
    if loss is not None and tail >= max(STILL, len(loss) // 4) and len(loss) > tail:
        value, first = float(loss.values[-1]), float(np.nanmax(np.abs(loss.values[: max(5, len(loss) // 10)])))
        if abs(value) > 0.01 * first and len(f"{value:.9g}".lstrip("-0.").replace(".", "")) >= 3:
            words = f"the loss stands at exactly {value:.9g} for the last {many(tail, 'point')}"
            found.append(_to_the_end("frozen-loss", words, loss, tail))
    tail = _constant(norm) if norm is not None and len(norm) and float(norm.values[-1]) == 0.0 else 0
    if norm is not None and tail >= NONE and loss is not None and len(loss) and abs(float(loss.values[-1])) > 1e-6:
        words = f"{norm.name} is exactly 0 for the last {many(tail, 'point')}: no gradient reaches the weights"
        found.append(_to_the_end("zero-grad", words, norm, tail))
    return found


def _constant(column: Column) -> int:
    """How many of the last points are equal."""
    other = np.flatnonzero(column.values != column.values[-1:])
    return len(column) - 1 - int(other[-1]) if len(other) else len(column)


def _to_the_end(kind: MomentKind, words: str, column: Column, tail: int) -> Moment:
    return Moment(
        kind=kind,
        step=int(column.steps[-tail]),
        until=int(column.steps[-1]),
        row=int(column.rows[-tail]),
        text=words,
        column=column.name,
        value=float(column.values[-1]),
        numbers={"points": float(tail)},
    )


def _flat(series: Series) -> list[Moment]:
    loss = series.loss
    if loss is None:
        return []
    good = loss.only(~loss.bad & (loss.values != 0.0))
    if len(good) < FEW or len(good) < len(loss) // 2:
        return []
    allowed = 0.02 if len(good) >= POINTS else 0.004
    tenth = max(5, len(good) // 10)
    first, last = float(np.median(good.values[:tenth])), float(np.median(good.values[-tenth:]))
    smooth = [float(np.median(part)) for part in np.array_split(good.values, 10)]
    if first <= 0 or max(smooth) - min(smooth) > allowed * first:
        return []
    text = f"the loss is flat: {show(first)} at first, {show(last)} at the end of {many(loss.total, 'point')}"
    level = float(np.median(good.values))
    classes = next((k for k in CHANCES if abs(math.log(k) - level) < max(0.004, 0.002 * level)), None)
    numbers = {"first": first, "last": last}
    if classes is not None:
        text += f"; ln {classes:,} is {math.log(classes):.4f}: the level of chance for {classes:,} classes"
        numbers["classes"] = float(classes)
    return [
        Moment(
            kind="flat" if classes is None else "chance",
            step=int(good.steps[0]),
            until=int(good.steps[-1]),
            row=int(good.rows[0]),
            text=text,
            column=loss.name,
            value=level,
            numbers=numbers,
        )
    ]


def _negative(series: Series) -> list[Moment]:
    """Losses that fall below zero after having been above, or without a bottom.

    Those of policies and likelihoods are negative by nature: they start there, and stay within bounds.
    """
    found = []
    for column in (c for c in (series.loss, *series.components) if c is not None):
        below = np.flatnonzero(column.values < 0)
        if not len(below) or ((below[0] == 0 or column.values[0] <= 0) and not _bottomless(column)):
            continue
        step, lowest = int(column.steps[below[0]]), float(np.nanmin(np.where(column.bad, np.nan, column.values)))
        text = f"{column.name} is negative from {at(series, step)} on, {show(lowest)} at the lowest"
        found.append(
            Moment(
                kind="negative-loss",
                step=step,
                row=int(column.rows[below[0]]),
                text=text,
                column=column.name,
                value=float(column.values[below[0]]),
                numbers={"lowest": lowest, "count": float(len(below))},
            )
        )
    return found


BOTTOM = -1000.0


def _bottomless(column: Column) -> bool:
    """Whether a negative loss keeps growing in size."""
    values = column.values[~column.bad]
    return len(values) >= 3 and float(values[-1]) < min(BOTTOM, 3 * float(values[0]))


def _doubled(series: Series, good: Column) -> list[Moment]:
    """A loss of few points that ends at twice its lowest or more, where that of the evaluation does the same."""

    def doubles(column: Column) -> bool:
        values = column.values[~column.bad]
        return len(values) >= 2 and 0 < 2 * float(values[:-1].min()) < float(values[-1])

    if not doubles(good) or not any("loss" in c.name.lower() and doubles(c) for c in series.evals):
        return []
    low, end = int(np.argmin(good.values[:-1])), float(good.values[-1])
    lowest, step = float(good.values[low]), int(good.steps[low])
    text = (
        f"the loss rises from {show(lowest)} at {at(series, step)} to {show(end)}, and so does that of the evaluation"
    )
    return [
        Moment(
            kind="divergence",
            step=step,
            until=int(good.steps[-1]),
            row=int(good.rows[low]),
            text=text,
            column=good.name,
            value=end,
            numbers={"lowest": lowest, "ratio": end / lowest},
        )
    ]


def _divergence(series: Series) -> list[Moment]:
    """A loss that has fallen and then rises again, slowly, to the end."""
    loss = series.loss
    if loss is None:
        return []
    good = loss.only(~loss.bad & (loss.values != 0.0))
    if len(good) < FEW:
        return _doubled(series, good)
    if len(good) < POINTS:
        return []
    parts = np.array_split(np.arange(len(good)), min(20, len(good) // 5))
    smooth = np.array([np.median(good.values[p]) for p in parts])
    low = int(np.argmin(smooth))
    risen = smooth[-1] - smooth[low]
    fallen = smooth[0] - smooth[low]
    rising = np.diff(smooth[low:])
    steady = (rising < 0).sum() <= len(rising) // 3
    if low >= len(smooth) - 2 or smooth[low] <= 0 or not steady or risen < max(0.25 * smooth[low], 0.5 * fallen):
        return []
    step = int(good.steps[parts[low][-1]])
    text = f"the loss rises again from {show(float(smooth[low]))} at {at(series, step)} to {show(float(smooth[-1]))}"
    return [
        Moment(
            kind="divergence",
            step=step,
            until=int(good.steps[-1]),
            row=int(good.rows[parts[low][-1]]),
            text=text,
            column=loss.name,
            value=float(smooth[-1]),
            numbers={"lowest": float(smooth[low]), "ratio": float(smooth[-1] / smooth[low])},
        )
    ]

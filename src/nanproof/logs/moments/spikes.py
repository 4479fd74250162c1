"""Spikes of the loss and of the gradients, growth before the end, and a loss that turns round.

A spike is a value far above the median of the 32 points before it, measured in their own scatter. It recovers when
the values come back to where they were; what stays above is a new level.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..series import Column, Floats, Series
from .moment import Moment, at, many, show

WINDOW = 32
FIRST = 8
"""How many points are needed before anything is called far from them."""
FACTORS = {"loss": 1.3, "grad_norm": 5.0}
DEVIATIONS = 8.0
MOST = 50


def find_spikes(series: Series) -> list[Moment]:
    """The spikes of loss and gradient norm, the largest 50 of each."""
    found = []
    for column in (series.loss, series.grad_norm):
        if column is not None:
            spikes = _spikes(series, column)
            largest = sorted(spikes, key=lambda m: -m.numbers["ratio"])[:MOST]
            found += sorted(largest, key=lambda m: m.row)
    return _with_leads(series, found)


def _spikes(series: Series, column: Column) -> list[Moment]:
    good = column.only(~column.bad)
    values = good.values
    if len(values) <= FIRST:
        return []
    middle, scatter = _before(values)
    factor = FACTORS["grad_norm" if column.role == "grad_norm" else "loss"]
    limit = np.maximum(middle + DEVIATIONS * scatter, np.where(middle > 0, factor * middle, middle))
    over = np.flatnonzero(values > limit)
    over = over[over >= FIRST]
    found: list[Moment] = []
    end = -1
    for start in over.tolist():
        if start <= end or len(found) > 1_000:
            continue
        base, calm = float(middle[start]), float(middle[start] + max(4 * scatter[start], 0.1 * abs(middle[start])))
        back = np.flatnonzero(values[start:] <= calm)
        length = int(back[0]) if len(back) else len(values) - start
        end = start + length
        found.append(_spike(series, good, column, start, length, base, bool(len(back))))
    return found


def _spike(
    series: Series, good: Column, column: Column, start: int, length: int, base: float, recovered: bool
) -> Moment:
    peak = start + int(np.argmax(good.values[start : start + length]))
    top, step = float(good.values[peak]), int(good.steps[start])
    numbers = {"peak": top, "before": base, "ratio": top / base if base > 0 else np.inf, "points": float(length)}
    text = f"{column.name} leaps from {show(base)} to {show(top)} at {at(series, int(good.steps[peak]))}"
    if recovered:
        back = int(good.steps[start + length])
        numbers["recovered"] = float(back)
        text += f" and is back at {at(series, back)}"
    else:
        level = float(np.median(good.values[-min(length, WINDOW) :]))
        numbers["level"] = level
        text += f" and does not come back: {show(level)} at the end"
    return Moment(
        kind="spike",
        step=step,
        until=int(good.steps[min(start + length, len(good) - 1)]),
        row=int(good.rows[start]),
        text=text,
        column=column.name,
        value=top,
        benign=recovered,
        numbers=numbers,
    )


def _before(values: Floats) -> tuple[Floats, Floats]:
    """The median of the points before each, and their robust standard deviation; the first have what there is."""
    padded = np.concatenate([np.full(WINDOW, np.nan), values[:-1]])
    middle, scatter = np.empty(len(values)), np.empty(len(values))
    for start in range(0, len(values), 8_192):
        block = np.lib.stride_tricks.sliding_window_view(padded[start : start + 8_192 + WINDOW - 1], WINDOW)
        here = slice(start, start + len(block))
        if start == 0:  # NaN only pads the beginning
            block = np.where(np.isnan(block), block[:, -1:], block)
            block[0] = values[0]
        middle[here] = np.median(block, axis=1)
        scatter[here] = 1.4826 * np.median(np.abs(block - middle[here, None]), axis=1)
    return middle, np.maximum(scatter, 1e-3 * np.abs(middle))


def _with_leads(series: Series, spikes: list[Moment]) -> list[Moment]:
    """Say of a loss spike when the gradients leapt before it."""
    norm = series.grad_norm.name if series.grad_norm is not None else ""
    led = []
    for spike in spikes:
        before = [s for s in spikes if s.column == norm and s.column != spike.column and 0 < spike.row - s.row <= 8]
        if before and spike.step > before[-1].step:
            lead = spike.step - before[-1].step
            text = f"{spike.text}; {norm} leapt {many(lead, series.unit)} earlier"
            spike = dataclasses.replace(spike, text=text, numbers={**spike.numbers, "lead": float(lead)})
        led.append(spike)
    return led


GROWN = {"grad_norm": 4.0, "loss": 2.0}
STEADY, STAIRS = 1.25, 5
"""A loss that rises at each of its last points needs to have grown by less."""
RUNAWAY = 8.0
"""By how much a loss that is finite to the end must have grown."""
COMPONENTS = 24


def find_growth(series: Series) -> list[Moment]:
    """What grew before the run broke, by NaN or by an exception, or up to its end; in few rows as well."""
    columns = [c for c in (series.loss, *series.components[:COMPONENTS], series.grad_norm) if c is not None]
    bad = [int(c.rows[int(np.argmax(c.bad))]) for c in columns if c.bad.any()]
    ended = [e.row for e in series.events if e.kind in ("exception", "nan")]
    broke = min(bad or ended, default=None)
    found = [m for c in columns if (m := _growth(series, c, broke)) is not None]
    return found[:6]


def _growth(series: Series, column: Column, broke: int | None) -> Moment | None:
    mine = column.only(~column.bad & (column.rows <= broke) if broke is not None else ~column.bad)
    before = mine.values[-WINDOW:]
    if len(before) < 2:
        return None
    half = before[: max(1, len(before) // 2)]
    base, last = float(np.median(half)), float(before[-1])
    factor = GROWN["grad_norm" if column.role == "grad_norm" else "loss"]
    factor = factor if broke is not None else RUNAWAY
    climb = before[-STAIRS - 1 :] if broke is not None and column.role != "grad_norm" else before[:0]
    steady = len(climb) > STAIRS and bool((np.diff(climb) > 0).all()) and last == before.max()
    if steady and last <= factor * base:
        base, factor = float(climb[0]), STEADY
    if not (base > 0 and last > factor * base and last >= before.max() / 2 and last > 0.5):
        return None
    start = len(mine) - (len(before) - int(np.argmax(before > base * factor**0.5)))
    points = len(mine) - start
    rising = many(points, "point")
    end = "before it broke" if broke is not None else "and never came back"
    return Moment(
        kind="growth",
        step=int(mine.steps[start]),
        until=int(mine.steps[-1]),
        row=int(mine.rows[start]),
        text=f"{column.name} grew from {show(base)} to {show(last)} over {rising} {end}",
        column=column.name,
        value=last,
        numbers={"before": base, "ratio": last / base, "points": float(points), "end": float(broke is None)},
    )

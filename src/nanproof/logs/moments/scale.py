"""The loss scale and the steps that were skipped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..series import Column, EventKind, Ints, Series
from .moment import Moment, MomentKind, many, show, span


def find_scale(series: Series) -> list[Moment]:
    """Falls of the loss scale: the search at the start, single ones, and the collapse."""
    scale = series.loss_scale
    if scale is None:
        return []
    good = scale.only(~scale.bad & (scale.values > 0))  # 0 is rounding
    falls = np.flatnonzero(np.diff(good.values) < 0) + 1
    if not len(falls):
        return []
    found = []
    rises = np.flatnonzero(np.diff(good.values) > 0) + 1
    first_rise = int(rises[0]) if len(rises) else len(good)
    early = _early(series, good.rows) & (falls[0] <= max(3, len(good) // 4))
    search = [i for i in falls.tolist() if i < first_rise and early[i]]
    if search:
        found.append(_fall(series, good, search, "scale-collapse" if _sinks(series, good, search) else "scale-search"))
    rest = [i for i in falls.tolist() if i not in set(search)]
    if rest:
        lowest = int(np.argmin(good.values[rest[0] :])) + rest[0]
        top = float(good.values[max(0, rest[0] - 1)])
        fell = top / float(good.values[lowest])
        stays = float(good.values[-1]) <= 8 * float(good.values[lowest])
        collapse = stays and (fell >= 2**8 or (float(good.values[lowest]) <= 1.0 and fell >= 2**4))
        found.append(_fall(series, good, rest, "scale-collapse" if collapse else "scale-fall"))
    return found


SUNK = 2.0**-8
"""Gradients times this are smaller than without a scale: no search ends there."""
FLOOR = 1.0
"""A search that settles does so far above this; one that reaches it has nothing left to halve."""


def _sinks(series: Series, good: Column, search: list[int]) -> bool:
    """Whether a search at the start never settled: down to 1 or below, or down with a loss that is NaN throughout."""
    lowest, end = float(good.values[search].min()), float(good.values[-1])
    if any(e.name == "scale-minimum" for e in series.events):
        return True
    if lowest < SUNK:
        return True
    if len(search) < 4 or end > lowest:
        return False
    loss = series.loss
    dead = loss is not None and len(loss) > 0 and bool(loss.bad[-1])
    return lowest < FLOOR or (lowest <= FLOOR and float(good.values[0]) / lowest >= 2**8) or dead


def _early(series: Series, rows: Ints) -> NDArray[np.bool_]:
    """Whether points stand in the first twentieth of the log, or in its first 50 rows."""
    last = max((int(c.rows[-1]) for c in series.columns.values() if len(c)), default=0)
    return np.asarray(rows <= max(50, last // 20))


def _fall(series: Series, good: Column, places: list[int], kind: MomentKind) -> Moment:
    first, last = places[0], places[-1]
    before, lowest = float(good.values[max(0, first - 1)]), float(good.values[places].min())
    where = span(series, int(good.steps[first]), int(good.steps[last]))
    falls = many(len(places), "fall")
    fall = f"from {show(before)} to {show(lowest)}"
    texts: dict[MomentKind, str] = {
        "scale-search": f"the loss scale comes down {fall} at the start: its usual search",
        "scale-fall": f"the loss scale falls {many(len(places), 'time')} ({where}), {fall} at the lowest",
        "scale-collapse": f"the loss scale collapses {fall} ({where}, {falls})",
    }
    return Moment(
        kind=kind,
        step=int(good.steps[first]),
        until=int(good.steps[last]),
        row=int(good.rows[first]),
        text=texts[kind],
        column=good.name,
        value=lowest,
        benign=kind != "scale-collapse",
        numbers={"before": before, "lowest": lowest, "falls": float(len(places))},
    )


def find_skips(series: Series) -> list[Moment]:
    """Steps that were skipped, by the log's own count or by its messages, and iterations that it calls NaN."""
    nan_counts = series.of("nan_count")
    return [
        *(_counted(series, series.skipped, "skipped", "were skipped") if series.skipped is not None else []),
        *(_counted(series, nan_counts[0], "nan-iterations", "were NaN by the log's own count") if nan_counts else []),
        *_told(series),
    ]


def _counted(series: Series, column: Column, kind: MomentKind, words: str) -> list[Moment]:
    good = column.only(~column.bad)
    counts = good.values
    # Megatron's "number of skipped iterations" is that of one line, DeepSpeed's "skipped" a running total
    # and NaN among parameters or gradients are no number of steps at all
    steps = kind == "skipped" or any(w in column.name.lower() for w in ("iter", "step", "batch", "update"))
    counts_on = steps and not column.name.lower().startswith("num")
    running = counts_on and bool((np.diff(counts) >= 0).all()) and len(counts) > 1
    more = np.flatnonzero(np.diff(counts, prepend=0.0) > 0 if running else counts > 0)
    total = int(counts[-1]) if running else int(counts.sum())
    if not len(more) or not total:
        return []
    first, last = int(good.steps[more[0]]), int(good.steps[more[-1]])
    passed = (int(column.steps[-1]) - int(column.steps[0]) + 1) if series.unit == "step" else 0
    most = kind == "skipped" and total >= 10 and total >= 0.5 * passed > 0
    words += ", half of all steps or more" if most else ""
    what = f"{many(total, 'step')} {words}" if steps else f"{column.name} is above 0 at {many(len(more), 'point')}"
    return [
        Moment(
            kind=kind,
            step=first,
            until=last,
            row=int(good.rows[more[0]]),
            column=column.name,
            value=float(total),
            text=f"{what} ({span(series, first, last)})",
            benign=kind == "skipped" and not most,
            numbers={"count": float(total)},
        )
    ]


def _told(series: Series) -> list[Moment]:
    """Overflows and skips that the log reports in words."""
    found = []
    kinds: tuple[tuple[EventKind, MomentKind, str], ...] = (
        ("overflow", "overflow", "overflow"),
        ("skip", "skipped", "skipped step"),
    )
    for kind, moment, word in kinds:
        events = [e for e in series.events if e.kind == kind]
        if not events:
            continue
        count = series.counts[kind]
        steps = [e.step for e in events if e.step is not None] or [0]
        text = f"the log reports {many(count, word)} ({span(series, min(steps), max(steps))})"
        found.append(
            Moment(
                kind=moment,
                step=steps[0],
                until=max(steps),
                row=events[0].row,
                text=text,
                line=events[0].line,
                benign=True,
                numbers={"count": float(count)},
            )
        )
    return found

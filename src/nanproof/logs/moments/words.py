"""What the log says in words, and where its steps go back."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..messages import OUTSIDE, OWN_ERRORS
from ..series import Column, Event, EventKind, Series
from .moment import Moment, MomentKind, at, many, show

_KINDS: dict[EventKind, MomentKind] = {
    "nan": "message",
    "exception": "exception",
    "stop": "stop",
    "rollback": "rollback",
    "hardware": "hardware",
    "incident": "incident",
    "finished": "finished",
}


def find_words(series: Series) -> list[Moment]:
    """The first of every sort of event, with the number of the others; warnings only when they are known ones."""
    found: dict[tuple[str, str], Moment] = {}
    counts: dict[tuple[str, str], int] = {}
    for event in series.events:
        kind = _KINDS.get(event.kind) or ("warning" if event.kind == "warning" and event.name else None)
        if kind is None:
            continue
        key = (kind, event.name or (event.details.get("error", "") if kind == "exception" else ""))
        counts[key] = counts.get(key, 0) + 1
        if key not in found:
            found[key] = Moment(
                kind=kind,
                step=event.step or 0,
                row=event.row,
                text=event.text,
                name=event.name,
                line=event.line,
                benign=kind == "finished",
            )
    return [_counted(moment, counts[key]) for key, moment in found.items()]


def find_outside(series: Series) -> Event | None:
    """What ended the run, after its last row, that its numbers are not to blame for: no memory, a bug of the script."""
    return next((e for e in series.events if is_outside(e) and e.row >= series.rows), None)


def is_outside(event: Event) -> bool:
    return event.name in OUTSIDE or (event.kind == "exception" and OWN_ERRORS.match(event.text.lstrip()) is not None)


def _counted(moment: Moment, count: int) -> Moment:
    words = moment.text if count == 1 else f"{moment.text} (and {many(count - 1, 'more time')} like it)"
    return dataclasses.replace(moment, text=words, numbers={"count": float(count)})


def find_resumes(series: Series) -> list[Moment]:
    """Where the steps go back, and where the log says that it goes on from a checkpoint."""
    found = []
    for before, after in zip(series.segments, series.segments[1:], strict=False):
        text = f"steps go back from {before.last_step:,} to {after.first_step:,}: a resume or a rollback"
        found.append(_resume(series, after.first_row, after.first_step, text, float(before.last_step)))
    rows = [m.row for m in found]
    for event in series.events:
        if event.kind == "resume" and not any(abs(event.row - row) <= 50 for row in rows):
            step = event.step or 0
            found.append(_resume(series, event.row, step, f"resumed at {at(series, step)}: {event.text}", None))
            rows.append(event.row)
    return sorted(found, key=lambda m: m.row)


def _resume(series: Series, row: int, step: int, text: str, before: float | None) -> Moment:
    numbers = {} if before is None else {"before": before}
    for column, word in ((series.loss, "loss"), (series.lr, "lr")):
        around = _around(column, row)
        if around is not None:
            numbers |= {f"{word}_before": around[0], f"{word}_after": around[1]}
            text += f"; {word} {show(around[0])} before, {show(around[1])} after"
    return Moment(kind="resume", step=step, row=row, text=text, benign=True, numbers=numbers)


def _around(column: Column | None, row: int) -> tuple[float, float] | None:
    """The values before and after a row."""
    if column is None or not len(column):
        return None
    place = int(np.searchsorted(column.rows, row))
    return (float(column.values[place - 1]), float(column.values[place])) if 0 < place < len(column) else None

"""What became non-finite, in which order, for how long, and what was hidden."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..names import Role
from ..series import Column, Event, Floats, Series, nonfinite_kinds
from .moment import Moment, MomentKind, at, many, show, span

# Of several that turn bad in one row, the cause comes before its consequences: a bad part makes a bad loss makes bad
# gradients.
ORDER: dict[Role, int] = {"component": 0, "loss": 1, "grad_norm": 2, "eval": 3, "loss_scale": 4, "lr": 5, "other": 6}
_HIDDEN = (
    "loss 0.0 with grad_norm {word} from {place} on ({count}): NaN, hidden by the Trainer's logging_nan_inf_filter"
)
_MASKED = (
    "loss 0.0 with grad_norm 0.0 from {place} on ({count}): nothing in the batch counts, as when all labels are masked"
)
_ZERO = "loss is exactly 0.0 from {place} on ({count}); older Trainers print 0.0 for NaN"
TINY = 5e-3
"""Below this a loss may well be printed as 0."""
METRICS = 20
"""How many columns that are neither losses nor norms are told about."""


def find_nonfinite(series: Series) -> list[Moment]:
    """For every column that holds NaN or Inf: since when, how often, and what came before."""
    told = [c for c in series.columns.values() if c.role in ORDER and not _is_summary(series, c)]
    found = [m for c in told if (m := _nonfinite(series, c)) is not None]
    found.sort(key=lambda m: (m.row, ORDER[series.columns[m.column].role]))
    metrics = [m for m in found if series.columns[m.column].role == "other"]
    return [m for m in found if m not in metrics[METRICS:]]


def _is_summary(series: Series, column: Column) -> bool:
    """Another name of the loss that is printed once at the end."""
    loss = series.loss
    return column.role == "loss" and loss is not None and column is not loss and 4 * column.total < loss.total


def _nonfinite(series: Series, column: Column) -> Moment | None:
    bad = column.bad
    if not bad.any():
        return None
    first, last = int(np.argmax(bad)), len(bad) - 1 - int(np.argmax(bad[::-1]))
    stretches = int(np.count_nonzero(np.diff(bad.astype(np.int8), prepend=0) == 1))
    step, count = int(column.steps[first]), int(bad.sum())
    numbers = {"count": float(count), "stretches": float(stretches), "points": float(column.total)}
    word = show(float(column.values[first]))
    before = np.flatnonzero(~bad[:first])
    if len(before):
        numbers |= {
            "last_finite": float(column.values[before[-1]]),
            "last_finite_step": float(column.steps[before[-1]]),
        }
    if series.lr is not None and len(rate := _rate_at(series, column, first)):
        numbers["lr"] = rate[0]
    if stretches > 1 and not bad[-1]:
        some = ", ".join(f"{s:,}" for s in column.steps[bad][:4].tolist()) + (", …" if count > 4 else "")
        word = word if len(nonfinite_kinds(column.values[bad])) == 1 else "not finite"
        text = f"{column.name} is {word} at {many(count, 'point')} ({series.unit}s {some}) and finite between"
    elif stretches > 1:
        share = f"{count:,} of {column.total:,} points"
        text = f"{column.name} is {word} at {share}, first at {at(series, step)}, and at the end"
    elif bad[-1]:
        text = f"{column.name} is {word} since {at(series, step)}"
    else:
        text = f"{column.name} is {word} at {span(series, step, int(column.steps[last]))} and finite again after"
    if "last_finite" in numbers:
        place = at(series, int(numbers["last_finite_step"]))
        text += f"; the last finite value was {show(numbers['last_finite'])} at {place}"
    else:
        text += "; it was never finite before"
    if column.role == "eval" and series.loss is not None and step <= int(series.loss.steps[0]) and step <= 1:
        text += ", before any update"
    if numbers.get("lr") == 0.0:
        text += "; the learning rate was 0"
    return Moment(
        kind="nonfinite",
        step=step,
        row=int(column.rows[first]),
        text=text,
        until=int(column.steps[last]),
        column=column.name,
        value=float(column.values[first]),
        numbers=numbers,
    )


def _rate_at(series: Series, column: Column, index: int) -> list[float]:
    assert series.lr is not None
    one = np.zeros(len(column), np.bool_)
    one[index] = True
    point = column.only(one)
    return series.beside(point, series.lr).tolist() if series.matched(point, series.lr).all() else []


def find_zeros(series: Series) -> list[Moment]:
    """A loss of exactly 0.0: NaN behind the HF Trainer's filter, or no label that counts."""
    loss, norm = series.loss, series.grad_norm
    if loss is None:
        return []
    zero = loss.values == 0.0
    if not zero.any():
        return []
    if norm is None:
        return _bare_zeros(series, loss, zero)
    there = series.matched(loss, norm)
    norms = series.beside(loss, norm)
    found = []
    hidden = zero & there & ~np.isfinite(norms)
    if hidden.any():
        found.append(_zeros(series, loss, hidden, "hidden-nan", _HIDDEN, norms))
    masked = zero & there & (norms == 0.0)
    if masked.sum() >= 2 or (masked.any() and masked[0]):
        found.append(_zeros(series, loss, masked, "masked-loss", _MASKED, norms))
    # a loss that is 0 all along while gradients flow is a policy's; one that turns to 0 is not
    return found or (_bare_zeros(series, loss, zero) if not zero.all() else [])


def _bare_zeros(series: Series, loss: Column, zero: NDArray[np.bool_]) -> list[Moment]:
    """Where no norm tells more, zeros are worth a word when they come in a row, to the end, after a loss above."""
    tail = len(zero) if zero.all() else int(np.argmin(zero[::-1]))
    above = loss.values[~zero]
    if tail < 2 or (len(above) and float(np.median(above)) < 0.1 and (tail < 3 or above[-20:].min() < TINY)):
        return []
    mask = np.arange(len(zero)) >= len(zero) - tail
    found = _zeros(series, loss, mask, "zero-loss", _ZERO, loss.values)
    return [replace(found, numbers={**found.numbers, "whole": float(tail == len(zero))})]


def _zeros(series: Series, loss: Column, mask: NDArray[np.bool_], kind: MomentKind, text: str, norms: Floats) -> Moment:
    first = int(np.argmax(mask))
    step, count = int(loss.steps[first]), int(mask.sum())
    words = text.format(word=show(float(norms[first])), place=at(series, step), count=many(count, "point"))
    return Moment(
        kind=kind,
        step=step,
        row=int(loss.rows[first]),
        text=words,
        until=int(loss.steps[np.flatnonzero(mask)[-1]]),
        column=loss.name,
        value=0.0,
        numbers={"count": float(count)},
    )


_OMIT = "loggers that cannot write NaN omit it"
FEW_MISSING = 5
"""Points after the last loss, in the pace of the loss, from which on it is missed."""


def find_missing(series: Series) -> list[Moment]:
    """A loss that is left out to the end while what was written beside it goes on: JSON and CSV may hold no NaN."""
    losses = [c for c in series.of("loss") or series.components if len(c)]
    last = max(losses, key=lambda c: int(c.rows[-1]), default=None)
    judged = [c for c in series.evals if "loss" in c.name.lower() and len(c)]
    missed = [m for c in ([last] if last is not None else []) + judged if (m := _missing(series, c)) is not None]
    return [*_gaps(series), *missed]


def _gaps(series: Series) -> Iterator[Moment]:
    """Values that were written as no number, by column."""
    found: dict[str, list[Event]] = {}
    for event in series.events:
        if event.kind == "gap":
            found.setdefault(event.name, []).append(event)
    for name, events in found.items():
        first = events[0]
        step = first.step or 0
        count = many(len(events), "row")
        text = f"{name} has no readable value in {count}, first at {at(series, step)}: “{first.text}”"
        until = events[-1].step
        yield Moment(
            kind="missing-loss", step=step, row=first.row, until=until, text=text, column=name, line=first.line
        )


def _missing(series: Series, loss: Column) -> Moment | None:
    for other in series.columns.values():
        apart = other.role in ("time", "epoch") or (other.role == "eval" and loss.role != "eval")
        if apart or not len(other) or not series.matched(loss, other).all():
            continue
        after = other.steps[other.rows > loss.rows[-1]]
        if len(after) >= FEW_MISSING * max(1.0, len(other) / len(loss)):
            ends = f"{loss.name} ends at {at(series, int(loss.steps[-1]))}"
            text = f"{ends}, {other.name} goes on to {at(series, int(after[-1]))}: {_OMIT}"
            step, row = int(after[0]), int(loss.rows[-1]) + 1
            return Moment(kind="missing-loss", step=step, row=row, until=int(after[-1]), text=text, column=loss.name)
    last = series.segments[-1].last_step if series.format in ("csv", "jsonl", "history") else 0
    pace = float(np.median(np.diff(loss.steps))) if len(loss) > 1 else 0.0
    if loss.role != "eval" and pace > 0 and last - int(loss.steps[-1]) >= FEW_MISSING * pace:
        text = f"{loss.name} ends at {at(series, int(loss.steps[-1]))}, the rows go on to {at(series, last)}: {_OMIT}"
        step, row = int(loss.steps[-1]) + 1, int(loss.rows[-1]) + 1
        return Moment(kind="missing-loss", step=step, row=row, until=last, text=text, column=loss.name)
    return None


def find_dead(series: Series) -> list[Moment]:
    """For every segment that ends non-finite: how long it went on like that."""
    found = []
    for index in range(len(series.segments)):
        phases = [p for c in _living(series) if (p := _dead(series, c, index)) is not None]
        if phases:
            found.append(min(phases, key=lambda m: m.row))
    return found


def _living(series: Series) -> list[Column]:
    """What a run lives by: its loss, or the parts of it, or its gradients."""
    parts = [c for c in series.components if c.role == "component"] if series.loss is None else [series.loss]
    return [*parts, *([series.grad_norm] if series.grad_norm is not None else [])]


def _dead(series: Series, column: Column, index: int) -> Moment | None:
    segment = series.segments[index]
    end = series.segments[index + 1].first_row if index + 1 < len(series.segments) else 2**62
    mine = (column.rows >= segment.first_row) & (column.rows < end)
    rows, steps, bad = column.rows[mine], column.steps[mine], column.bad[mine]
    if not len(bad) or not bad[-1]:
        return None
    good = np.flatnonzero(~bad)
    first = int(good[-1]) + 1 if len(good) else 0
    began, last = int(steps[first]), int(steps[-1])
    gap = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    length, whole = last - began + max(gap, 1), max(1, last - segment.first_step + max(gap, 1))
    share = min(1.0, length / whole)
    numbers = {"steps": float(length), "share": share, "points": float(len(bad) - first)}
    values = column.values[mine][first:]
    text = f"{column.name} stays {' or '.join(nonfinite_kinds(values))} for the last {many(length, series.unit)}"
    if len(values) > 1:
        part = f"{series.unit}s since the resume at {segment.first_step:,}" if index else "run"
        text += f" ({100 * share:.0f} % of the {part})"
    seconds = _seconds(series, int(rows[first]), int(rows[-1]))
    if seconds > 60:
        numbers["seconds"] = seconds
        text += f", {seconds / 3600:.1f} hours" if seconds >= 3600 else f", {seconds / 60:.0f} minutes"
    return Moment(
        kind="dead",
        step=began,
        until=last,
        row=int(rows[first]),
        text=text,
        column=column.name,
        value=float(column.values[mine][-1]),
        numbers=numbers,
    )


def _seconds(series: Series, first_row: int, last_row: int) -> float:
    """The time between two rows, by a clock that may go back."""
    if series.time is None:
        return 0.0
    mine = (series.time.rows >= first_row) & (series.time.rows <= last_row) & ~series.time.bad
    forward = np.diff(series.time.values[mine])
    return float(forward[forward > 0].sum())

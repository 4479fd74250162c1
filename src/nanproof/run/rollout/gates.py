"""Does a stage let the next one start? Pure functions of what its log says."""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...logs.series import Column, Series
from .plan import Gates, Limit, Stage

_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
JUMP = 3.0  # a loss this many times the median of the ten before it does not fall smoothly


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate, and whether it is open."""

    name: str
    open: bool
    reason: str


def judge(stage: Stage, series: Series | None, incidents: int, ended: str) -> tuple[Gate, ...]:
    """All gates of a stage. ``ended`` says what is wrong with how it ended; empty when nothing is."""
    gates = [Gate(name="ended", open=not ended, reason=ended or "as it should")]
    if series is None or series.loss is None:
        told = "no log with a loss was found: name it in log:, or print loss lines"
        return (*gates, Gate(name="log", open=False, reason=told))
    if stage.steps is not None:
        done = int(series.loss.steps[-1]) if len(series.loss) else 0
        # the last logged step may come some steps before the end
        enough = done >= 0.8 * stage.steps
        gates.append(Gate(name="steps", open=enough, reason=f"{done:,} of {stage.steps:,} logged"))
    return (*gates, *_asked(stage.gates, series, incidents))


def _asked(gates: Gates, series: Series, incidents: int) -> Iterator[Gate]:
    assert series.loss is not None
    if gates.incidents is not None:
        yield _incidents(gates.incidents, series, incidents)
    if gates.loss == "falling":
        yield _falling(series.loss)
    if gates.loss_below is not None:
        yield _below(series.loss, gates.loss_below.value, gates.loss_below.by)
    if gates.grad_norm is not None:
        yield _band(series.grad_norm, *gates.grad_norm)
    for limit in gates.watch:
        yield _watched(series, limit)


def _incidents(allowed: int, series: Series, incidents: int) -> Gate:
    columns = [c for c in (series.loss, series.grad_norm, *series.components) if c is not None]
    bad = [(int(c.steps[c.bad][0]), c.name) for c in columns if c.bad.any()]
    count = max(incidents, len(bad))
    if not count:
        return Gate(name="incidents", open=True, reason="none")
    first = f", first: {min(bad)[1]} at step {min(bad)[0]:,}" if bad else ""
    return Gate(name="incidents", open=count <= allowed, reason=f"{count} ({allowed} allowed){first}")


def _falling(loss: Column) -> Gate:
    values = loss.values[np.isfinite(loss.values)]
    if len(values) < 3:
        return Gate(name="loss falling", open=False, reason=f"{len(values)} finite values are too few to tell")
    third = max(1, len(values) // 3)
    first, last = float(values[:third].mean()), float(values[-third:].mean())
    told = f"{first:.4g} → {last:.4g}"
    if not last < first:
        return Gate(name="loss falling", open=False, reason=f"{told}: it does not fall")
    for i in range(10, len(values)):
        usual = float(np.median(np.abs(values[i - 10 : i])))
        if usual > 0 and abs(values[i]) > JUMP * usual:
            where = int(loss.steps[np.isfinite(loss.values)][i])
            return Gate(name="loss falling", open=False, reason=f"{told}, but {values[i]:.4g} at step {where:,}")
    return Gate(name="loss falling", open=True, reason=told)


def _below(loss: Column, value: float, by: int) -> Gate:
    upto = loss.values[(loss.steps <= by) & np.isfinite(loss.values)]
    lowest = float(upto.min()) if len(upto) else math.inf
    return Gate(name="loss below", open=lowest < value, reason=f"{lowest:.4g} by step {by:,}, target {value:g}")


def _band(norm: Column | None, low: float, high: float) -> Gate:
    if norm is None or not len(norm):
        return Gate(name="gradient norm", open=False, reason="the log holds none")
    outside = (norm.values < low) | (norm.values > high) | norm.bad
    told = f"{np.nanmin(norm.values):.3g} to {np.nanmax(norm.values):.3g}, band {low:g} to {high:g}"
    where = f", outside at step {int(norm.steps[outside][0]):,}" if outside.any() else ""
    return Gate(name="gradient norm", open=not outside.any(), reason=told + where)


def _watched(series: Series, limit: Limit) -> Gate:
    pattern = f"*{limit.name}*" if "*" not in limit.name else limit.name
    columns = [c for c in series.columns.values() if fnmatch.fnmatchcase(c.name, pattern)]
    if not columns:
        return Gate(name=str(limit), open=False, reason=f"the log holds nothing called {limit.name}")
    for column in columns:
        wrong = ~_SIGNS[limit.sign](column.values, limit.value)
        if wrong.any():
            at = int(np.argmax(wrong))
            told = f"{column.name} is {column.values[at]:.4g} at step {int(column.steps[at]):,}"
            return Gate(name=str(limit), open=False, reason=told)
    last = ", ".join(f"{c.name} {c.values[-1]:.4g}" for c in columns[:4])
    return Gate(name=str(limit), open=True, reason=last)

"""A run at a glance: the few numbers that a terminal shows. Pure: from what was read to what is said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..logs.series import Column, Series

RECENT = 240  # points of a sparkline


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One quantity: its last value, and the recent ones to draw."""

    name: str
    last: float
    recent: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What is shown of a run."""

    name: str
    step: int
    max_steps: int | None
    unit: str
    pace: float | None
    """Steps per second over the recent points."""
    curves: tuple[Curve, ...]
    counts: dict[str, int]
    incidents: tuple[dict[str, Any], ...]
    alarm: str
    """What is wrong right now; empty when nothing is."""

    @property
    def left(self) -> float | None:
        """Seconds to go."""
        if not self.pace or self.max_steps is None:
            return None
        return max(0, self.max_steps - self.step) / self.pace


def glance(name: str, series: Series, incidents: Sequence[dict[str, Any]]) -> Glance:
    """The glance at a run as it stands."""
    columns = [c for c in (series.loss, series.grad_norm, series.lr, series.loss_scale) if c is not None and len(c)]
    columns += [c for c in series.components if len(c)][:3]
    step = max((int(c.steps[-1]) for c in columns), default=0)
    counts = {k: n for k, n in series.counts.items() if k in ("skip", "rollback", "overflow", "resume", "stop")}
    return Glance(
        name=name, step=step, max_steps=series.max_steps, unit=series.unit, pace=_pace(series),
        curves=tuple(_curve(c) for c in columns), counts=counts, incidents=tuple(incidents[-4:]), alarm=_alarm(columns),
    )  # fmt: skip


def _curve(column: Column) -> Curve:
    return Curve(name=column.name, last=float(column.values[-1]), recent=tuple(column.values[-RECENT:].tolist()))


def _alarm(columns: Sequence[Column]) -> str:
    """The quantities whose last value is not finite, and since when."""
    for column in columns:
        if math.isfinite(column.values[-1]):
            continue
        finite = np.flatnonzero(np.isfinite(column.values))
        first = int(finite[-1]) + 1 if len(finite) else 0
        since, count = int(column.steps[first]), len(column) - first
        return f"{column.name} is {column.values[-1]} since step {since:,} ({count:,} logged values)"
    return ""


def _pace(series: Series) -> float | None:
    clock = series.time
    if clock is None or len(clock) < 2:
        return None
    steps, seconds = clock.steps[-50:], clock.values[-50:]
    span = float(seconds[-1] - seconds[0])
    made = int(steps[-1] - steps[0])
    return made / span if span > 0 and made > 0 and math.isfinite(span) else None


def value(number: float) -> str:
    """A number in few characters."""
    if not math.isfinite(number):
        return str(number)
    if number and (abs(number) < 1e-3 or abs(number) >= 1e6):
        return f"{number:.2e}"
    return f"{number:,.0f}" if number == int(number) else f"{number:.4g}"


def duration(seconds: float) -> str:
    """
    >>> duration(59), duration(3700), duration(200_000)
    ('59 s', '1 h 01 min', '2 d 7 h')
    """
    s = int(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60:02} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"

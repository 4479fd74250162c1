"""A run at a glance: the few numbers that a terminal shows. Pure: from what was read to what is said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..logs.foresee import Outlook
from ..logs.series import Column, Series
from .state import RunState, Signs, state_of, word

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
    state: RunState
    warning: str = ""
    """What it is heading for, while it is running."""

    @property
    def alarm(self) -> str:
        """What is not finite right now; empty when nothing is."""
        return self.state.why if self.state.since is not None else ""

    @property
    def left(self) -> float | None:
        """Seconds to go."""
        if not self.pace or self.max_steps is None or self.state.kind != "running":
            return None
        return max(0, self.max_steps - self.step) / self.pace


def glance(
    name: str,
    series: Series,
    incidents: Sequence[dict[str, Any]],
    state: RunState | None = None,
    outlook: Outlook | None = None,
) -> Glance:
    """The glance at a run as it stands; without a state, that of a log of which nothing else is known."""
    columns = [c for c in (series.loss, series.grad_norm, series.lr, series.loss_scale) if c is not None and len(c)]
    columns += [c for c in series.components if len(c)][:3]
    step = max((int(c.steps[-1]) for c in columns), default=0)
    counts = {k: n for k, n in series.counts.items() if k in ("skip", "rollback", "overflow", "resume", "stop")}
    state = state or state_of(series, Signs())
    alive = outlook is not None and state.since is None and not state.bad
    return Glance(
        name=name,
        step=step,
        max_steps=series.max_steps,
        unit=series.unit,
        pace=_pace(series),
        curves=tuple(_curve(c) for c in columns),
        counts=counts,
        incidents=tuple(incidents[-4:]),
        state=state,
        warning=outlook.warning if outlook is not None and alive else "",
    )


def _curve(column: Column) -> Curve:
    return Curve(name=column.name, last=float(column.values[-1]), recent=tuple(column.values[-RECENT:].tolist()))


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
        return word(number)
    if number and (abs(number) < 1e-3 or abs(number) >= 1e6):
        return f"{number:.2e}"
    return f"{number:,.0f}" if number == int(number) else f"{number:.4g}"

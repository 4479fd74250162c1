"""A live chart of a guarded training in a notebook: ``nanproof.watch(guard)`` in a cell, then train in the next one."""

from __future__ import annotations

import html
import math
import time
from typing import Any

import numpy as np

from ..errors import UsageError
from ..records import Action, Incident, Reading, Verdict
from .glance import value
from .history import stretches, thin
from .state import word

EVERY = 0.5  # seconds between two pictures: a cell must not be flooded
WIDTH, HEIGHT, LEFT, POINTS = 720, 200, 64, 400
BLUE, RED = "#2f6fd0", "#c8102e"


class LiveChart:
    """Hears of every step of a guard, and redraws one output of the notebook now and then."""

    def __init__(self, show: Any) -> None:
        self.losses: list[tuple[int, float]] = []
        self.incidents: list[Incident] = []
        self._handle = show(_Html(self.html()), display_id=True)
        self._drawn = time.monotonic()

    def step_ended(self, reading: Reading, verdict: Verdict, action: Action, update: int) -> None:
        self.losses.append((reading.step, reading.loss))
        if time.monotonic() - self._drawn > EVERY or not verdict.ok:
            self.draw()

    def incident(self, incident: Incident) -> None:
        self.incidents.append(incident)
        self.draw()

    def examining(self, on: bool) -> None:
        """Nothing to see while a step is replayed."""

    def event(self, **fields: object) -> None:
        """Resumes and refused saves are in the log."""

    def closed(self) -> None:
        self.draw()

    def _ipython_display_(self) -> None:
        """Shown already: as the last line of a cell it would print its repr below the chart."""

    def draw(self) -> None:
        self._drawn = time.monotonic()
        self._handle.update(_Html(self.html()))

    def html(self) -> str:
        return chart(self.losses, self.incidents)


class _Html:
    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return self._text


def chart(losses: list[tuple[int, float]], incidents: list[Incident]) -> str:
    """The loss as an SVG with bands where it was not finite, and the incidents below.

    >>> "NaN 2" in chart([(1, 1.0), (2, math.nan), (3, 0.5)], [])
    True
    """
    if not losses:
        return "<p>nanproof: waiting for the first step</p>"
    step, last = losses[-1]
    shown = value(last) if math.isfinite(last) else word(last)
    count = f"{len(incidents):,} incident{'' if len(incidents) == 1 else 's'}"
    head = f"<p><b>nanproof</b> step {step:,} · loss {shown} · {count}</p>"
    rows = "".join(f"<li>{html.escape(f'{i.verdict} → {i.action.kind}')}</li>" for i in incidents[-5:])
    return f"{head}{_svg(losses)}{f'<ul>{rows}</ul>' if rows else ''}"


def _svg(losses: list[tuple[int, float]]) -> str:
    from ..logs.series import Column

    steps, values = np.array([s for s, _ in losses]), np.array([v for _, v in losses], np.float64)
    column = Column(name="loss", role="loss", rows=np.arange(len(steps)), steps=steps, values=values, total=len(steps))
    part = thin(column, POINTS // 2)
    finite = part.values[~part.bad]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    first, span = float(steps.min()), float(steps.max() - steps.min()) or 1.0

    def x(at: float) -> float:
        return LEFT + (at - first) / span * (WIDTH - LEFT - 8)

    def y(at: float) -> float:
        return 24 + (1 - (at - low) / ((high - low) or 1.0)) * (HEIGHT - 48)

    def label(words: str, left: float, down: float, anchor: str) -> str:
        look = f'text-anchor="{anchor}" font-size="11" fill="currentColor" opacity=".65"'
        return f'<text x="{left:.0f}" y="{down:.0f}" {look}>{words}</text>'

    parts = [label(value(v), LEFT - 6, y(v) + 4, "end") for v in dict.fromkeys((low, high))]
    parts += [label(f"{int(at):,}", x(at), HEIGHT - 4, "middle") for at in dict.fromkeys((first, first + span))]
    for start, end, *counts in stretches(column):
        kinds = ", ".join(w for w, n in zip(("NaN", "Inf", "-Inf"), counts, strict=True) if n)
        words = f"{kinds} {start:,}" + (f"–{end:,}" if end > start else "")
        wide = max(2.0, x(end) - x(start))
        parts.append(
            f'<rect x="{x(start):.1f}" y="0" width="{wide:.1f}" height="{HEIGHT - 20}" fill="{RED}" opacity=".18"/>'
        )
        parts.append(f'<text x="{min(x(start) + 2, WIDTH - 90):.1f}" y="12" font-size="11" fill="{RED}">{words}</text>')
    lines, points = [], []
    for at, v in zip(part.steps.tolist(), part.values.tolist(), strict=True):
        if math.isfinite(v):
            points.append(f"{x(at):.1f},{y(v):.1f}")
        elif points:
            lines.append(points)
            points = []
    for line in [*lines, points]:
        if line:
            parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="{BLUE}" stroke-width="1.3"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">{"".join(parts)}</svg>'


def watch_guard(guard: Any) -> LiveChart:
    """Show a live chart of a guard's steps in this cell."""
    if not hasattr(guard, "subscribe"):
        raise UsageError(f"watch takes a Guard, not a {type(guard).__name__}", hint="nanproof.watch(guard)")
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ModuleNotFoundError:
        raise UsageError("watch(guard) draws in a notebook", hint="in a terminal: nanproof watch RUN") from None
    if get_ipython() is None:
        raise UsageError("watch(guard) draws in a notebook", hint="in a terminal: nanproof watch RUN")
    live = LiveChart(display)
    guard.subscribe(live)
    return live

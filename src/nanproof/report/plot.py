"""Curves as a picture for a slide: logarithmic, non-finite steps in red, and how many steps were plotted."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from ..files import write_atomic
from ..logs.series import Column
from ..watch.history import stretches, thin
from ..watch.runs import Run

WIDTH = 2000
COLORS = (
    "#2f6fd0",
    "#d97706",
    "#159267",
    "#9b4fd1",
    "#c2447e",
    "#5b6673",
    "#0e9aa7",
    "#8a5a2b",
    "#6b8e23",
    "#e0567a",
    "#4b4fb8",
    "#a08c00",
)  # as in the page
MANY = 3  # runs whose legend has room within the curves


def write_png(runs: Sequence[Run], out: str | os.PathLike[str]) -> None:
    """Write loss and gradient norm of some runs as one picture."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError("pictures need matplotlib", hint="pip install 'nanproof[plots]'") from None
    for run in runs:
        run.poll()
    color = {r.id: COLORS[i % len(COLORS)] for i, r in enumerate(runs)}
    losses = [(r.name, color[r.id], r.series.loss) for r in runs]
    norms = [(r.name, color[r.id], r.series.grad_norm) for r in runs]
    shown = [
        (title, [(n, k, c) for n, k, c in group if c is not None and len(c)])
        for title, group in (("loss", losses), ("gradient norm", norms))
    ]
    shown = [(title, group) for title, group in shown if group]
    if not shown:
        raise UsageError("there is no loss and no gradient norm to plot", hint="name a run folder or a log with one")
    figure = Figure(figsize=(10 if len(runs) <= MANY else 13, 3.4 * len(shown)), layout="constrained")
    for place, (title, group) in enumerate(shown, 1):
        _draw(figure.add_subplot(len(shown), 1, place), title, group)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_atomic(out, picture.getvalue())


def _draw(axes: Any, title: str, group: Sequence[tuple[str, str, Column]]) -> None:
    positive = all((c.values[np.isfinite(c.values)] > 0).all() for _, _, c in group)
    told, row = [], 0
    for name, color, column in group:
        part = thin(column, WIDTH)
        finite = np.isfinite(part.values)
        shown = np.where(finite, part.values, np.nan)  # no line leads across what is not finite
        bad = stretches(column)
        _bands(axes, bad, color, row)
        row += bool(bad)
        count = sum(sum(counts) for _, _, *counts in bad)
        what = "steps" if len(part) == column.total else "steps, thinned to their extremes"
        told.append(f"{column.total:,} {what}" + (f", {count:,} not finite" if count else ""))
        label = f"{name} ({told[-1]})".replace("$", r"\$")
        axes.plot(part.steps, shown, linewidth=1, color=color, label=label)
    low, high = min(int(c.steps.min()) for *_, c in group), max(int(c.steps.max()) for *_, c in group)
    axes.set_xlim(low, high + (low == high))
    if positive:
        axes.set_yscale("log")
    axes.set_title(f"{title} ({told[0]})" if len(group) == 1 else title, loc="left", fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(group) > MANY:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)
    elif len(group) > 1:
        axes.legend(frameon=False, fontsize=8)


def _bands(axes: Any, bad: Sequence[Sequence[int]], color: str, row: int) -> None:
    """Stretches of non-finite values over the whole height, in the run's own color, the longest of them labeled."""
    hatch, top = ("///", "\\\\\\")[row % 2], 1 - 0.03 * row  # of runs that died together each shows its color
    for first, last, *_ in bad:
        axes.axvspan(first, max(last, first + 0.5), facecolor=color, alpha=0.14, hatch=hatch, edgecolor=color)
        axes.axvspan(first, max(last, first + 0.5), ymin=top - 0.03, ymax=top, color=color, linewidth=1)
    for first, last, *counts in sorted(bad, key=lambda b: b[0] - b[1])[:3]:
        kinds = ", ".join(word for word, n in zip(("NaN", "Inf", "-Inf"), counts, strict=True) if n)
        label = f"{kinds} {first:,}" + (f"–{last:,}" if last > first else "")
        axes.text(
            first,
            0.95 - 0.08 * row,
            label,
            transform=axes.get_xaxis_transform(),
            fontsize=8,
            color="white",
            va="top",
            clip_on=True,
            bbox={"facecolor": color, "edgecolor": "none", "pad": 1.5},
        )

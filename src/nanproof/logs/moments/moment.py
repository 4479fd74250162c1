"""One thing that happened in a run, with its sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..series import Series

MomentKind = Literal[
    "nonfinite",
    "hidden-nan",
    "zero-loss",
    "masked-loss",
    "missing-loss",
    "dead",
    "growth",
    "spike",
    "divergence",
    "flat",
    "chance",
    "frozen-loss",
    "zero-grad",
    "negative-loss",
    "lr-negative",
    "lr-grown",
    "lr-jump",
    "lr-frozen",
    "resume",
    "skipped",
    "nan-iterations",
    "overflow",
    "scale-search",
    "scale-fall",
    "scale-collapse",
    "message",
    "exception",
    "stop",
    "rollback",
    "hardware",
    "incident",
    "warning",
    "finished",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened at a step, or over a stretch of them."""

    kind: MomentKind
    step: int
    row: int
    """Its place in the order of the log."""
    text: str
    until: int | None = None
    """The last step, of a stretch."""
    column: str = ""
    value: float | None = None
    name: str = ""
    """Which message it is, for what the log said in words."""
    line: int | None = None
    benign: bool = False
    """Whether healthy runs have this too."""
    numbers: Mapping[str, float] = field(default_factory=dict)


def show(value: float) -> str:
    """A value as people write it.

    >>> show(math.nan), show(-math.inf), show(0.000123456), show(61.2)
    ('NaN', '-Inf', '0.0001235', '61.2')
    """
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}" if math.isfinite(value) else "Inf" if value > 0 else "-Inf"


def at(series: Series, step: int) -> str:
    """A step in the unit of the log: ``step 1,200``, ``epoch 3``, ``row 7``."""
    return f"{series.unit} {step:,}"


def span(series: Series, first: int, last: int) -> str:
    """A stretch of steps."""
    return at(series, first) if first == last else f"{series.unit}s {first:,} to {last:,}"


def many(count: int, word: str) -> str:
    """A count with its word.

    >>> many(1, "point"), many(1234, "step")
    ('1 point', '1,234 steps')
    """
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"

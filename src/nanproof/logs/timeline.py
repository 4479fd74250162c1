"""When did what go wrong first: the story of a log, in order, a sentence for each moment.

>>> from nanproof.logs.collect import Collector
>>> log = Collector(source="train.log", format="text")
>>> log.records([{"step": s, "loss": 2.0 if s < 40 else float("nan"), "lr": 1e-4} for s in range(100)])
>>> story = timeline(log.series())
>>> story.outcome
'dead'
>>> print(story.first.text)
loss is NaN since step 40; the last finite value was 2 at step 39
>>> print(story.dead.text)
loss stays NaN for the last 60 steps (60 % of the run)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .messages import AFTERMATH, OUTSIDE
from .moments.failure import ORDER, find_dead, find_missing, find_nonfinite, find_zeros
from .moments.level import BOTTOM, find_level
from .moments.moment import Moment, MomentKind
from .moments.rates import find_frozen, find_jumps, find_negative
from .moments.scale import find_scale, find_skips
from .moments.spikes import find_growth, find_spikes
from .moments.words import find_outside, find_resumes, find_words
from .series import Column, Series, Unit
from .shapes import METRIC

Outcome = Literal["healthy", "intermittent", "dead", "stopped", "useless", "empty"]
_HARD: tuple[MomentKind, ...] = (
    "nonfinite",
    "hidden-nan",
    "masked-loss",
    "zero-loss",
    "scale-collapse",
    "message",
    "exception",
    "hardware",
    "nan-iterations",
    "incident",
    "dead",
)
_PERPLEXITY = re.compile(r"(?i)\bppl\b|perplexity")
_WHOLE: tuple[MomentKind, ...] = ("flat", "chance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What happened in a run, in the order of its log."""

    source: str
    unit: Unit
    outcome: Outcome
    """healthy; intermittent: non-finite at times, finite at the end; dead: non-finite at the end; stopped: by an
    exception; useless: finite, but flat, at chance, without labels or without a loss to its end; empty: nothing was
    read."""
    moments: tuple[Moment, ...]
    order: tuple[str, ...]
    """The columns that became non-finite, the first first."""
    first_step: int | None
    last_step: int | None
    first_values: Mapping[str, float]
    last_values: Mapping[str, float]

    def of(self, *kinds: MomentKind) -> tuple[Moment, ...]:
        """The moments of some kinds."""
        return tuple(m for m in self.moments if m.kind in kinds)

    @property
    def first(self) -> Moment | None:
        """The first thing that went wrong: what is beyond doubt, or else what is suspicious. None if nothing did."""
        wrong = [m for m in self.moments if not m.benign]
        hard = [m for m in wrong if m.kind in _HARD]
        return next(iter([*hard, *(m for m in wrong if m.kind not in _WHOLE), *wrong]), None)

    @property
    def before(self) -> tuple[Moment, ...]:
        """What came before the first thing that went wrong: spikes, growth, resumes, jumps of the rate."""
        first = self.first
        return tuple(m for m in self.moments if first is not None and m.row < first.row and m.kind not in _WHOLE)

    @property
    def dead(self) -> Moment | None:
        """The stretch at the end in which the run was no longer alive."""
        return self.of("dead")[-1] if self.outcome == "dead" and self.of("dead") else None


def timeline(series: Series) -> Timeline:
    """The story of a log; a pure function."""
    bad = find_nonfinite(series)
    found = [
        *bad,
        *find_zeros(series),
        *find_growth(series),
        *find_spikes(series),
        *find_jumps(series),
        *find_frozen(series),
        *find_negative(series),
        *find_scale(series),
        *find_skips(series),
        *find_level(series),
        *find_words(series),
        *find_resumes(series),
        *find_dead(series),
        *find_missing(series),
    ]
    if reward_of(series) is not None:
        found = [m for m in found if not _of_policy(m)]
    told = [c for c in series.columns.values() if c.role in ORDER and len(c)]
    segments = series.segments
    return Timeline(
        source=series.source,
        unit=series.unit,
        outcome=_outcome(series, found),
        moments=tuple(sorted(found, key=lambda m: m.row)),
        order=tuple(m.column for m in bad),
        first_step=segments[0].first_step if segments else None,
        last_step=segments[-1].last_step if segments else None,
        first_values={c.name: float(c.values[0]) for c in told},
        last_values={c.name: float(c.values[-1]) for c in told},
    )


def _outcome(series: Series, moments: list[Moment]) -> Outcome:
    kinds = {m.kind for m in moments}
    last = series.segments[-1].first_row if series.segments else 0
    if series.empty:
        return "empty"
    hidden = [m for m in moments if m.kind in ("hidden-nan", "zero-loss")]
    if any(m.until == series.segments[-1].last_step for m in hidden):
        return "dead"
    if any(m.kind == "dead" and m.row >= last for m in moments):
        return "dead"
    if any(stops(series, m) for m in moments):
        return "stopped"
    if kinds & {"hidden-nan", "message", "nan-iterations"} or any(_hurts(series, m) for m in moments):
        return "intermittent"
    grown = any(m.kind == "growth" and series.columns[m.column].role != "grad_norm" for m in moments)
    wrong = {
        *("masked-loss", "missing-loss", "flat", "chance", "divergence", "lr-negative", "lr-grown", "scale-collapse"),
        *("frozen-loss", "zero-grad"),
    }
    fell = any(m.kind == "negative-loss" and m.numbers["lowest"] < BOTTOM for m in moments)
    return "useless" if grown or fell or kinds & wrong else "healthy"


def _starts_late(column: Column) -> bool:
    """Whether a metric has no value at first, and then always: a window that has to fill."""
    first = int(np.argmin(column.bad))
    return first >= 2 and not column.bad[first:].any() and len(column) >= 4 * first


_REWARD = re.compile(r"(?i)(?:\w+/)?(?:mean[ _])?(?:ep_rew_mean|rewards?)(?:/mean|_mean)?")
SMALL = 1.0


def reward_of(series: Series) -> Column | None:
    """What a policy is trained for."""
    return next((c for c in series.columns.values() if _REWARD.fullmatch(c.name) and len(c)), None)


def _of_policy(moment: Moment) -> bool:
    """Whether this is the course of a small surrogate loss, which goes up and down while a policy gets better."""
    kinds = ("spike", "growth", "divergence", "flat", "negative-loss")
    return moment.kind in kinds and "norm" not in moment.column and abs(moment.value or 0.0) < SMALL


def stops(series: Series, moment: Moment) -> bool:
    """Whether the run itself is to blame for an exception, a fault or a stop; not so after an end from outside."""
    if moment.kind not in ("exception", "hardware", "stop") or moment.name in (*OUTSIDE, "early-stopping"):
        return False
    end = find_outside(series)
    return end is None or moment.row < end.row or AFTERMATH.search(moment.text) is None


def _hurts(series: Series, moment: Moment) -> bool:
    """A NaN in a loss, a norm, a rate, a perplexity or an evaluation; in a metric only where it had a value before.

    Beside parts of a loss that is not there, it may be their sum, whatever its name.
    """
    if moment.kind != "nonfinite":
        return False
    column = series.columns[moment.column]
    if _PERPLEXITY.search(column.name) and bool((column.values[column.bad] == np.inf).all()):
        beside = [series.beside(column.only(column.bad), c) for c in (*series.evals, *series.of("loss"))]
        if not column.bad[-1] or any(bool(np.isfinite(v).all()) for v in beside):
            return False  # exp of a loss that is large and finite
    if column.role == "other" and METRIC.search(moment.column.encode()) is None and _starts_late(column):
        return False
    known = column.role != "other" or METRIC.search(moment.column.encode()) is not None
    whole = series.loss is None and any(len(c) and series.matched(c, column).all() for c in series.components)
    return known or whole or moment.numbers["count"] < moment.numbers["points"]

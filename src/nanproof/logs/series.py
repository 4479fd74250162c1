"""One model for every log: columns of points, events, segments.

>>> from nanproof.logs.collect import Collector
>>> log = Collector(source="train.log", format="text")
>>> log.records([{"step": 1, "loss": 2.5, "grad_norm": 1.0}, {"step": 2, "loss": "nan", "lr": 1e-4}])
>>> series = log.series()
>>> series.loss.steps.tolist(), series.loss.values.tolist(), len(series.grad_norm)
([1, 2], [2.5, nan], 1)

A point has a step, and a row: its place in the order of the log, which also tells points apart whose steps repeat
after a resume. Columns are thinned when they grow long; every non-finite point is kept. See `points`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .names import Role, meaning

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Unit = Literal["step", "epoch", "row"]
EventKind = Literal[
    "resume",
    "overflow",
    "nan",
    "exception",
    "warning",
    "skip",
    "rollback",
    "stop",
    "checkpoint",
    "finished",
    "hardware",
    "incident",
    "file",
    "gap",
]


def nonfinite_kinds(values: Floats) -> list[str]:
    """What occurs among values that are not finite.

    >>> nonfinite_kinds(np.array([1.0, float("inf"), float("nan")]))
    ['NaN', 'Inf']
    """
    found = (("NaN", np.isnan(values)), ("Inf", values == np.inf), ("-Inf", values == -np.inf))
    return [name for name, where in found if where.any()]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """One quantity over the run. Arrays of equal length, in the order of the log."""

    name: str
    role: Role
    rows: Ints
    steps: Ints
    values: Floats
    total: int
    """Points in the log; more than ``len(column)`` when the column was thinned."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def bad(self) -> NDArray[np.bool_]:
        """True where the value is NaN or ±Inf."""
        return ~np.isfinite(self.values)

    def only(self, mask: NDArray[np.bool_]) -> Column:
        """The points where the mask is true."""
        return replace(self, rows=self.rows[mask], steps=self.steps[mask], values=self.values[mask])


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that the log says in words."""

    kind: EventKind
    name: str
    """Which message it is, see `messages`; "" for one that only fits the kind."""
    text: str
    row: int
    step: int | None = None
    line: int | None = None
    """The line in the file, counted from 1; None in files that have no lines."""
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the log in which steps only go up; a resume from an older checkpoint starts a new one."""

    first_row: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """What a log says."""

    source: str
    format: str
    columns: Mapping[str, Column]
    events: tuple[Event, ...]
    counts: Mapping[str, int]
    """How often each kind of event occurred; of very many only the first and the last are among `events`."""
    segments: tuple[Segment, ...]
    rows: int
    unit: Unit = "step"
    """What steps are: the log's own, epochs where it tells no more, or the rows counted."""
    max_steps: int | None = None
    logging_steps: int | None = None
    run: str = ""
    runs: tuple[str, ...] = ()
    """All runs of a store that holds several; `run` is the one read."""
    notes: tuple[str, ...] = ()
    """What could not be read, and what was left out."""

    def of(self, role: Role) -> tuple[Column, ...]:
        """The columns with a role, the preferred one first."""
        found = [c for c in self.columns.values() if c.role == role]
        most = max((c.total for c in found), default=0)
        # a total that is printed once at the end does not speak for the run
        return tuple(sorted(found, key=lambda c: (4 * c.total < most, meaning(c.name).rank, -c.total)))

    @property
    def loss(self) -> Column | None:
        """The training loss; where only one part of it is logged, that part."""
        found = self.of("loss")
        parts = self.of("component")
        return found[0] if found else parts[0] if len(parts) == 1 else None

    @property
    def components(self) -> tuple[Column, ...]:
        """The other losses of training, by name."""
        chosen = self.loss
        return tuple(c for c in (*self.of("component"), *self.of("loss")) if c is not chosen)

    @property
    def evals(self) -> tuple[Column, ...]:
        return self.of("eval")

    @property
    def grad_norm(self) -> Column | None:
        return next(iter(self.of("grad_norm")), None)

    @property
    def lr(self) -> Column | None:
        return next(iter(self.of("lr")), None)

    @property
    def loss_scale(self) -> Column | None:
        return next(iter(self.of("loss_scale")), None)

    @property
    def skipped(self) -> Column | None:
        return next(iter(self.of("skipped")), None)

    @property
    def epoch(self) -> Column | None:
        return next(iter(self.of("epoch")), None)

    @property
    def time(self) -> Column | None:
        """Seconds on the clock of whoever wrote the log; only differences mean something."""
        return next(iter(self.of("time")), None)

    @property
    def empty(self) -> bool:
        return not self.columns and not self.events

    def segment(self, row: int) -> int:
        """The index of the segment that a row belongs to."""
        return max(0, bisect_right([s.first_row for s in self.segments], row) - 1)

    def beside(self, column: Column, other: Column) -> Floats:
        """The values of another column at the points of this one, by segment and step; NaN where it has none.

        Of several at one step the last counts. To tell "none" from a logged NaN, look at `matched`.
        """
        place = self._matches(column, other)
        return np.where(place >= 0, other.values[place] if len(other) else np.nan, np.nan)

    def matched(self, column: Column, other: Column) -> NDArray[np.bool_]:
        """True at the points of a column where the other has one for the same step."""
        return np.asarray(self._matches(column, other) >= 0)

    def _matches(self, column: Column, other: Column) -> Ints:
        if not len(column) or not len(other):
            return np.full(len(column), -1, np.int64)
        starts = np.array([s.first_row for s in self.segments] or [0])
        steps = np.unique(np.concatenate([column.steps, other.steps]))

        def keys(c: Column) -> Ints:
            segment = np.searchsorted(starts, c.rows, side="right").astype(np.int64)
            return segment * len(steps) + np.searchsorted(steps, c.steps)

        have, wanted = keys(other), keys(column)
        order = np.lexsort((other.rows, have))
        place = np.maximum(np.searchsorted(have[order], wanted, side="right") - 1, 0)
        return np.where(have[order][place] == wanted, order[place], -1)

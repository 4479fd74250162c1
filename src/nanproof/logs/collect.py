"""Builds a `Series` out of records, quickly when many have the same keys, always in bounded memory.

The bound: of one column at most 100,000 finite points are kept (fewer when there are more than 20 columns: all
together 2 million), besides every non-finite point; 24 bytes each. Columns beyond 1,000 whose names say nothing to a
diagnosis are left out, and of the events of one sort the first and the last 200 stay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import groupby
from typing import Any

import numpy as np

from . import numbers
from .names import STEP_KEYS, Role, is_eval, meaning
from .pace import Pacer
from .plan import Plan, flatten, make_block, make_plan, read_step, read_value
from .points import Points
from .segments import cut
from .series import Column, Event, EventKind, Floats, Ints, Series

LIMIT, BUDGET, COLUMNS, EVENTS = 100_000, 2_000_000, 1_000, 200
WAITS = 50_000
"""How many values wait until they are put into their columns together."""
TEXT = 500
"""How many characters of a message are kept."""


TakeOne = Callable[[dict[str, Any], int], None]
WORDS = frozenset({"event", "verdict", "message", "msg"})
"""Keys under which records say something in words."""


def _verdict(record: dict[str, Any]) -> object:
    """The guard's verdict on a step, if that is all a record says in words."""
    return record["verdict"] if WORDS.intersection(record) == {"verdict"} else None


def _shape(record: dict[str, Any]) -> tuple[object, ...]:
    """What must be the same for records to be taken together."""
    return (*record, record.get("verdict"))


class Collector:
    """Takes records and events in the order of the log."""

    def __init__(self, *, source: str, format: str) -> None:
        self.source, self.format = source, format
        self.pacer = Pacer()
        self.max_steps: int | None = None
        self.logging_steps: int | None = None
        self.run, self.runs = "", tuple[str, ...]()
        self.records_seen = 0
        self.nonfinite_seen = 0
        """Non-finite values and messages about them, so far."""
        self._points: dict[str, Points] = {}
        self._waiting: dict[tuple[str, ...], list[tuple[int, int, tuple[float, ...]]]] = {}
        """Rows that are not in their columns yet, by the names of their values."""
        self._waits = 0
        self._roles: dict[str, Role] = {}
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._events: dict[tuple[str, str], tuple[list[Event], deque[Event]]] = {}
        self._counts: dict[str, int] = {}
        self._notes: dict[str, int] = {}
        self._limit = LIMIT
        self._ends: dict[str, tuple[int, int]] = {}
        self._step_rank = len(STEP_KEYS)

    def record(self, record: Mapping[str, object]) -> tuple[int, int]:
        """One record of any keys and values; returns its row and step."""
        flat = flatten(record)
        plan = self._plan(tuple(flat))
        step, last = read_step(flat[plan.step]) if plan.step and self._counts_steps(plan.step) else (None, None)
        if last is not None:
            self.max_steps = last
        for key, attribute in plan.limits:
            if (limit := numbers.whole(flat[key])) is not None:
                setattr(self, attribute, limit)
        epoch = numbers.of(flat[plan.epoch]) if plan.epoch else None
        prefix = f"{flat[plan.mode]}/" if plan.mode and is_eval(flat[plan.mode]) else ""
        values = {prefix + k: v for k in plan.columns if (v := read_value(k, flat[k])) is not None}
        for key in plan.telling if len(values) < len(plan.columns) else ():
            if isinstance(flat[key], str) and flat[key] and prefix + key not in values:
                self.gap(prefix + key, f"{key}: {flat[key]}", step)
        return self.place(values, step=step, epoch=epoch, counts=plan.counts and not prefix)

    def place(
        self, values: Mapping[str, float], *, step: int | None, epoch: float | None = None, counts: bool = True
    ) -> tuple[int, int]:
        """One record whose numbers are known; returns its row and step."""
        return self.place_row(tuple(values), tuple(values.values()), step=step, epoch=epoch, counts=counts)

    def place_row(
        self,
        names: tuple[str, ...],
        values: tuple[float, ...],
        *,
        step: int | None,
        epoch: float | None = None,
        counts: bool = True,
    ) -> tuple[int, int]:
        """The same, its names apart: rows with the same names are kept together until they are many."""
        if epoch is not None and not -(2**53) < epoch < 2**53:
            epoch = None
        row, step = self.pacer.place(step, epoch, counts=counts)
        self.records_seen += 1
        if not all(map(math.isfinite, values)):
            self.nonfinite_seen += sum(not math.isfinite(v) for v in values)
        if epoch is not None:
            names, values = (*names, "epoch"), (*values, epoch)
        waiting = self._waiting.get(names)
        if waiting is None:
            waiting = self._waiting[names] = []
        waiting.append((row, step, values))
        self._waits += len(values)
        if self._waits > WAITS:
            self._place_waiting()
        return row, step

    def _place_waiting(self) -> None:
        """Put the rows that wait into their columns, in the order of the log."""
        taken, self._waiting, self._waits = self._waiting, {}, 0
        blocks: dict[str, list[tuple[Ints, Ints, Floats]]] = {}
        for names, waiting in taken.items():
            rows, steps, values = zip(*waiting, strict=True)
            where, when, what = np.array(rows, np.int64), np.array(steps, np.int64), np.array(values, np.float64)
            for i, name in enumerate(names):
                blocks.setdefault(name, []).append((where, when, what[:, i]))
        for name, parts in blocks.items():
            if len(parts) == 1:
                self._extend(name, *parts[0])
            else:
                where, when, what = (np.concatenate(part) for part in zip(*parts, strict=True))
                order = np.argsort(where, kind="stable")
                self._extend(name, where[order], when[order], what[order])

    def records(self, records: Sequence[dict[str, Any]], one: TakeOne | None = None) -> None:
        """Many records at once; those in a row with the same keys and plain numbers are taken column by column.

        The others, and those that say something in words, go one by one to ``one``, with their index.
        """
        if not records or self._take_alike(tuple(records[0]), records, words=one is not None):
            return
        done = 0
        for _, group in groupby(records, _shape):
            alike = list(group)
            if len(alike) < 8 or not self._take_alike(tuple(alike[0]), alike, words=one is not None):
                for index, record in enumerate(alike, done):
                    self.record(record) if one is None else one(record, index)
            done += len(alike)

    def _take_alike(self, keys: tuple[str, ...], records: Sequence[dict[str, Any]], *, words: bool) -> bool:
        """Take records that all have these keys and an integer step; false, and nothing taken, if they have not."""
        plan = self._plan(keys)
        if plan.step is None or plan.mode or plan.limits or not self._counts_steps(plan.step):
            return False
        if any(isinstance(v, dict) for v in records[0].values()):
            return False
        if words and not WORDS.isdisjoint(keys) and set(map(_verdict, records)) != {"ok"}:
            return False
        block = make_block(plan, keys, records)
        if block is None:
            return False
        rows, steps = self.pacer.place_many(block.steps, block.epochs)
        self.records_seen += len(records)
        if block.epochs is not None:
            self.extend("epoch", rows, steps, block.epochs)
        for name, values, there in block.columns:
            if there is None:
                self.extend(name, rows, steps, values)
            elif len(values):
                self.extend(name, rows[there], steps[there], values)
        return True

    def points(self, names: Sequence[str], which: Ints, steps: Ints, values: Floats, times: Floats) -> None:
        """Points of several columns in the order of the log, each with the index of its name; one row for each step.

        Steps are judged column by column: a validation may be counted in epochs beside a loss counted in steps.
        """
        if not len(steps):
            return
        new = np.diff(steps, prepend=steps[0] - 1) != 0
        rows = np.cumsum(new) - 1 + self.pacer.row
        self.pacer.row = int(rows[-1]) + 1
        self.pacer.begin(int(steps[0]), int(steps[-1]))
        self.records_seen += int(new.sum())
        self.extend("timestamp", rows[new], steps[new], times[new])
        for index in np.unique(which).tolist():
            mine = which == index
            name, my_rows, my_steps = names[index], rows[mine], steps[mine]
            last_row, last_step = self._ends.get(name, (int(my_rows[0]), int(my_steps[0])))
            before_rows = np.concatenate([[last_row], my_rows[:-1]])
            before = np.concatenate([[last_step], my_steps[:-1]])
            for i in np.flatnonzero(my_steps < before)[:1_000].tolist():
                self.pacer.note_column(int(before_rows[i]), int(my_rows[i]), int(before[i]), int(my_steps[i]))
            self._ends[name] = int(my_rows[-1]), int(my_steps[-1])
            self.extend(name, my_rows, my_steps, values[mine])

    def extend(self, name: str, rows: Ints, steps: Ints, values: Floats) -> None:
        """Many points of one column."""
        self._place_waiting()
        self._extend(name, rows, steps, values)

    def _extend(self, name: str, rows: Ints, steps: Ints, values: Floats) -> None:
        points = self._column(name)
        if points is not None:
            points.extend(rows, steps, values)
            if len(points) > self._limit:
                points.thin(self._limit // 4)

    def has(self, roles: Set[str]) -> bool:
        """Whether any column collected so far has one of these roles."""
        self._place_waiting()
        return any((self._roles.get(name) or meaning(name).role) in roles for name in self._points)

    def give_role(self, name: str, role: Role) -> None:
        """Say what a column is, where its reader knows better than its name."""
        self._roles[name] = role

    def event(
        self,
        kind: EventKind,
        text: str,
        *,
        name: str = "",
        step: int | None = None,
        line: int | None = None,
        details: Mapping[str, str] | None = None,
        counts: bool = True,
    ) -> None:
        """Something that happened; it stands at the last step unless it names one, which may be counted otherwise."""
        self.nonfinite_seen += kind in ("nan", "exception")
        counted = counts and self.pacer.unit in (None, "step") and kind in ("nan", "exception")
        if counted and step is not None and step >= self.pacer.last:
            self.pacer.place(step, None)  # what is printed below such a line belongs to its step
        first, last = self._events.setdefault((kind, name), ([], deque(maxlen=EVENTS)))
        row = self.pacer.next_row()
        known = self.pacer.last if self.pacer.unit is not None else None
        event = Event(
            kind=kind,
            name=name,
            text=text[:TEXT],
            row=row,
            step=known if step is None else step,
            line=line,
            details=dict(details or {}),
        )
        (first if len(first) < EVENTS else last).append(event)
        self._counts[kind] = self._counts.get(kind, 0) + 1

    def gap(self, name: str, text: str, step: int | None = None, line: int | None = None) -> None:
        """A value of a loss or a norm that was written as no number: a dash, a word, nothing."""
        self.event("gap", text, name=name, step=step, line=line)

    def note(self, text: str, count: int = 1) -> None:
        """Something that could not be read or was left out; equal notes are counted."""
        if len(self._notes) < 50 or text in self._notes:
            self._notes[text] = self._notes.get(text, 0) + count

    def series(self, since: int = 0) -> Series:
        """What was collected so far, from a row on."""
        self._place_waiting()
        found = {name: points.arrays(since) for name, points in self._points.items()}
        segments, arrays, words = cut(self.pacer, {name: a for name, a in found.items() if len(a[0]) or not since})
        columns = {
            name: Column(
                name=name,
                role=self._roles.get(name) or meaning(name).role,
                rows=rows,
                steps=steps,
                values=values,
                total=self._points[name].total,
            )
            for name, (rows, steps, values) in arrays.items()
        }
        kept = (e for first, last in self._events.values() for e in (*first, *last) if e.row >= since)
        events = sorted(kept, key=lambda e: e.row)
        notes = [f"{text} ({count:,} times)" if count > 1 else text for text, count in self._notes.items()]
        thinned = [c.name for c in columns.values() if len(c) < c.total]
        if thinned:
            notes.append(f"long columns are thinned to extremes, every NaN and Inf kept: {', '.join(thinned[:8])}")
        return Series(
            source=self.source,
            format=self.format,
            columns=columns,
            events=tuple(events),
            counts=dict(self._counts),
            segments=segments,
            rows=self.records_seen,
            unit=self.pacer.unit or "step",
            max_steps=self.max_steps,
            logging_steps=self.logging_steps,
            run=self.run,
            runs=self.runs,
            notes=(*notes, *words),
        )

    def _counts_steps(self, key: str) -> bool:
        """Whether this key counts what steps are here: once a better one was seen, W&B's ``_step`` does not."""
        rank = STEP_KEYS.index(key.strip().lower())
        if rank < self._step_rank:
            self._step_rank = rank
            self.pacer.recount()
        return rank == self._step_rank

    def _plan(self, keys: tuple[str, ...]) -> Plan:
        plan = self._plans.get(keys)
        if plan is None:
            if len(self._plans) > 1_000:  # a log whose every record has other keys
                self._plans.clear()
            plan = self._plans[keys] = make_plan(keys)
        return plan

    def _column(self, name: str) -> Points | None:
        points = self._points.get(name)
        if points is None:
            if len(self._points) >= COLUMNS * (1 if meaning(name).role == "other" else 2):
                self.note("a column more than can be kept is left out")
                return None
            points = self._points[name] = Points()
            self._limit = min(LIMIT, max(1_000, BUDGET // len(self._points)))
        return points

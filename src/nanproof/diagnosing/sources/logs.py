"""Logs and tracker files: all of a run, the newest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import NanproofError
from ...logs import Column, LogFile, Series, read
from ...logs.foresee import foresee
from ...logs.timeline import Timeline, timeline
from ..diagnosis import Looked, Moment
from ..evidence import Fact
from .part import Part, name_in
from .story import is_fine, read_story

MAX_LOGS = 12
MAX_MOMENTS = 60


def read_logs(
    found: Sequence[LogFile], root: Path, every: float | None, earlier: Sequence[LogFile] = ()
) -> tuple[Part, tuple[Series, ...]]:
    """All logs of a run, the newest first, and the series themselves for those who compare them with other files.

    ``every``: how many steps there are between rows, as the config says; consoles of trainers do not tell. ``earlier``:
    logs of other runs, of which one may be where this one was resumed from.
    """
    looked: list[Looked] = []
    facts: list[Fact] = []
    notes: list[str] = []
    series: list[Series] = []
    moments: list[Moment] = []
    for log in found[:MAX_LOGS]:
        name = name_in(root, log.path)
        try:
            one = read(log.path, run=log.run or None)
        except (NanproofError, OSError) as error:
            looked.append(Looked(mark="✗", what="log", found=f"{name}: {error}"))
            continue
        story = timeline(one)
        looked.append(
            Looked(mark="✓" if story.outcome == "healthy" else "!", what="log", found=_summary(name, one, story))
        )
        notes += [f"{name}: {n}" for n in one.notes]
        facts += read_story(one, story, name, each_step=one.unit == "step" or (every == 1 and one.unit == "row"))
        outlook = foresee(one)
        if "risk" in one.columns:  # a guard's own log: its outputs are known, and so are their dtypes
            grown = (w for w in outlook.warnings if any(t.name.startswith("absmax/") for t in w.trends))
            facts += [Fact(name="activation-norm-drift", where=name, words=f"step {w.step:,}: {w}") for w in grown][:1]
        if outlook.warning and story.outcome not in ("dead", "stopped"):
            notes.append(f"{name}: likely to break soon: {outlook.warning}")
        if not series:
            moments += _moments(story, name)
            early = [(f"{story.unit} {w.step:,}", f"early warning: {w} ({name})") for w in outlook.warnings[:2]]
            moments += [Moment(when=when, what=what) for when, what in early]
        series.append(one)
    jumped = list(_continued(series, series, root)) or list(_continued(series[:1], _before(series[:1], earlier), root))
    # a log that is only too short to prove anything does not contradict a longer one
    doubtful = (s for s in series if any(len(c) >= 5 for c in _losses(s)) and not is_fine(s, timeline(s)))
    if jumped or not all(_is_healthy(facts, name_in(root, s.source)) for s in doubtful):
        facts = [f for f in facts if f.name != "run-healthy"]  # one good log among others clears nothing
    if jumped:
        facts = [f for f in facts if f.name not in ("never-resumed", "lr-continuous")] + jumped
    if len(found) > MAX_LOGS:
        notes.append(f"{len(found) - MAX_LOGS} older logs were not read")
    return Part(facts=tuple(facts), looked=tuple(looked), notes=tuple(notes), moments=tuple(moments)), tuple(series)


def _losses(series: Series) -> tuple[Column, ...]:
    return (series.loss,) if series.loss is not None else series.components


def _is_healthy(facts: Sequence[Fact], name: str) -> bool:
    return any(f.name == "run-healthy" and f.where == name for f in facts)


def _before(series: Sequence[Series], earlier: Sequence[LogFile]) -> tuple[Series, ...]:
    """The logs of other runs, if this one begins where another may have ended."""
    if not any(s.unit == "step" and s.segments and s.segments[0].first_step >= LATE for s in series):
        return ()
    found = []
    for log in earlier:
        with suppress(NanproofError, OSError):
            found.append(read(log.path, run=log.run or None))
    return tuple(found)


LATE = 50
"""A log that begins at this step or later is not the beginning of a run."""


def _continued(series: Sequence[Series], others: Sequence[Series], root: Path) -> Iterator[Fact]:
    """A log that continues from the end of another one, and what the learning rate and the loss did between the two."""
    for new in series:
        resumes = [e.row for e in new.events if e.kind == "resume"]
        if not new.segments or not (resumes or (new.unit == "step" and new.segments[0].first_step >= LATE)):
            continue
        first, resumed = new.segments[0].first_step, bool(resumes) and min(resumes) == 0
        for old in others:
            if old is new or not old.segments or old.unit != new.unit:
                continue
            last = old.segments[-1].last_step
            goes_on = 0 < first - last <= max(3, 0.05 * last)
            counts_again = (
                resumed
                and (first <= 0.05 * last or new.unit == "row")
                and not any(e.kind == "resume" for e in old.events)
            )
            if not (goes_on or counts_again):
                continue
            where = name_in(root, new.source)
            place = f"at {old.unit} {last:,} ({name_in(root, old.source)})"
            rates, losses = _across(old.lr, new.lr), _across(old.loss, new.loss, few=5) if goes_on else None
            jumped = rates is not None and rates[0] > 0 and not 0.4 < rates[1] / rates[0] < 1.25
            risen = losses is not None and 0 < 1.1 * losses[0] < losses[1]
            if jumped or risen:
                yield Fact(name="resumed", where=where, words=f"goes on at {new.unit} {first:,}")
            if jumped and rates is not None:
                words = f"lr {rates[0]:.3g} {place}, {rates[1]:.3g} at {first:,}"
                yield Fact(name="lr-discontinuity", where=where, words=words)
            if risen and losses is not None:
                words = f"loss {losses[0]:.4g} {place}, {losses[1]:.4g} from {first:,} on"
                yield Fact(name="spike-at-each-resume", where=where, words=words)
            if jumped or risen:
                return


def _across(old: Column | None, new: Column | None, few: int = 1) -> tuple[float, float] | None:
    """The last values of one column and the first of another."""
    if old is None or new is None or not len(old) or not len(new):
        return None
    return float(np.median(old.values[-few:])), float(np.median(new.values[:few]))


def _summary(name: str, series: Series, story: Timeline) -> str:
    words = [series.format, f"{series.rows:,} rows", f"{story.outcome}"]
    if story.first_step is not None:
        words.insert(2, f"{story.unit}s {story.first_step:,} to {story.last_step:,}")
    return f"{name}: {', '.join(words)}"


def _moments(story: Timeline, name: str) -> Iterator[Moment]:
    """What went wrong, resumes, and how it ended; ordinary spikes and overflows only when there is little else."""
    told = [m for m in story.moments if not m.benign or m.kind in ("resume", "finished", "scale-search")]
    told = told or list(story.moments)
    bad = {m.column for m in told if m.kind == "nonfinite"}
    told = [m for m in told if m.kind != "dead" or m.column not in bad]  # that it stays NaN is said already
    for moment in told[:MAX_MOMENTS]:
        place = f" ({name}:{moment.line})" if moment.line is not None else ""
        broke = moment.kind in ("nonfinite", "hidden-nan", "dead")
        yield Moment(when=f"{story.unit} {moment.step:,}", what=f"{moment.text}{place}", broke=broke)
    if len(told) > MAX_MOMENTS:
        yield Moment(when="later", what=f"{len(told) - MAX_MOMENTS} more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The learning rate at which a run went on: the highest of its last stretch."""

    rate: float
    since: int
    log: str
    resumed: bool


def rate_in_force(series: Sequence[Series], root: Path) -> Rate | None:
    """The rate in the newest log that has one."""
    for one in series:
        lr = one.lr
        if lr is None or not len(lr):
            continue
        resumed = timeline(one).of("resume")
        stretch = lr.only((lr.rows >= (resumed[-1].row if resumed else 0)) & ~lr.bad)
        if len(stretch):
            log = name_in(root, one.source)
            rate, since = float(stretch.values.max()), int(stretch.steps[0])
            return Rate(rate=rate, since=since, log=log, resumed=bool(resumed))
    return None

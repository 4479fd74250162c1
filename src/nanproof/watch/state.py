"""How a run stands: running, finished, died, stopped, interrupted or stale. Pure, from what was read to what is said.

>>> from nanproof.logs.collect import Collector
>>> log = Collector(source="", format="")
>>> log.records([{"step": s, "loss": 2.0 if s < 109 else float("nan")} for s in range(300)])
>>> print(state_of(log.series(), Signs(quiet=3600)))
died at step 109: loss is NaN since step 109 (191 logged values, the last at step 299)
>>> state_of(log.series(), Signs(open=True)).bad
True
>>> log.records([{"step": 300, "loss": 1.9}])
>>> print(state_of(log.series(), Signs(exit_code=0)))
finished at step 300: loss was NaN, the last of 191 logged values at step 299
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import GuardStop
from ..logs.messages import OWN_ERRORS
from ..logs.series import Column, Event, Series, Unit, nonfinite_kinds

Kind = Literal["running", "finished", "died", "stopped", "interrupted", "stale", "empty"]
FRESH = 10.0  # seconds in which a log of unknown rhythm gets its next line
BEATS = 5  # or so many of its usual intervals
_ANSWERED = ("skip", "rollback", "overflow", "resume", "stop")
_ENDS = ("stop", "exception", "hardware", "finished")
_SIGNALS = {
    number: words
    for code, words in ((2, "Ctrl-C"), (15, "SIGTERM"), (9, "SIGKILL: often out of memory"))
    for number in (128 + code, -code)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What shows from outside whether a run is alive."""

    open: bool | None = None
    """Whether a process has the log open or holds the run's lock; None when that cannot be seen."""
    quiet: float | None = None
    """Seconds since the log was last written."""
    exit_code: int | None = None
    killed: bool = False
    """Whether its record says that it is running, and its process is gone."""
    ended: str = ""
    """Why something else than the run itself ended it on purpose."""
    repairs: tuple[str, ...] = ()
    """Repairs in force, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One word, and the sentence that goes with it."""

    kind: Kind
    step: int | None = None
    """The last logged step."""
    max_steps: int | None = None
    since: int | None = None
    """The first step of the non-finite stretch at the end."""
    why: str = ""
    repairs: tuple[str, ...] = ()
    unit: Unit = "step"
    """What the numbers count: a log without steps is told by its rows."""

    @property
    def bad(self) -> bool:
        """Whether somebody should look."""
        return self.kind in ("died", "stopped", "interrupted")

    @property
    def healthy(self) -> bool:
        return self.kind in ("running", "finished") and self.since is None

    @property
    def own_error(self) -> bool:
        """Whether an error of the script ended it that says nothing about its numbers."""
        return self.kind == "died" and self.since is None and OWN_ERRORS.match(self.why) is not None

    @property
    def headline(self) -> str:
        """The state without its reason."""
        of = f" of {self.max_steps:,}" if self.max_steps else ""
        at = f" at {self.unit} {self.step:,}{of}" if self.step is not None else ""
        return {
            "running": f"running{at.replace(' at', ',')}",
            "finished": f"finished{at}",
            "died": f"died at {self.unit} {self.since:,}" if self.since is not None else f"died{at}",
            "stopped": f"stopped{at}",
            "interrupted": f"interrupted{at}",
            "stale": f"stale{at}",
            "empty": "no values yet",
        }[self.kind]

    def __str__(self) -> str:
        return f"{self.headline}: {self.why}" if self.why else self.headline


def state_of(series: Series, signs: Signs) -> RunState:
    """How a run stands, from its log and what shows from outside."""
    step = series.segments[-1].last_step if series.segments else None
    kind, why = _kind(series, signs, step)
    dead = trailing(series)
    since = None
    if dead is not None:
        column, first = dead
        count = len(column) - first
        since = int(column.steps[first])
        many = f"{count:,} logged values, the last at {series.unit} {int(column.steps[-1]):,}"
        many = many if count > 1 else "the last value"
        said = f"{column.name} is {_nonfinite(column, first, series.unit)} ({many})"
        if not _answered(series, column, first):
            still = "; it is still running" if signs.open else ""
            kind, why = "died", f"{said}{still}"
        elif not why:
            why = said
    elif recovered := _recovered(series):
        why = f"{why}; {recovered}" if why else recovered
    return RunState(
        kind=kind,
        step=step,
        max_steps=series.max_steps,
        since=since,
        why=why,
        repairs=signs.repairs,
        unit=series.unit,
    )


def trailing(series: Series) -> tuple[Column, int] | None:
    """The quantity that is not finite at the end, the loss first, and the index where that began."""
    for column in living(series):
        if not len(column) or math.isfinite(column.values[-1]):
            continue
        finite = np.flatnonzero(~column.bad)
        return column, int(finite[-1]) + 1 if len(finite) else 0
    return None


def _recovered(series: Series) -> str:
    """Values that were not finite and that nothing answered, although later ones are finite again."""
    if any(series.counts.get(kind) for kind in _ANSWERED):
        return ""
    for column in living(series):
        at = np.flatnonzero(column.bad)
        if len(at):
            kinds, many = " or ".join(nonfinite_kinds(column.values[at])), f"{len(at):,} logged values"
            where = f"the last of {many} at {series.unit}" if len(at) > 1 else f"at {series.unit}"
            return f"{column.name} was {kinds}, {where} {int(column.steps[at[-1]]):,}"
    return ""


def living(series: Series) -> list[Column]:
    """What a run lives by: its loss or the parts of it, and its gradient norm."""
    parts = [c for c in series.components if c.role == "component"] if series.loss is None else [series.loss]
    return [*parts, *([series.grad_norm] if series.grad_norm is not None else [])]


def word(value: float) -> str:
    """
    >>> word(float("nan")), word(float("-inf"))
    ('NaN', '-Inf')
    """
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def _nonfinite(column: Column, first: int, unit: Unit) -> str:
    """What it is since when; an overflow is often Inf for a step, and NaN from the next one on."""
    values, steps = column.values[first:], column.steps[first:]
    began, last = int(steps[0]), word(values[-1])
    same = np.isnan(values) if last == "NaN" else values == values[-1]
    change = int(np.argmax(same))
    if not same[change:].all():
        return f"{' or '.join(nonfinite_kinds(values))} since {unit} {began:,}"
    since = f"{last} since {unit} {int(steps[change]):,}"
    return f"{word(values[0])} since {unit} {began:,}, {since}" if change else since


def _answered(series: Series, column: Column, first: int) -> bool:
    """Whether the bad steps at the end were kept away from the weights: the guard or a scaler skipped the last one."""
    last = int(column.steps[-1])
    return any(e.kind in _ANSWERED and e.step == last for e in series.events[-50:])


def _kind(series: Series, signs: Signs, step: int | None) -> tuple[Kind, str]:
    nothing = series.empty or (step is None and not series.events)
    if nothing and signs.exit_code is None and not signs.open and not signs.killed:
        return "empty", ""
    if signs.ended and not signs.open:
        return "finished", signs.ended
    end = _last_word(series)
    if signs.open or (
        signs.open is None and signs.exit_code is None and end is None and _is_fresh(series, signs.quiet)
    ):
        return "running", "no values yet" if nothing else ""
    if signs.exit_code is not None:
        return _ended_with(signs.exit_code, series, " before its first step" if nothing else "")
    if end is not None:
        return _told(end)
    if series.max_steps and step is not None and step + 1 >= series.max_steps:
        return "finished", ""
    if signs.killed:
        return "interrupted", f"its process was killed{' before its first step' if nothing else ''}"
    if series.max_steps:
        return "interrupted", "the log ends before the last step and does not say why"
    if signs.open is False:
        return "stale", "its process has ended, and the log does not say whether it was done"
    if signs.quiet is None:
        return "stale", "the log does not say how it ended"
    return "stale", f"nothing was logged for {duration(signs.quiet)}, and the log does not say how it ended"


def _is_fresh(series: Series, quiet: float | None) -> bool:
    return quiet is not None and quiet < max(FRESH, BEATS * interval(series))


def interval(series: Series) -> float:
    """The usual seconds between two lines of the log; 0 when it tells no time."""
    clock = series.time
    if clock is None or len(clock) < 3:
        return 0.0
    gaps = np.diff(clock.values[-50:])
    gaps = gaps[np.isfinite(gaps) & (gaps > 0)]
    return float(np.median(gaps)) if len(gaps) else 0.0


def _ended_with(code: int, series: Series, before: str) -> tuple[Kind, str]:
    if code == 0:
        return "finished", "no step was logged" if before else ""
    if code == GuardStop.exit_code:
        return "stopped", "the guard ended the run on purpose (exit code 66)"
    if code in _SIGNALS:
        return "interrupted", f"{_SIGNALS[code]}{before} (exit code {code})"
    end = _last_word(series)
    if end is not None and end.kind == "exception":
        return "died", _told(end)[1]
    return "died", f"exit code {code}{before}"


def _last_word(series: Series) -> Event | None:
    """What the log says about its end: an event after which no more values came."""
    last = max((int(c.rows[-1]) for c in series.columns.values() if len(c)), default=0)
    # totals are often printed after "training finished"
    ends = [e for e in series.events[-50:] if e.kind in _ENDS and e.row >= last - 3 * (e.kind == "finished")]
    ranked = sorted(ends, key=lambda e: (not _is_ctrl_c(e), _ENDS.index(e.kind)))
    return next(iter(ranked), None)


def _is_ctrl_c(event: Event) -> bool:
    return event.text.lstrip().startswith("KeyboardInterrupt")


def _told(end: Event) -> tuple[Kind, str]:
    text = " ".join(end.text.split())[:200]
    if end.kind == "finished" or end.name == "early-stopping":
        return "finished", "early stopping" if end.name == "early-stopping" else ""
    if _is_ctrl_c(end):
        return "interrupted", "KeyboardInterrupt"
    if end.name == "killed":
        return "interrupted", text
    if end.kind == "stop" and end.name not in ("exit-code", "failed"):
        by_guard = end.step is not None and end.name != ""
        return "stopped", f"by the guard, {text}" if by_guard else text
    return "died", text


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

"""What a trial is worth: pure functions of what it did, and of what the original did.

A run that survives is not cured, and a loss that falls is no proof: the run's own metric decides, against what
guessing scores and against its target. Without a target, the loss must also be below the best of the original.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .trial import Ran

Standing = Literal["cured", "alive, learning", "alive, not learning", "alive so far", "died", "inert", "failed", "cut"]
Answer = Literal["cured", "alive, learning", "alive, not learning", "none"]

SKIPS = 0.05
"""The share of steps that the guard may leave out of a run that still counts as cured."""
ORDER: dict[str, int] = {
    "cured": 0,
    "alive, learning": 1,
    "alive so far": 2,
    "alive, not learning": 3,
    "cut": 4,
    "died": 5,
    "inert": 6,
    "failed": 7,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the original did: the best loss it held, its death, its first losses."""

    best_loss: float
    died_at: int | None
    step_seconds: float = math.nan
    opening: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One trial, judged."""

    standing: Standing
    why: str


def judge(ran: Ran, original: Reference) -> Verdict:
    """Judge one trial."""
    same = bool(ran.opening) and ran.opening == original.opening and ran.died_at == original.died_at
    if ran.end == "failed" and ran.steps == 0:
        return Verdict(standing="failed", why=f"the program ended before its first step: {ran.said}")
    if ran.end in ("died", "stopped"):
        if same and original.died_at is not None:
            return Verdict(standing="inert", why=f"the same run, bit for bit, dead at step {ran.died_at}")
        by = "stopped by the guard" if ran.end == "stopped" else "not finite"
        return Verdict(standing="died", why=f"{by} at step {ran.died_at}")
    if ran.end == "failed":
        return Verdict(standing="failed", why=f"ended with an error after {ran.steps} steps: {ran.said}")
    if ran.end == "cut":
        return Verdict(standing="cut", why=f"the time was over after {ran.steps} steps")
    if ran.end == "horizon":
        return Verdict(standing="alive so far", why=f"finite for {ran.steps} steps, loss {ran.loss:.4g}")
    return _ended(ran, original)


def _ended(ran: Ran, original: Reference) -> Verdict:
    metric = ran.metric
    better = ran.loss < original.best_loss
    if metric is None or metric.chance is None:
        what = metric.told if metric is not None else "it prints no metric"
        loss = f"loss {ran.loss:.4g}, the original's best was {original.best_loss:.4g}"
        if better:
            return Verdict(standing="alive, learning", why=f"{loss}; {what}, and no chance level to prove it")
        return Verdict(standing="alive, not learning", why=loss)
    if not math.isfinite(metric.value) or not metric.above_chance:
        return Verdict(standing="alive, not learning", why=f"{metric.told}: not above chance")
    if ran.skipped > SKIPS * ran.steps:
        return Verdict(standing="alive, learning", why=f"{metric.told}, but {ran.skipped} of {ran.steps} steps skipped")
    if metric.at_target is None:
        if better:
            why = f"{metric.told}, loss {ran.loss:.4g} below the original's best {original.best_loss:.4g}"
            return Verdict(standing="cured", why=why)
        return Verdict(standing="alive, learning", why=f"{metric.told}, loss not below the original's best")
    if metric.at_target:
        return Verdict(standing="cured", why=metric.told)
    return Verdict(standing="alive, learning", why=f"{metric.told}: below its target")


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on several seeds: that of the worst of them."""
    worst = max(verdicts, key=lambda v: ORDER[v.standing])
    if len(verdicts) == 1:
        return worst
    good = sum(v.standing == verdicts[0].standing for v in verdicts)
    return Verdict(standing=worst.standing, why=f"{good} of {len(verdicts)} seeds; {worst.why}")


def score(ran: Ran) -> tuple[float, ...]:
    """For ranking: the metric where there is one, else the loss at the horizon; smaller is better."""
    if ran.metric is not None and math.isfinite(ran.metric.value):
        return (0.0, ran.metric.value if ran.metric.lower else -ran.metric.value)
    return (1.0, ran.loss)


def horizon(died_at: int | None, schedule: int | None) -> int | None:
    """How far a first look goes: max(2 × death, 35 % of the schedule); None: to the end.

    >>> horizon(46, 200), horizon(60, 70), horizon(10, None)
    (92, None, 20)

    1.3 × the death misleads: a smaller learning rate only dies later, and the first drop of a loss says nothing.
    """
    if died_at is None and schedule is None:
        return None
    wanted = max(2 * (died_at or 0), math.ceil(0.35 * (schedule or 0)), 10)
    return None if schedule is not None and wanted > 0.7 * schedule else wanted

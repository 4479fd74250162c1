"""The run's own metric, with what guessing scores, out of what the program printed.

>>> find_metric("trained: map cells right 0.612 (chance 0.428, target 0.55), 60 of 60 steps finite")
Metric(name='map cells right', value=0.612, chance=0.428, target=0.55, lower=False)
>>> find_metric('{"eval_accuracy": 0.91}', Wanted(name="eval_accuracy", chance=0.1)).gain > 0
True

A program that prints ``NAME VALUE (chance X, target Y)`` needs no options; of one that prints otherwise, ``--metric``,
``--chance`` and ``--target`` say what it means. The last value that was printed counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
_STATED = re.compile(
    rf"([A-Za-z][\w@/ -]*?)[\s:=]+({_NUMBER})\s*%?\s*\((?:[^()]*?\b)?chance[\s:=]+({_NUMBER})"
    rf"(?:[,;]\s*target[\s:=]+({_NUMBER}))?[^()]*\)",
    re.I,
)
_LOWER = re.compile(r"err(or)?|perplexity|ppl|wer|cer|mae|mse|rmse|loss|fid|bits|nll", re.I)
_COMMON = re.compile(
    rf"\b((?:(?:eval|val|valid|test)[_/ ])?(?:accuracy|acc|top1|top-1|f1|bleu|exact match|auc|miou))"
    rf"\b[\"']?[\s:=]+({_NUMBER})",
    re.I,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user said about the metric."""

    name: str = ""
    chance: float | None = None
    target: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A value that was measured, beside what guessing scores and what it should be."""

    name: str
    value: float
    chance: float | None = None
    target: float | None = None
    lower: bool = False
    """Whether less is better."""

    @property
    def gain(self) -> float:
        """How far it is from chance, in the good direction; NaN when chance is not known."""
        if self.chance is None:
            return float("nan")
        return self.chance - self.value if self.lower else self.value - self.chance

    @property
    def above_chance(self) -> bool:
        """By more than the noise of a small evaluation: a twentieth of what there is to gain."""
        if self.chance is None:
            return False
        best = self.target if self.target is not None else 0.0 if self.lower else max(1.0, self.chance)
        return self.gain > 0.05 * abs(best - self.chance) if best != self.chance else self.gain > 0

    @property
    def at_target(self) -> bool | None:
        """None when there is no target."""
        if self.target is None:
            return None
        return self.value <= self.target if self.lower else self.value >= self.target

    @property
    def told(self) -> str:
        said = [f"chance {self.chance:.3g}"] if self.chance is not None else []
        said += [f"target {self.target:.3g}"] if self.target is not None else []
        return f"{self.name} {self.value:.3f}" + (f" ({', '.join(said)})" if said else "")


def find_metric(text: str, wanted: Wanted | None = None) -> Metric | None:
    """The last value of the metric in what a program printed; None when there is none."""
    wanted = wanted or Wanted()
    if wanted.name:
        pattern = re.compile(rf"{re.escape(wanted.name)}[\"']?[\s:=]+({_NUMBER})", re.I)
        found = [m[1] for m in pattern.finditer(text)]
        name = wanted.name
        if not found:
            return None
        value, chance, target = float(found[-1]), wanted.chance, wanted.target
        stated = [m for m in _STATED.finditer(text) if m[1].strip().lower().endswith(name.lower())]
        if stated:
            chance = chance if chance is not None else float(stated[-1][3])
            target = target if target is not None or stated[-1][4] is None else float(stated[-1][4])
    elif stated := list(_STATED.finditer(text)):
        last = stated[-1]
        name, value, chance = last[1].strip(), float(last[2]), float(last[3])
        target = float(last[4]) if last[4] else None
    elif common := _COMMON.findall(text):
        name, value, chance, target = common[-1][0].strip(), float(common[-1][1]), None, None
    else:
        return None
    chance = wanted.chance if wanted.chance is not None else chance
    target = wanted.target if wanted.target is not None else target
    lower = target < chance if target is not None and chance is not None else bool(_LOWER.search(name))
    return Metric(name=name, value=value, chance=chance, target=target, lower=lower)

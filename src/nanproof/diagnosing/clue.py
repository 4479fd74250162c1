"""The small language in which causes declare the evidence for and against them.

>>> from nanproof.diagnosing.evidence import Evidence, Fact
>>> clue = Clue(weight=2.0, when=both(flag("nan-after-first-step"), value("weights", "fp16")), says="fp16 weights")
>>> clue.found(Evidence.of(Fact(name="nan-after-first-step")))
()
>>> clue.found(Evidence.of(Fact(name="nan-after-first-step"), Fact(name="weights", value="fp16")))[1].said
'weights fp16'

A test takes the evidence and returns the facts that make it true, none when it is not. Weights are log-odds: how many
times likelier, as a natural logarithm, the fact is under this cause than under the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from .evidence import Evidence, Fact
from .vocabulary import PRODUCED

Test = Callable[[Evidence], tuple[Fact, ...]]

Weight = Literal["faint", "hints", "suggests", "points", "names", "proves", "replayed"]
WEIGHTS: Mapping[Weight, float] = {
    "faint": 0.1,  # enough to be named among the possible, too little to move anything
    "hints": 0.5,
    "suggests": 1.0,
    "points": 2.0,
    "names": 3.0,
    "proves": 5.0,
    "replayed": 8.0,  # what a replay of the bad step showed outranks any statistics
}
MOST_CITED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """One reason for a cause (weight above 0) or against it (below 0), in one sentence."""

    weight: float
    when: Test
    says: str
    unless: Test | None = None

    def found(self, evidence: Evidence) -> tuple[Fact, ...]:
        """The facts that make it speak; none when it is silent."""
        facts = self.when(evidence)
        return () if facts and self.unless is not None and self.unless(evidence) else facts

    def tell(self, facts: tuple[Fact, ...]) -> str:
        """The sentence with its sources, for example "fp16 weights: weights fp16 (train.py:12)"."""
        telling = [f for f in facts if f.said != self.says and f.name != "onset" and (f.words or f.value is not True)]
        if telling:
            first = {f.name: f for f in reversed(telling)}  # several logs show one flag: the first is enough
            told = {f.said: f for f in reversed(telling) if first[f.name] is f or not isinstance(f.value, bool)}
            return f"{self.says}: {'; '.join(map(str, [*reversed(told.values())][:MOST_CITED]))}"
        places = dict.fromkeys(f.where for f in facts if f.where)
        return f"{self.says} ({', '.join(places)})" if places else self.says


def _known(*names: str) -> None:
    """A clue whose name nobody produces could never speak: refused when its cause is imported."""
    unknown = [n for n in names if n not in PRODUCED and not n.startswith("version-")]
    if unknown:
        raise ValueError(f"no reader produces {', '.join(unknown)}; see nanproof.diagnosing.vocabulary")


def flag(*names: str) -> Test:
    """Any of these flags."""
    _known(*names)

    def test(evidence: Evidence) -> tuple[Fact, ...]:
        return tuple(f for name in names for f in evidence.named(name) if f.value is True)

    return test


def denied(*names: str) -> Test:
    """Any of these flags, explicitly said not to be so."""
    _known(*names)

    def test(evidence: Evidence) -> tuple[Fact, ...]:
        return tuple(f for name in names for f in evidence.named(name) if f.value is False)

    return test


def value(name: str, *values: str) -> Test:
    """A fact under this name with any of these values; with no values, any at all."""
    _known(name)

    def test(evidence: Evidence) -> tuple[Fact, ...]:
        return tuple(f for f in evidence.named(name) if f.value is not False and (not values or f.value in values))

    return test


def onset(*values: str) -> Test:
    """When it began."""
    return value("onset", *values)


def about(*topics: str) -> Test:
    """What the description of the run speaks of: the first mention only, as repeating adds nothing."""

    def test(evidence: Evidence) -> tuple[Fact, ...]:
        return tuple(f for f in evidence.named("about") if f.value in topics)[:1]

    return test


def number(name: str, *, above: float = float("-inf"), below: float = float("inf")) -> Test:
    """A number under this name strictly within these bounds."""
    _known(name)

    def test(evidence: Evidence) -> tuple[Fact, ...]:
        numbers = (f for f in evidence.named(name) if isinstance(f.value, float) and not isinstance(f.value, bool))
        return tuple(f for f in numbers if isinstance(f.value, float) and above < f.value < below)

    return test


def both(*tests: Test) -> Test:
    """All of these tests."""

    def test(evidence: Evidence) -> tuple[Fact, ...]:
        parts = [t(evidence) for t in tests]
        return tuple(f for part in parts for f in part) if all(parts) else ()

    return test


def either(*tests: Test) -> Test:
    """Any of these tests."""

    def test(evidence: Evidence) -> tuple[Fact, ...]:
        return tuple(f for t in tests for f in t(evidence))

    return test


def pro(weight: Weight | float, when: Test, says: str, *, unless: Test | None = None) -> Clue:
    """A clue that speaks for a cause."""
    return Clue(weight=_odds(weight), when=when, says=says, unless=unless)


def con(weight: Weight | float, when: Test, says: str, *, unless: Test | None = None) -> Clue:
    """A clue that speaks against a cause."""
    return Clue(weight=-_odds(weight), when=when, says=says, unless=unless)


def _odds(weight: Weight | float) -> float:
    return WEIGHTS[weight] if isinstance(weight, str) else weight

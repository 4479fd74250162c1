"""From evidence to ranked causes: a pure function, additive in log-odds, with exclusions and an honest abstention.

>>> from nanproof.diagnosing.evidence import Evidence, Fact
>>> ranked = rank(Evidence.of(Fact(name="lr-discontinuity"), Fact(name="onset", value="after-resume")))
>>> ranked[0].cause.name, ranked[0].confidence
('scheduler-state-on-resume', 'likely')

Each cause starts from how common it is and adds the weights of the clues that speak. A cause that the evidence excludes
is left out, whatever its evidence. Confidence rests on two things: the lead over the others, and how much evidence
there is for the cause at all; a lead over nothing is no finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .cause import Cause
from .causes import all_causes
from .clue import WEIGHTS, Clue
from .evidence import Evidence, Fact

Confidence = Literal["strong", "likely", "possible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From where on a cause is called strong or likely: its share of the probability, and its evidence.

    The weights are log-odds of evidence beyond prose. `scripts/score_diagnose.py` chooses them by cross-validation.
    """

    strong_share: float = 0.9
    strong_weight: float = 6.0
    likely_share: float = 0.8
    likely_weight: float = 4.0


LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A cause with its score and the clues that made it."""

    cause: Cause
    score: float
    share: float
    """Its part of the probability among all causes that are not excluded."""
    speaking: tuple[tuple[Clue, tuple[Fact, ...]], ...]

    @property
    def weight(self) -> float:
        """The evidence for it, apart from how common it is."""
        return sum(c.weight for c, _ in self.speaking)

    @property
    def hard(self) -> float:
        """The evidence for it beyond prose, less the evidence against it."""
        return sum(c.weight for c, facts in self.speaking if c.weight < 0 or not _prose(facts))

    @property
    def supported(self) -> bool:
        return any(c.weight > 0 for c, _ in self.speaking)

    @property
    def confidence(self) -> Confidence:
        return self.judge(LIMITS)

    def judge(self, limits: Limits) -> Confidence:
        """The word for how sure this is."""
        best = max((c.weight for c, facts in self.speaking if not _prose(facts)), default=0.0)
        proved = min(best, self.hard) >= WEIGHTS["proves"]
        named = best >= WEIGHTS["names"] and self.hard >= limits.strong_weight
        if self.share >= limits.strong_share and (proved or named):
            return "strong"
        if self.share >= limits.likely_share and best >= WEIGHTS["points"] and self.hard >= limits.likely_weight:
            return "likely"
        return "possible"

    @property
    def evidence(self) -> tuple[str, ...]:
        return _told([c for c in self.speaking if c[0].weight > 0])

    @property
    def against(self) -> tuple[str, ...]:
        return _told([c for c in self.speaking if c[0].weight < 0])


def _told(speaking: Sequence[tuple[Clue, tuple[Fact, ...]]]) -> tuple[str, ...]:
    """The clues in words, the heaviest first; one that rests on facts already told adds nothing."""
    told: dict[str, None] = {}
    known: set[tuple[str, str]] = set()
    for clue, facts in sorted(speaking, key=lambda c: -abs(c[0].weight)):
        fresh = tuple(f for f in facts if (f.name, str(f.value)) not in known)
        if fresh:
            told[clue.tell(fresh)] = None
            known |= {(f.name, str(f.value)) for f in facts}
    return tuple(told)


def _prose(facts: tuple[Fact, ...]) -> bool:
    return all(f.weak for f in facts)


def rank(evidence: Evidence, causes: Sequence[Cause] | None = None) -> tuple[Ranked, ...]:
    """All causes that are not excluded, the likeliest first."""
    weighed = [
        (cause, tuple((clue, facts) for clue in cause.all_clues if (facts := clue.found(evidence))))
        for cause in (causes or all_causes())
        if not any(e.when(evidence) for e in cause.excluded)
    ]
    scores = [cause.prior + sum(clue.weight for clue, _ in speaking) for cause, speaking in weighed]
    shares = softmax(scores)
    ranked = [
        Ranked(cause=cause, score=score, share=share, speaking=speaking)
        for (cause, speaking), score, share in zip(weighed, scores, shares, strict=True)
    ]
    return tuple(sorted(ranked, key=lambda r: (-r.score, r.cause.name)))


def excluded(evidence: Evidence) -> dict[str, str]:
    """What cannot be the cause, and why."""
    found = {}
    for cause in all_causes():
        for exclusion in cause.excluded:
            facts = exclusion.when(evidence)
            if facts:
                places = ", ".join(dict.fromkeys(f.where for f in facts if f.where))
                found[cause.name] = f"{exclusion.says} ({places})" if places else exclusion.says
                break
    return found


def softmax(scores: Iterable[float]) -> list[float]:
    """Shares of probability.

    >>> softmax([0.0, 0.0])
    [0.5, 0.5]
    """
    values = list(scores)
    top = max(values, default=0.0)
    powers = [math.exp(s - top) for s in values]
    return [p / sum(powers) for p in powers]

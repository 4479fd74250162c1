"""What diagnose says: frozen records, made to be printed, compared and written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..records import to_json
from .bugs import find_bugs
from .engine import Confidence, Ranked, excluded, rank
from .evidence import Evidence
from .questions import Question, best_questions
from .vocabulary import FLAGS

SHOWN = 8
AT_LEAST = 3
_SYMPTOMS = ("onset", "about", "mechanism", "bad-leaf", "origin", "known-bug", "checkpoint-nonfinite", "xid-error")
NEEDS_EVIDENCE = ("lr-too-high", "warmup")
"""Never named as a mere possibility: "lower the learning rate" without evidence is folklore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A cause with what speaks for and against it."""

    name: str
    title: str
    confidence: Confidence
    evidence: tuple[str, ...]
    against: tuple[str, ...]
    fix: str
    verify: str
    share: float = 0.0
    """Its part of the probability, as the engine weighs it: for ranking, no more than that."""
    harmless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A fact that would decide between the first causes."""

    fact: str
    asks: str
    answers: tuple[str, ...]
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """One thing that was looked at: ✓ read and in order, ! read with something to say, ✗ not found or not readable."""

    mark: Literal["✓", "!", "✗"]
    what: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One line of the timeline."""

    when: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer: causes in rank order, when what went wrong, and the facts that would decide."""

    causes: tuple[Suspect, ...] = ()
    timeline: tuple[Moment, ...] = ()
    missing: tuple[Missing, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    checklist: tuple[Looked, ...] = ()
    notes: tuple[str, ...] = ()
    broke: bool = True
    """False when nothing shows that a run broke: the causes are then risks, and none is more than possible."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Further findings as text, by title: the precision table, findings that are finite but useless."""

    @property
    def decided(self) -> bool:
        """Whether the first cause is more than a possibility."""
        return bool(self.causes) and self.causes[0].confidence != "possible"

    @property
    def benign(self) -> bool:
        return self.decided and self.causes[0].harmless

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = to_json(self)
        return data


def conclude(evidence: Evidence, **rest: Any) -> Diagnosis:
    """The diagnosis of some evidence; ``rest`` goes into the record as it is."""
    evidence = evidence.plus(*find_bugs(evidence))
    if not len(evidence):
        return Diagnosis(**rest)
    ranked = rank(evidence)
    shown = _shown(ranked)
    broke = any(f.value is not False and (f.name in FLAGS or f.name in _SYMPTOMS) for f in evidence)
    sure = bool(shown) and shown[0].confidence == "strong"
    questions = () if sure else best_questions(evidence, ranked)
    return Diagnosis(
        causes=tuple(_suspect(r, evidence, broke) for r in shown),
        broke=broke,
        missing=tuple(_missing(q) for q in questions),
        excluded=excluded(evidence),
        **rest,
    )


def _shown(ranked: tuple[Ranked, ...]) -> list[Ranked]:
    """Those that something speaks for; when they are few, the next likeliest as mere possibilities."""
    shown = [r for r in ranked if r.supported][:SHOWN]
    others = [r for r in ranked if not r.supported and r.cause.name not in NEEDS_EVIDENCE and not r.cause.harmless]
    return sorted([*shown, *others[: max(0, AT_LEAST - len(shown))]], key=lambda r: -r.score)


def _suspect(ranked: Ranked, evidence: Evidence, broke: bool) -> Suspect:
    cause = ranked.cause
    return Suspect(
        name=cause.name, title=cause.title, confidence=ranked.confidence if broke else "possible",
        evidence=ranked.evidence, against=ranked.against, fix=cause.remedy(evidence), verify=cause.verify,
        share=round(ranked.share, 4), harmless=cause.harmless,
    )  # fmt: skip


def _missing(question: Question) -> Missing:
    return Missing(fact=question.name, asks=question.asks, answers=tuple(question.answers), command=question.command)

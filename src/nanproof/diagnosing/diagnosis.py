"""What diagnose says: frozen records, made to be printed, compared and written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..cards import card
from ..records import to_json
from .bugs import find_bugs
from .engine import Confidence, Ranked, excluded, rank
from .evidence import Evidence, Fact
from .questions import Question, best_questions, open_question
from .vocabulary import BREAKS, FLAGS

if TYPE_CHECKING:
    from .commands import Commands

SHOWN = 8
Verdict = Literal["broken", "healthy", "unknown"]
_PASSING = ("irregular-spikes", "recovers")
"""Not what broke a run that something else has ended."""
_SYMPTOMS = (
    "onset",
    "mechanism",
    "bad-leaf",
    "origin",
    "known-bug",
    "checkpoint-nonfinite",
    "xid-error",
    "lr-in-force",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A cause with the evidence for and against it."""

    name: str
    title: str
    confidence: Confidence
    evidence: tuple[str, ...]
    against: tuple[str, ...]
    fix: str
    verify: str
    commands: tuple[str, ...] = ()
    """What repairs it or shows it more closely; each was tried out for this run."""
    share: float = 0.0
    """Its part of the probability, as the engine weighs it: for ranking, no more than that."""
    harmless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The fact that would decide between the first causes, and the commands that answer it."""

    fact: str
    asks: str
    answers: tuple[str, ...]
    commands: tuple[str, ...]
    """The guarded run, which finds out by itself, where it can be started; else one for each answer, in their order."""


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
    broke: bool = False
    """Whether something stopped being finite there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A setting that was in force, its place, and what says otherwise."""

    setting: str
    value: str
    clash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer: causes in rank order, each with its evidence and commands, and the question that would decide."""

    verdict: Verdict = "unknown"
    """healthy only when a log shows it; unknown when nothing shows that a run broke, nor that it did not."""
    causes: tuple[Suspect, ...] = ()
    timeline: tuple[Moment, ...] = ()
    missing: tuple[Missing, ...] = ()
    in_force: tuple[Held, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    checklist: tuple[Looked, ...] = ()
    notes: tuple[str, ...] = ()
    ended: str = ""
    """What ended the run without its numbers being to blame: a lack of memory, a time limit, a bug of the script."""
    commands: tuple[str, ...] = ()
    """Every command that the text shows, in its order."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Further findings as text, by title: the precision table."""

    @property
    def broke(self) -> bool:
        return self.verdict == "broken"

    @property
    def decided(self) -> bool:
        """Whether the first cause is more than a possibility."""
        return bool(self.causes) and self.causes[0].confidence != "possible"

    @property
    def benign(self) -> bool:
        return self.verdict == "healthy"

    def _repr_html_(self) -> str:
        if not self.causes:
            return card(f"{self.verdict}: nothing that was read points to a cause")
        first = self.causes[0]
        facts = {f"evidence {n}": words for n, words in enumerate(first.evidence[:6], 1)}
        facts |= {"against": "; ".join(first.against), "repair": first.fix}
        facts["to decide"] = self.missing[0].asks if self.missing else ""
        title = f"{first.title} ({first.confidence})"
        return card(title, facts, good=self.benign, commands=self.commands)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = to_json(self)
        return data


def conclude(evidence: Evidence, *, commands: Commands | None = None, **rest: Any) -> Diagnosis:
    """The diagnosis of some evidence; ``rest`` goes into the record as it is."""
    from .commands import Commands

    build = commands or Commands(None)
    evidence = evidence.plus(*find_bugs(evidence))
    if not len(evidence):
        return Diagnosis(**rest)
    ranked = rank(evidence)
    shown = [r for r in ranked if r.supported][:SHOWN]
    outside = evidence.named("ended-outside")
    broke = any(_is_symptom(f) and not (outside and f.name in _PASSING) for f in evidence)
    suspects = tuple(_suspect(r, evidence, build, broke) for r in shown)
    healthy = bool(suspects) and suspects[0].harmless and suspects[0].confidence != "possible"
    sure = bool(suspects) and suspects[0].confidence == "strong"
    fine = not broke and bool(outside)  # nothing went wrong that a question could explain
    asked = best_questions(evidence, ranked, limit=1) if broke else open_question(evidence)
    asked = () if sure or healthy or fine else asked
    missing = tuple(_missing(q, build) for q in asked)
    first = next((s for s in suspects if broke or healthy or not s.harmless), None)
    ended = next((f"{f.words} ({f.where})" for f in outside), "")
    printed = [*(first.commands if first is not None else ()), *(c for m in missing for c in m.commands)]
    return Diagnosis(
        causes=suspects,
        verdict="healthy" if healthy else "broken" if broke else "unknown",
        missing=missing,
        ended=ended,
        excluded=excluded(evidence),
        commands=tuple(dict.fromkeys(printed)),
        **rest,
    )


def _is_symptom(fact: Fact) -> bool:
    """Whether a fact says that something went wrong; what a log is about, or that its loss is finite, does not."""
    if fact.name == "about":
        return fact.weak or fact.where == "--fact"
    return fact.value is not False and fact.name in (*FLAGS, *BREAKS, *_SYMPTOMS) and fact.name != "loss-finite"


def _suspect(ranked: Ranked, evidence: Evidence, commands: Commands, broke: bool) -> Suspect:
    cause = ranked.cause
    facts = [f for clue, found in ranked.speaking if clue.weight > 0 for f in found]
    return Suspect(
        name=cause.name,
        title=cause.title,
        confidence=ranked.confidence if broke or cause.harmless else "possible",
        evidence=ranked.evidence,
        against=ranked.against,
        fix=cause.remedy(evidence),
        verify=cause.verify,
        commands=commands.for_cause(cause.name, facts),
        share=round(ranked.share, 4),
        harmless=cause.harmless,
    )


def _missing(question: Question, commands: Commands) -> Missing:
    answers = tuple(question.answers)
    asked = commands.ask(question.name, answers)
    return Missing(fact=question.name, asks=question.asks, answers=answers, commands=asked)

"""A change that is proposed, and the small words that proposals are made of."""

from __future__ import annotations

from dataclasses import dataclass

from .case import Case
from .value import Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Set ``key`` to ``after``, because."""

    key: str
    after: Plain
    why: str
    evidence: tuple[str, ...] = ()
    asked: bool = False
    """By the user, with --set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Something that is not changed, and the reason."""

    what: str
    why: str
    mark: str = ""


Answer = Proposal | Refusal


def propose(case: Case, concept: str, after: Plain, why: str, *evidence: str) -> Answer:
    """A change of a concept, or the reason why there is no place for it."""
    key = case.key(concept)
    if key is None:
        return Refusal(
            what=concept, why=f"{why}, but this config has no key for it, and no reader is known that takes one"
        )
    return Proposal(key=key, after=after, why=why, evidence=tuple(evidence))


def nice(number: float) -> float:
    """A number without digits that nobody chose.

    >>> nice(0.1 * 3), nice(5e-05 / 2)
    (0.3, 2.5e-05)
    """
    return float(f"{number:.3g}")


def whole(number: float) -> int:
    return max(1, round(number))

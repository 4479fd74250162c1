"""What a cause declares: what it is, what speaks for and against it, how it is repaired and how that is verified."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass

from ..topics import Topic
from .clue import PROVES, Clue, Test, value
from .evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A repair: a command, a setting or a change of code. The first whose ``when`` holds is the one advised."""

    does: str
    """May name ``{config}``, ``{checkpoint}`` and other facts; what is unknown stays a word in capitals."""
    when: Test | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """What makes a cause impossible, whatever else speaks for it."""

    when: Test
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause of bad training. It lives in a file of its own in ``causes/`` and is found by that."""

    name: str
    title: str
    what: str
    share: float
    """How common it is, in percent of incidents seen."""
    clues: tuple[Clue, ...]
    excluded: tuple[Exclusion, ...] = ()
    remedies: tuple[Remedy, ...]
    verify: str
    harmless: bool = False

    @property
    def prior(self) -> float:
        """The log-odds before anything is known, drawn halfway to even: the sample they come from is small."""
        return 0.5 * math.log(self.share)

    @property
    def all_clues(self) -> tuple[Clue, ...]:
        """Its own clues, and that a known bug is a case of it."""
        return (*self.clues, Clue(weight=PROVES, when=value("known-bug", self.name), says="a known bug fits"))

    def remedy(self, evidence: Evidence) -> str:
        known = evidence.named(f"remedy-{self.name}")
        if known:
            return str(known[0].value)
        chosen = next(r for r in self.remedies if r.when is None or r.when(evidence))
        return fill(chosen.does, evidence)

    @property
    def topic(self) -> Topic:
        """Its page."""
        pro = "\n".join(f"- {c.says}" for c in self.clues if c.weight > 0)
        con = [f"- {c.says}" for c in self.clues if c.weight < 0]
        con += [f"- {e.says}: it cannot be this" for e in self.excluded]
        fixes = "\n".join(f"- {_plain(r.does)}" for r in self.remedies)
        return Topic(
            name=self.name,
            title=self.title,
            sections=(
                ("What it is", self.what),
                ("What speaks for it", pro),
                ("What speaks against it", "\n".join(con) or "Nothing in particular."),
                ("How to repair it", fixes),
                ("How to verify the repair", self.verify),
            ),
        )


def fill(text: str, evidence: Evidence) -> str:
    """Facts for the names in braces; what is not known stays in capitals, for the user to fill in.

    >>> from nanproof.diagnosing.evidence import Fact
    >>> fill("nanproof harden {config} --set lr={lr}", Evidence.of(Fact(name="lr", value=1e-4)))
    'nanproof harden CONFIG --set lr=0.0001'
    """
    names = {field for _, field, _, _ in string.Formatter().parse(text) if field}
    known = {name: next((f.value for f in evidence.named(name)), name.upper()) for name in names}
    return text.format(**{k: f"{v:g}" if isinstance(v, float) else v for k, v in known.items()})


def _plain(text: str) -> str:
    names = {field for _, field, _, _ in string.Formatter().parse(text) if field}
    return text.format(**{name: name.upper() for name in names})

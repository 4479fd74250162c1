"""What a cause declares: what it is, evidence for and against it, the repair, and how to verify it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..topics import Topic
from .clue import Clue, Test, pro, value
from .evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A repair: a setting or a change of code. The first whose ``when`` holds is the one advised."""

    does: str
    """What to change. The commands that do it are built for each run, see `commands`."""
    when: Test | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """What makes a cause impossible, whatever the other evidence."""

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
    replayed: tuple[str, ...] = ()
    """The mechanisms of `nanproof locate` that prove it."""
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
        """Its own clues, what a replay of the bad step proves, and that a known bug is a case of it."""
        replayed = pro("replayed", value("mechanism", *self.replayed), "the bad step itself shows it")
        known = pro("proves", value("known-bug", self.name), "a known bug fits")
        return (*self.clues, *([replayed] if self.replayed else ()), known)

    def remedy(self, evidence: Evidence) -> str:
        known = evidence.named(f"remedy-{self.name}")
        if known:
            return str(known[0].value)
        return next(r.does for r in self.remedies if r.when is None or r.when(evidence))

    @property
    def topic(self) -> Topic:
        """Its page."""
        pro = "\n".join(f"- {c.says}" for c in self.all_clues[:-1] if c.weight > 0)
        con = [f"- {c.says}" for c in self.clues if c.weight < 0]
        con += [f"- {e.says}: it cannot be this" for e in self.excluded]
        fixes = "\n".join(f"- {r.does}" for r in self.remedies)
        return Topic(
            name=self.name,
            title=self.title,
            sections=(
                ("What it is", self.what),
                ("Evidence for", pro),
                ("Evidence against", "\n".join(con) or "Nothing in particular."),
                ("Repair", fixes),
                ("Verify the repair", self.verify),
            ),
        )

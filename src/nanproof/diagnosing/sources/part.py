"""What one kind of file contributed: facts, lines of the check-list, moments of the timeline, notes and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..diagnosis import Looked, Moment
from ..evidence import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """All empty: nothing of the kind was there, or nothing is to be said about it."""

    facts: tuple[Fact, ...] = ()
    looked: tuple[Looked, ...] = ()
    moments: tuple[Moment, ...] = ()
    notes: tuple[str, ...] = ()
    tables: Mapping[str, str] = field(default_factory=dict)


def join(*parts: Part) -> Part:
    """All parts as one, in their order."""
    return Part(
        facts=tuple(f for p in parts for f in p.facts),
        looked=tuple(x for p in parts for x in p.looked),
        moments=tuple(m for p in parts for m in p.moments),
        notes=tuple(n for p in parts for n in p.notes),
        tables={k: v for p in parts for k, v in p.tables.items()},
    )

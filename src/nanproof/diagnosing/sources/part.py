"""What one kind of file contributed: facts, lines of the check-list, moments of the timeline, notes and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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


def name_in(root: Path, path: str | Path) -> str:
    """A path as the user would type it; of folders given in full, what lies below them.

    >>> name_in(Path("runs/a"), "runs/a/train.log"), name_in(Path("/home/u/a"), "/home/u/a/train.log")
    ('runs/a/train.log', 'train.log')
    """
    name = str(Path(path).relative_to(root)) if root.is_absolute() and Path(path).is_relative_to(root) else str(path)
    return name if name != "." else Path(path).absolute().name


def shorten(text: str, root: Path) -> str:
    """Sentences with paths in them, with the paths as `name_in` gives them."""
    return text.replace(f"{root}/", "") if root.is_absolute() else text

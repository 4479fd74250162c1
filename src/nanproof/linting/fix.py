"""Repairing a file: the edits of each finding all or none, again and again until nothing is left to do.

An edit that another one overlaps waits for the next round, where the finding is made again on the changed text. A fix
whose result does not compile, or after which the finding is still there, is withdrawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..records import Edit, Finding
from .document import Unreadable, open_document
from .engine import NOT_LINTED, Checked, Linter, Problem
from .rule import Change

ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A file before and after; what was repaired is gone from ``after``."""

    path: Path
    old: bytes
    new: bytes
    repaired: tuple[Finding, ...]
    """In the order of repair; places are those of the text at that moment."""
    after: Checked

    @property
    def changed(self) -> bool:
        return self.old != self.new

    @property
    def compiles(self) -> bool:
        """Whether Python compiles the new text; if the old one compiled, it does."""
        return _compiles(self.path, self.new)


@dataclass(frozen=True, slots=True)
class _State:
    data: bytes
    checked: Checked


def fix(linter: Linter, path: Path, data: bytes, *, unsafe: bool = False) -> Fixed:
    """Repair what can be repaired in the contents of a file; safe fixes only by default."""
    now = _State(data, linter.data(path, data))
    withdrawn, repaired = set[tuple[str, ...]](), list[Finding]()
    whole = any(_may(p, unsafe) for p in now.checked.problems) and _compiles(path, data)
    for _ in range(ROUNDS):
        batch = pick(p for p in now.checked.problems if _may(p, unsafe) and _key(p, now.checked) not in withdrawn)
        if not batch:
            break
        then = _after(linter, path, now, batch, whole)
        if then is None:  # one of them is bad, or two of them together: withdraw the bad, take the first of the rest
            bad = [p for p in batch if _after(linter, path, now, [p], whole) is None]
            withdrawn |= {_key(p, now.checked) for p in bad}
            batch = [p for p in batch if p not in bad][:1]
            then = _after(linter, path, now, batch, whole) if batch else None
        if then is not None:
            now = then
            repaired += [p.finding for p in batch]
    return Fixed(path=path, old=data, new=now.data, repaired=tuple(repaired), after=now.checked)


def pick(problems: Iterable[Problem]) -> list[Problem]:
    """Findings whose edits do not get in each other's way; the first in the text come first."""
    chosen: list[Problem] = []
    taken: list[Change] = []
    for problem in problems:
        own = [c for c in problem.changes if not (c.shared and c in taken)]
        if not any(_overlap(a, b) for a in own for b in taken):
            chosen.append(problem)
            taken += own
    return chosen


def _overlap(a: Change, b: Change) -> bool:
    """Whether two changes touch the same text; two insertions at one place do, as their order would be a guess."""
    if a.start == a.end and b.start == b.end:
        return a.start == b.start
    if a.start == a.end:
        return b.start < a.start < b.end
    if b.start == b.end:
        return a.start < b.start < a.end
    return a.start < b.end and b.start < a.end


def apply_edits(data: bytes, edits: Iterable[Edit], encoding: str = "utf-8") -> bytes:
    """Replace ranges of bytes that do not overlap; the same insertion asked for twice is made once.

    >>> apply_edits(b"log(sigmoid(x))", [Edit(path="a", start=0, end=14, text="logsigmoid(x")])
    b'logsigmoid(x)'
    """
    pieces, at = [], 0
    for edit in sorted(set(edits), key=lambda e: (e.start, e.end)):
        pieces += [data[at : edit.start], edit.text.encode(encoding)]
        at = edit.end
    return b"".join([*pieces, data[at:]])


def _after(linter: Linter, path: Path, now: _State, chosen: Sequence[Problem], whole: bool) -> _State | None:
    """The file with these findings repaired, if it still compiles and they are gone."""
    assert now.checked.document is not None
    new = apply_edits(now.data, [e for p in chosen for e in p.finding.edits], now.checked.document.encoding)
    if new == now.data or (whole and not _compiles(path, new)):
        return None
    after = linter.data(path, new)
    had, has, gone = _counts(now.checked), _counts(after), Counter(p.finding.code for p in chosen)
    if has[NOT_LINTED] > had[NOT_LINTED] or any(has[code] > had[code] - count for code, count in gone.items()):
        return None
    return _State(new, after)


def _counts(checked: Checked) -> Counter[str]:
    return Counter(p.finding.code for p in checked.problems)


def _may(problem: Problem, unsafe: bool) -> bool:
    return bool(problem.finding.edits) and (problem.finding.safe or unsafe)


def _key(problem: Problem, checked: Checked) -> tuple[str, ...]:
    """What a finding is recognized by after other edits have moved it."""
    text = checked.document.text if checked.document else ""
    return problem.finding.code, problem.finding.message, text[problem.span[0] : problem.span[1]]


def _compiles(path: Path, data: bytes) -> bool:
    try:
        return open_document(str(path), data).compiles()
    except Unreadable:
        return False

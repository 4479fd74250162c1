"""How well the rules do on the project's own labelled files: `python scripts/lint_score.py [FIXTURE …]`.

A line that must be reported ends with ``# error: NP301`` (several codes: ``# error: NP301, NP105``); any other finding
is a false alarm. ``# miss: NP301`` marks a mistake that the rule knowingly does not find: it counts against recall. A
fixture is linted by all rules that are on by default, and by the rule that its name begins with.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanproof.linting.engine import Linter
from nanproof.linting.settings import Settings, choose_rules

FOLDER = Path(__file__).parent.parent / "tests" / "lint" / "fixtures"
_MARK = re.compile(r"#\s*(error|miss):\s*(NP\d{3}(?:\s*,\s*NP\d{3})*)")

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Score:
    """Places (code and line) that were found rightly, wrongly, not at all though marked, and known to be missed."""

    right: frozenset[Place] = frozenset()
    false: frozenset[Place] = frozenset()
    missed: frozenset[Place] = frozenset()
    known: frozenset[Place] = frozenset()


@dataclass(frozen=True, slots=True)
class Total:
    """The sums over several files."""

    right: int
    false: int
    missed: int
    """Recorded misses included."""

    @property
    def precision(self) -> float:
        return self.right / max(1, self.right + self.false)

    @property
    def recall(self) -> float:
        return self.right / max(1, self.right + self.missed)


def fixtures() -> list[Path]:
    return sorted(FOLDER.glob("*.py"))


def marks(text: str, kind: str = "error") -> dict[int, list[str]]:
    """The codes that each line is marked with.

    >>> marks("a\\nb  # error: NP301, NP105\\n")
    {2: ['NP105', 'NP301']}
    """
    found: dict[int, set[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for word, codes in _MARK.findall(line):
            if word == kind:
                found.setdefault(number, set()).update(c.strip() for c in codes.split(","))
    return {n: sorted(codes) for n, codes in found.items()}


def score(path: Path) -> Score:
    """What the rules find in one file against its marks."""
    text = path.read_text(encoding="utf-8")
    own = path.stem[:5].upper()
    rules = {r.code: r for r in choose_rules([], [])}
    rules |= {r.code: r for r in choose_rules(["ALL"], []) if r.code == own}
    linter = Linter([], tuple(rules.values()), Settings())
    found = {(p.finding.code, p.finding.line) for p in linter.data(Path(path.name), path.read_bytes()).problems}
    wanted = {(code, line) for line, codes in marks(text).items() for code in codes}
    known = {(code, line) for line, codes in marks(text, "miss").items() for code in codes}
    return Score(
        right=frozenset(found & wanted), false=frozenset(found - wanted), missed=frozenset(wanted - found),
        known=frozenset(known - found),
    )  # fmt: skip


def total(paths: Sequence[Path]) -> Total:
    scores = [score(p) for p in paths]
    return Total(
        sum(len(s.right) for s in scores), sum(len(s.false) for s in scores),
        sum(len(s.missed) + len(s.known) for s in scores),
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    paths = [Path(a) for a in arguments] or fixtures()
    for path in paths:
        result = score(path)
        print(f"{path.stem:<40} right {len(result.right):>3}  false {len(result.false):>2}  "
              f"missed {len(result.missed):>2}  known misses {len(result.known):>2}")  # fmt: skip
        for code, line in sorted(result.false, key=lambda p: p[1]):
            print(f"    {path.name}:{line}: {code} is reported, but not marked")
        for code, line in sorted(result.missed, key=lambda p: p[1]):
            print(f"    {path.name}:{line}: {code} is marked, but not reported")
    sums = total(paths)
    print(f"{len(paths)} files: precision {sums.precision:.3f}, recall {sums.recall:.3f} "
          f"({sums.right} right, {sums.false} false, {sums.missed} missed, recorded misses included)")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

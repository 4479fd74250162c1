"""How well the rules do on the project's own labeled files: `python scripts/score_lint.py [FIXTURE …]`.

`--judged` prints the precision per rule over public code, from the findings that were read and judged one by one
(tests/linting/judged.tsv: repository, commit, path, line, rule, verdict, the round in which the repository was linted
for the first time, and whether the finding is shown today). `--docs` writes the same table into docs/lint.md.
`--repos FOLDER` lints checkouts named `owner+name`, compares with the judgments, and writes the last column.

A line that must be reported ends with ``# error: NP301`` (several codes: ``# error: NP301, NP105``); any other finding
is a false alarm. ``# info: NP201`` marks what only ``--info`` shows, and ``# miss: NP301`` a mistake that the rule
knowingly does not find: both count against recall. A fixture is linted by all rules that are on by default, and by the
rule that its name begins with, and only marks of these rules count; infos without a mark are not looked at.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from nanproof.linting import lint
from nanproof.linting.catalogue import everything, is_default
from nanproof.linting.engine import Linter
from nanproof.linting.settings import Settings, choose_rules

FOLDER = Path(__file__).parent.parent / "tests" / "linting" / "fixtures"
_MARK = re.compile(r"#\s*(error|info|miss):\s*(NP\d{3}(?:\s*,\s*NP\d{3})*)")

Place = tuple[str, int]
Place4 = tuple[str, str, int, str]


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
    linter = Linter([], tuple(rules.values()), Settings(info=True))
    findings = [p.finding for p in linter.data(Path(path.name), path.read_bytes()).problems]
    found = {(f.code, f.line) for f in findings if not f.info}
    infos = {(f.code, f.line) for f in findings if f.info}
    wanted, possible, known = (
        {(code, line) for line, codes in marks(text, kind).items() for code in codes if code in rules}
        for kind in ("error", "info", "miss")
    )
    return Score(
        right=frozenset(found & wanted),
        false=frozenset(found - wanted),
        missed=frozenset((wanted - found) | (possible - infos)),
        known=frozenset((known - found) | (possible & infos)),
    )


def total(paths: Sequence[Path]) -> Total:
    scores = [score(p) for p in paths]
    return Total(
        sum(len(s.right) for s in scores),
        sum(len(s.false) for s in scores),
        sum(len(s.missed) + len(s.known) for s in scores),
    )


JUDGED = FOLDER.parent / "judged.tsv"
PAGE = Path(__file__).parent.parent / "docs" / "lint.md"
BEGIN, END = "<!-- precision: written by scripts/score_lint.py --docs -->", "<!-- end of precision -->"
VERDICTS = ("true", "arguable", "false")


@dataclass(frozen=True, slots=True)
class Judgment:
    """What reading one finding in public code said about it."""

    repo: str
    commit: str
    path: str
    line: int
    rule: str
    verdict: str
    round: str
    """"tune", "measure", "fresh", "last", then "round1" and so on: in each, repositories that no rule had seen."""
    today: str
    """"shown", "info", "gone", or nothing where there was no checkout."""


HEAD = "repo\tcommit\tpath\tline\trule\tverdict\tround\ttoday"


def judgments() -> list[Judgment]:
    rows = [line.split("\t") for line in JUDGED.read_text(encoding="utf-8").splitlines()[1:]]
    return [Judgment(r[0], r[1], r[2], int(r[3]), r[4], r[5], r[6], r[7]) for r in rows]


def table(found: Sequence[Judgment]) -> list[str]:
    """Markdown: one row for each rule, what it shows today, most findings first; then each round at first sight."""
    default = {r.code for r in everything() if is_default(r)}
    shown = [j for j in found if j.today == "shown"]
    rules = sorted({j.rule for j in shown}, key=lambda c: (-sum(j.rule == c for j in shown), c))
    lines = ["| rule | true | arguable | false | true, % | by default |", "|---|---|---|---|---|---|"]
    for code in rules:
        lines.append(_row(code, [j for j in shown if j.rule == code], "on" if code in default else "off"))
    lines.append(_row("all of these that are on", [j for j in shown if j.rule in default], ""))
    for name in sorted({j.round for j in found if j.round.startswith("round")}, key=lambda r: int(r[5:])):
        own = [j for j in found if j.round == name]
        lines.append(_row(f"{name}, {len({j.repo for j in own})} repositories with findings, at first sight", own, ""))
    return lines


def _row(name: str, found: Sequence[Judgment], state: str) -> str:
    counts = [sum(j.verdict == v for j in found) for v in VERDICTS]
    share = f"{100 * counts[0] / len(found):.0f}" if found else "–"
    return f"| {name} | {counts[0]} | {counts[1]} | {counts[2]} | {share} | {state} |"


def precision_text() -> str:
    found = judgments()
    repos = len({j.repo for j in found})
    words = f"{len(found)} findings in {repos} public repositories, judged by reading the code:"
    return "\n".join([BEGIN, words, "", *table(found), END])


def write_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index(BEGIN), text.index(END) + len(END)
    PAGE.write_text(text[:start] + precision_text() + text[end:], encoding="utf-8")


def score_repos(folder: Path) -> None:
    """Lint checkouts, and write down which of the judged findings are shown today."""
    found = judgments()
    today: dict[Place4, str] = {}
    for repo in sorted({j.repo for j in found}):
        place = folder / repo.replace("/", "+")
        if not place.is_dir():
            print(f"{repo}: no checkout")
            continue
        for finding in lint(place, info=True):
            path = Path(finding.path.partition(":cell")[0]).relative_to(place).as_posix()
            today[repo, path, finding.line, finding.code] = "info" if finding.info else "shown"
    known = {(j.repo, j.path, j.line, j.rule) for j in found}
    new = [k for k, state in today.items() if state == "shown" and k not in known]
    kept = [
        replace(j, today=today.get((j.repo, j.path, j.line, j.rule), "gone"))
        if (folder / j.repo.replace("/", "+")).is_dir()
        else j
        for j in found
    ]
    JUDGED.write_text("\n".join([HEAD, *("\t".join(map(str, astuple(j))) for j in kept)]) + "\n", encoding="utf-8")
    print("\n".join(table(kept)))
    print(f"{len(new)} shown and not judged:", *sorted(new), sep="\n    ")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--judged"]:
        print(precision_text())
        return 0
    if arguments[:1] == ["--docs"]:
        write_page()
        return 0
    if arguments[:1] == ["--repos"]:
        score_repos(Path(arguments[1]))
        return 0
    paths = [Path(a) for a in arguments] or fixtures()
    for path in paths:
        result = score(path)
        print(
            f"{path.stem:<40} right {len(result.right):>3}  false {len(result.false):>2}  "
            f"missed {len(result.missed):>2}  known misses {len(result.known):>2}"
        )
        for code, line in sorted(result.false, key=lambda p: p[1]):
            print(f"    {path.name}:{line}: {code} is reported, but not marked")
        for code, line in sorted(result.missed, key=lambda p: p[1]):
            print(f"    {path.name}:{line}: {code} is marked, but not reported")
    sums = total(paths)
    print(
        f"{len(paths)} files: precision {sums.precision:.3f}, recall {sums.recall:.3f} "
        f"({sums.right} right, {sums.false} false, {sums.missed} missed, recorded misses included)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How often diagnose names the confirmed cause, and what its words of confidence are worth.

    scripts/score_diagnose.py SET... [--half dev|kept|all] [--misses] [--commands] [--write docs/diagnose.md]

The words are cross-validated: the limits of "strong" and "likely" are chosen on nine tenths of the cases and judged on
the tenth that was left out. A SET is a JSON-lines file of described incidents, a directory of run folders with
truth.json, or folders packed in a text file. Diagnose never sees the confirmed cause. Two baselines are printed beside
it: a random order of the causes, and the most common cause of the other cases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from diagnosing.folders import Folder, load_folders  # noqa: E402
from diagnosing.typed import commands_of, complaint  # noqa: E402
from nanproof.diagnosing import Diagnosis, diagnose, diagnose_evidence  # noqa: E402
from nanproof.diagnosing.bugs import find_bugs  # noqa: E402
from nanproof.diagnosing.causes import all_causes  # noqa: E402
from nanproof.diagnosing.described import FIELDS, read_description  # noqa: E402
from nanproof.diagnosing.engine import LIMITS, Limits, Ranked, rank  # noqa: E402
from nanproof.diagnosing.evidence import Evidence  # noqa: E402
from nanproof.diagnosing.run import read_run  # noqa: E402
from nanproof.errors import UsageError  # noqa: E402

WORDS = ("strong", "likely", "possible")
WANTED = {"strong": 0.95, "likely": 0.80}
FOLDS = 10
PAGES: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One scored answer."""

    name: str
    accept: tuple[str, ...]
    diagnosis: Diagnosis
    best: Ranked | None = None
    """The first cause as the engine weighed it."""
    failed: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.diagnosis.causes]

    @property
    def first(self) -> bool:
        return bool(self.names) and self.names[0] in self.accept

    @property
    def in_three(self) -> bool:
        return any(c.name in self.accept and c.evidence for c in self.diagnosis.causes[:3])

    @property
    def word(self) -> str:
        return self.diagnosis.causes[0].confidence if self.diagnosis.causes else "possible"

    @property
    def wrong(self) -> bool:
        """Sure of itself, and wrong."""
        return self.word != "possible" and not self.first

    @property
    def all_clear(self) -> bool:
        """Says that nothing is wrong, of a run that is broken."""
        return "benign" not in self.accept and self.diagnosis.benign

    @property
    def unseen(self) -> bool:
        """Cannot tell whether the run broke."""
        return "benign" not in self.accept and not self.diagnosis.benign and not self.diagnosis.broke


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--half", choices=("dev", "kept", "all"), default="all", help="of packed folders")
    parser.add_argument("--misses", action="store_true", help="print each case whose cause does not come first")
    parser.add_argument("--commands", action="store_true", help="run every command that is printed, in a copy")
    parser.add_argument("--write", type=Path, help="put the reliability table into this page")
    options = parser.parse_args()
    tables = []
    everything: list[Case] = []
    halves = ("dev", "kept") if options.half == "all" else (options.half,)
    for path, half in [(p, h) for p in options.sets for h in (halves if p.suffix == ".txt" else halves[:1])]:
        cases = list(_cases(path, half, options.commands))
        if not cases:
            print(f"no cases in {path}")
            return 2
        everything += cases
        label = f"{path.name}{f' ({half})' if path.suffix == '.txt' else ''}"
        print(f"\n{label}")
        print("\n".join(_report(cases, misses=options.misses, commands=options.commands)))
        tables.append((label, cases))
    reliability = list(cross_validate(everything))
    print("\n" + "\n".join(reliability))
    if options.write is not None:
        _write(options.write, tables, reliability)
    return int(any(c.failed or c.all_clear for c in everything))


def _cases(path: Path, half: str, commands: bool) -> Iterator[Case]:
    if path.suffix == ".jsonl":
        for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
            incident = json.loads(line)
            cause = incident.get("confirmed_cause") or incident["cause"]
            described = {k: incident[k] for k in FIELDS if k in incident}
            evidence, _ = read_description(described)
            with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
                Path("incident.json").write_text(json.dumps(described), encoding="utf-8")
                diagnosis = diagnose(evidence="incident.json")
                failed = tuple(_failing(diagnosis, PAGES)) if commands else ()
            name = incident.get("id", "?")
            yield Case(name=name, accept=(cause,), diagnosis=diagnosis, best=_best(evidence), failed=failed)
        return
    for folder in load_folders(path, half=half):  # type: ignore[arg-type]
        yield _diagnose(folder, PAGES if commands else None)


def _diagnose(folder: Folder, pages: set[str] | None) -> Case:
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(folder.write(Path(scratch, "run"))):
        root = Path()
        try:
            diagnosis = diagnose(root)
        except UsageError:  # a folder in which it finds nothing to read is a miss
            return Case(name=folder.name, accept=folder.accept, diagnosis=diagnose_evidence(Evidence.of()))
        best = _best(Evidence.of(*read_run([root]).part.facts))
        failed = tuple(_failing(diagnosis, pages)) if pages is not None else ()
        return Case(name=folder.name, accept=folder.accept, diagnosis=diagnosis, best=best, failed=failed)


def _best(evidence: Evidence) -> Ranked | None:
    return next((r for r in rank(evidence.plus(*find_bugs(evidence))) if r.supported), None)


def _failing(diagnosis: Diagnosis, pages: set[str]) -> Iterator[str]:
    """The commands that fail or do nothing, typed as they stand; a page is the same everywhere and read once."""
    for command in commands_of(diagnosis):
        if command not in pages and (said := complaint(command)):
            yield said
        pages |= {command} if command.startswith("nanproof explain ") else set()


def _report(cases: list[Case], *, misses: bool, commands: bool) -> Iterator[str]:
    total = len(cases)
    for case in cases:
        if misses and (not case.first or case.failed or case.all_clear or case.unseen):
            place = next((i + 1 for i, n in enumerate(case.names) if n in case.accept), 0)
            clear = ", FALSE ALL-CLEAR" if case.all_clear else ", not seen as broken" if case.unseen else ""
            yield f"  {case.name:<8} {case.accept[0]} came {place or 'not at all'}; first: {', '.join(case.names[:3])} ({case.word}){clear}"  # noqa: E501
            yield from (f"           failed: {f}" for f in case.failed)
    random_order, common = _baselines(cases)
    first, three = sum(c.first for c in cases), sum(c.in_three for c in cases)
    yield f"  {total} cases: top-1 {first / total:.0%}, top-3 with evidence {three / total:.0%}"
    yield f"  baselines, top-1: random order {random_order:.0%}, most common cause {common:.0%}"
    sure = [c for c in cases if c.word != "possible"]
    wrong = sum(c.wrong for c in cases)
    yield f"  confidently wrong {wrong} of {len(sure)}, {wrong / total:.1%} of all"
    for word in WORDS:
        mine = [c for c in cases if c.word == word]
        yield f"  {word}: right in {sum(c.first for c in mine)} of {len(mine)}"
    unseen = sum(c.unseen for c in cases)
    yield f"  false all-clears {sum(c.all_clear for c in cases)}, not seen as broken {unseen}"
    if commands:
        yield f"  commands that fail {sum(len(c.failed) for c in cases)}"


def _word(case: Case, limits: Limits) -> str:
    return case.best.judge(limits) if case.best is not None and case.diagnosis.broke else "possible"


def _choose(cases: list[Case]) -> Limits:
    """The widest limits that keep each word's promise on these cases, with one error more than was seen."""

    def kept(word: str, limits: Limits) -> int:
        mine = [c.first for c in cases if _word(c, limits) == word]
        return len(mine) if sum(mine) >= WANTED[word] * (len(mine) + 1) else -1

    steps = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    strong = [Limits(strong_share=s, strong_weight=w) for s in steps for w in (5.0, 6.0, 7.0, 8.0)]
    first = max(strong, key=lambda x: (kept("strong", x), x.strong_share, x.strong_weight))
    likely = [replace(first, likely_share=s, likely_weight=w) for s in steps for w in (2.0, 3.0, 4.0, 5.0)]
    return max(likely, key=lambda x: (kept("likely", x), x.likely_share, x.likely_weight))


def cross_validate(cases: list[Case]) -> Iterator[str]:
    """How often each word is right: with the limits in force, and on cases that had no part in choosing them."""
    order = list(range(len(cases)))
    random.Random(0).shuffle(order)
    held: dict[str, list[bool]] = defaultdict(list)
    for fold in range(min(FOLDS, len(cases) // 2)):
        out = set(order[fold::FOLDS])
        limits = _choose([c for i, c in enumerate(cases) if i not in out])
        for i in out:
            held[_word(cases[i], limits)].append(cases[i].first)
    now: dict[str, list[bool]] = defaultdict(list)
    for case in cases:
        now[case.word].append(case.first)
    yield f"| word | wanted | right, of {len(cases)} cases | right when left out of the choice of limits |"
    yield "|---|---|---|---|"
    for word in WORDS:
        wanted = f"{WANTED[word]:.0%}" if word in WANTED else ""
        yield f"| {word} | {wanted} | {_rate(now[word])} | {_rate(held[word])} |"
    yield ""
    yield f"In force: {_limits(LIMITS)}. Chosen by all cases: {_limits(_choose(cases))}."


def _rate(right: list[bool]) -> str:
    return f"{sum(right)} of {len(right)} ({sum(right) / len(right):.0%})" if right else "none"


def _limits(limits: Limits) -> str:
    strong = f"strong from a share of {limits.strong_share:g} and a weight of {limits.strong_weight:g} on"
    return f"{strong}, likely from {limits.likely_share:g} and {limits.likely_weight:g}"


def _baselines(cases: list[Case]) -> tuple[float, float]:
    """Top-1 of a random order (mean of 200), and of naming the most common cause of the other cases."""
    names = [c.name for c in all_causes()]
    dice = random.Random(0)
    rounds = [sum(dice.choice(names) in c.accept for c in cases) for _ in range(200)]
    counts = Counter(c.accept[0] for c in cases)
    right = 0
    for case in cases:
        others = counts - Counter([case.accept[0]])
        right += bool(others) and max(others, key=lambda n: (others[n], n)) in case.accept
    return sum(rounds) / len(rounds) / len(cases), right / len(cases)


START, STOP = "<!-- reliability: written by scripts/score_diagnose.py -->", "<!-- end of reliability -->"


def _write(page: Path, tables: list[tuple[str, list[Case]]], reliability: list[str]) -> None:
    lines = [
        START,
        "",
        "| set | cases | top-1 | top-3 with evidence | strong | likely | random | most common |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, cases in tables:
        by: dict[str, list[Case]] = defaultdict(list)
        for case in cases:
            by[case.word].append(case)
        words = [f"{sum(c.first for c in by[w])} of {len(by[w])} right" for w in ("strong", "likely")]
        random_order, common = _baselines(cases)
        first, three = sum(c.first for c in cases) / len(cases), sum(c.in_three for c in cases) / len(cases)
        lines.append(
            f"| {label} | {len(cases)} | {first:.0%} | {three:.0%} | {words[0]} | {words[1]} | {random_order:.0%} "
            f"| {common:.0%} |"
        )
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    page.write_text(
        before + "\n".join([*lines, "", *reliability, "", STOP]) + rest.partition(STOP)[2], encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Cures dying programs, compares with two baselines, and writes the table into docs/cure.md.

python scripts/cure_bench.py --set tune            # the ten programs that the search was tuned on
python scripts/cure_bench.py --set held            # the ten that it never saw
python scripts/cure_bench.py --set cases           # the four cases, ten minutes for each, without baselines
python scripts/cure_bench.py --write               # the table of what was measured

Baselines have the same candidates, trials and judge: "random order" takes single changes in random order until one
passes at the program's own seed, on average over all orders; "lr only" divides the learning rate by 2, 5, 10, 100. Each
answer counts only if it holds on three seeds. A `cured` is false if it fails on two of three further seeds.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from nanproof.cases import find_all
from nanproof.cure.command import read_command
from nanproof.cure.judge import judge
from nanproof.cure.kinds import propose
from nanproof.cure.pool import open_pool
from nanproof.cure.search import Plan, Search
from nanproof.cure.surface import read_surface
from nanproof.cure.trial import Ran, Trial
from nanproof.files import make_folder, write_atomic
from nanproof.records import to_json

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "benchmarks" / "cure"
SETS = ("tune", "held", "cases")
NEW_SEEDS = (11, 12, 13)


class Measured:
    """One program: the search, and what the baselines would have answered."""

    def __init__(self, words: list[str], folder: Path, out: Path, jobs: int, budget: float) -> None:
        self.surface = read_surface(read_command(words), folder)
        self.out, self.jobs, self.budget = out, jobs, budget

    def run(self, baselines: bool) -> dict[str, object]:
        with open_pool(self.jobs, None, self.surface.imports()) as pool:
            self.pool = pool
            self.search = search = Search(
                self.surface,
                Plan(out=self.out, budget=self.budget),
                pool,
                tell=_indented,
            )
            outcome = search.run()
            told: dict[str, object] = {
                "answer": outcome.answer,
                "died_at": outcome.died_at,
                "winner": outcome.winner,
                "cures": outcome.cures,
                "values": outcome.line.values if outcome.line else "",
                "trials": outcome.trials,
                "seconds": outcome.seconds,
                "told": outcome.told,
                "target": outcome.line.metrics[0].target if outcome.line and outcome.line.metrics else None,
            }
            if outcome.answer == "cured" and outcome.line is not None:
                runs = self._on(outcome.line.change, NEW_SEEDS)
                told["new_seeds"] = [r.metric.value if r.metric else None for r in runs]
                told["held"] = sum(judge(r, search.reference).standing == "cured" for r in runs)
            if baselines:
                told |= self._baselines()
        return told

    def _on(self, change: object, seeds: tuple[int, ...]) -> list[Ran]:
        trials = [Trial(change=change, seed=s, seed_edit=self.surface.seed(s)) for s in seeds]  # type: ignore[arg-type]
        return self.pool.run(self.search.bench, trials, float("inf"), lambda trial, ran: None)

    def _baselines(self) -> dict[str, object]:
        singles = propose(self.search.evidence, self.surface)
        runs = self.pool.run(
            self.search.bench, [Trial(change=c) for c in singles], float("inf"), lambda trial, ran: None
        )
        own = {c.name: judge(r, self.search.reference).standing for c, r in zip(singles, runs, strict=True)}
        passing = [c for c in singles if own[c.name] == "cured"]
        good = []
        for change in passing:
            seeds = self.search.seeds[1:]
            verdicts = [judge(r, self.search.reference) for r in self._on(change, seeds)]
            if all(v.standing == "cured" for v in verdicts):
                good.append(change.name)
        lr = [c.name for c in singles if c.kind == "learning rate" and own[c.name] == "cured"]
        return {
            "singles": own,
            "passing": [c.name for c in passing],
            "good": good,
            # in a random order the first that passes is any of the passing ones alike
            "random": len(good) / len(passing) if passing else 0.0,
            "random_trials": (len(singles) + 1) / (len(passing) + 1) if passing else len(singles),
            "lr_only": bool(lr) and lr[0] in good,
        }


def _indented(text: str) -> None:
    print(f"    {text}", flush=True)


def write_tables(results: Path, page: Path) -> None:
    write_between(page, "measured", table_of_programs(results))
    if (results / "cases").is_dir():
        write_between(page, "cases", table_of_cases(results / "cases"))


def write_between(page: Path, name: str, lines: list[str]) -> None:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text()
    if begin not in text:
        text += f"\n{begin}\n{end}\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    write_atomic(page, f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}")


def table_of_cases(results: Path) -> list[str]:
    lines = [
        "The four [cases](cases/README.md), in ten minutes each on two cores"
        " (`python scripts/cure_bench.py --set cases`):",
        "",
        "| case | dies at | answer | cure, or the best | metric on 3 seeds (target) | new seeds | trials | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in find_all():
        path = results / f"{case.name}.json"
        if not path.exists():
            continue
        told = json.loads(path.read_text())
        held = f"{told['held']} of 3" if "held" in told else "–"
        values = f"{told['values']} ({told['target']:g})" if told["values"] else "–"
        lines.append(
            f"| [{case.name}](cases/{case.name}.md) | {told['died_at'] or '–'} | {told['answer']} | "
            f"{told['winner'] or '–'} | {values} | {held} | {told['trials']} | {told['seconds'] / 60:.1f} |"
        )
    return lines


def table_of_programs(results: Path) -> list[str]:
    rows, sums = [], {"tune": [0, 0.0, 0, 0, 0], "held": [0, 0.0, 0, 0, 0]}
    for split in sums:
        for path in sorted((results / split).glob("*.json")):
            told = json.loads(path.read_text())
            false = told["answer"] == "cured" and told.get("held", 3) < 2
            total = sums[split]
            total[0] += told["answer"] == "cured" and not false
            total[1] += told.get("random", 0.0)
            total[2] += bool(told.get("lr_only"))
            total[3] += false
            total[4] += 1
            lr_only = "yes" if told.get("lr_only") else "no"
            held = f"{told['held']} of 3" if "held" in told else "–"
            rows.append(
                f"| {path.stem} | {split} | {told['died_at'] or '–'} | {told['answer']} | {told['winner'] or '–'} | "
                f"{told['values'] or '–'} | {held} | {told.get('random', 0):.2f} | {lr_only} |"
            )
    lines = [
        "| program | set | dies at | answer | cure, or the best | metric on 3 seeds | new seeds | random order |"
        " lr only |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    for split, (cured, random, lr, false, count) in sums.items():
        what = "tuned on" if split == "tune" else "not tuned on"
        lines.append(f"- {what}: **{cured} of {count} cured**, {false} false; random order {random:.1f}, lr only {lr}.")
    return lines


def programs_of(split: str, out: Path) -> list[tuple[str, list[str], Path]]:
    """Name, command and project folder of each program of a set."""
    if split != "cases":
        found = sorted(p for p in (PROGRAMS / split).iterdir() if (p / "train.py").exists())
        return [(p.name, ["python", "train.py"], p) for p in found]
    words = ("python", "-m", "{}.train", "--config-name", "original")
    return [
        (case.name, [w.format(case.module) for w in words], make_folder(out / "projects" / case.name))
        for case in find_all()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, dest="split")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "cure-bench")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", type=float, default=600)
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    out = args.out.absolute()
    for split in SETS if args.split is None and not args.write else [args.split] if args.split else []:
        for name, words, folder in programs_of(split, out):
            if args.only and name not in args.only:
                continue
            print(f"{name} …", flush=True)
            measured = Measured(words, folder, out / split / name, args.jobs, args.budget)
            told = measured.run(baselines=split != "cases" and not args.no_baselines)
            print(f"  {told['told']}", flush=True)
            make_folder(out / split)
            write_atomic(out / split / f"{name}.json", json.dumps(to_json(told), indent=1))
    if args.write or args.split is None:
        write_tables(out, ROOT / "docs" / "cure.md")


if __name__ == "__main__":
    main()

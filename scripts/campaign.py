"""The fault-injection campaign: `make chaos`, a longer one with SEEDS=2000, one trial again with SEED=numeric:17.

Tier A breaks training runs, tier B disks, tier C files and requests; what each of them does is told in tests/chaos.
The table goes to docs/reliability.md.
"""

from __future__ import annotations

import argparse
import collections
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from written import write_table

from chaos import interrupted, numeric, rubbish
from chaos.workers import Workers

DEADLINE = 10.0
PER_SEED = {"checkpoint": 10, "log": 4, "config": 3, "code": 3, "request": 1}
"""Malformed pieces for each seed of the campaign."""
PORTION = 2000
"""So many at a time; a new portion has a new seed."""
LAYOUTS = {
    "single": "one process",
    "ddp": "DDP, two ranks",
    "nested": "DDP inside another module, two ranks",
    "fsdp2": "FSDP2, two ranks",
    "hsdp": "HSDP, two replicas",
    "pipeline": "pipeline of two stages, 1F1B",
}


assert set(LAYOUTS) == set(numeric.LAYOUTS)


def complain(seed: str, error: object) -> None:
    print(f"FAILED  {' '.join(str(error).split())[:600]}\n        reproduce: make chaos SEED={seed}", flush=True)


# --- tier A ---------------------------------------------------------------------------------------------------------


def break_numbers(seeds: list[int]) -> tuple[list[str], int]:
    """Rows of the table, and how many trials failed."""
    trials: collections.Counter[str] = collections.Counter()
    faults: collections.Counter[str] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    with Workers(deadline=DEADLINE) as workers:
        for done, seed in enumerate(seeds, 1):
            trial = numeric.draw(seed)
            trials[trial.layout] += 1
            faults[trial.layout] += len(trial.faults)
            try:
                numeric.check(workers, trial)
            except AssertionError as error:
                failed[trial.layout] += 1
                complain(f"numeric:{seed}", f"{error} {trial}")
            if done % 20 == 0:
                print(f"A  {done} of {len(seeds)} trials, {failed.total()} failed", flush=True)
    rows = [f"| {LAYOUTS[k]} | {trials[k]:,} | {faults[k]:,} | {failed[k]:,} |" for k in LAYOUTS if trials[k]]
    rows.append(f"| all | {trials.total():,} | {faults.total():,} | {failed.total():,} |")
    return rows, failed.total()


# --- tier B ---------------------------------------------------------------------------------------------------------


def interrupt(
    name: str, share: float = 1.0, only: interrupted.Case | None = None
) -> tuple[str, int, int, list[tuple[str, str]]]:
    """One writer: its operations, the attempts, and those that left something torn."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        stage = interrupted.Stage(interrupted.WRITERS[name], Path(folder) / "stage")
        cases = stage.cases()
        cases = [only] if only else interrupted.sample(cases, math.ceil(share * len(cases)), 0)
        for case in cases:
            try:
                stage.check(case)
            except Exception as error:
                wrong.append((str(case), f"{type(error).__name__}: {error}"))
    return name, sum(stage.passes.values()), len(cases), wrong


def interrupt_all(pool: ProcessPoolExecutor, seeds: int) -> tuple[list[str], int]:
    """All cases in a campaign of the usual length, and some of them in a shorter one."""
    found = {}
    share = min(1.0, seeds / 200)
    for job in as_completed([pool.submit(interrupt, name, share) for name in interrupted.WRITERS]):
        name, operations, attempts, wrong = job.result()
        found[name] = (operations, attempts, len(wrong))
        for seed, error in wrong:
            complain(seed, error)
        print(f"B  {name}: {attempts} attempts, {len(wrong)} failed", flush=True)
    rows = [f"| {n} | {found[n][0]:,} | {found[n][1]:,} | {found[n][2]:,} |" for n in interrupted.WRITERS]
    operations, attempts, wrong = (sum(f[i] for f in found.values()) for i in range(3))
    return [*rows, f"| all | {operations:,} | {attempts:,} | {wrong:,} |"], wrong


# --- tier C ---------------------------------------------------------------------------------------------------------


def feed(kind: str, seed: int, count: int) -> tuple[str, str, rubbish.Score]:
    with tempfile.TemporaryDirectory() as folder:
        return kind, f"{kind}:{seed}:{count}", rubbish.run(kind, Path(folder) / kind, seed, count)


def portions(seeds: int) -> Iterator[tuple[str, int, int]]:
    for kind in rubbish.KINDS:
        left = PER_SEED[kind] * seeds
        for seed in range(1, 1 + -(-left // PORTION)):
            yield kind, seed, min(PORTION, left)
            left -= PORTION


def feed_all(pool: ProcessPoolExecutor, seeds: int) -> tuple[list[str], int]:
    found = {kind: rubbish.Score() for kind in rubbish.KINDS}
    for job in as_completed([pool.submit(feed, *portion) for portion in portions(seeds)]):
        kind, name, score = job.result()
        for wrong in score.wrong:
            complain(name, wrong)
        sum_ = found[kind]
        sum_.opened += score.opened
        sum_.crashes += score.crashes
        sum_.executions += score.executions
        sum_.false_clean += score.false_clean
        print(f"C  {kind}: {score.opened} opened, {len(score.wrong)} failed", flush=True)
    lines = [(k, s.opened, len(s.crashes), len(s.executions), len(s.false_clean)) for k, s in found.items()]
    lines.append(("all", *(sum(line[i] for line in lines) for i in range(1, 5))))  # type: ignore[arg-type]
    rows = [f"| {name} | " + " | ".join(f"{n:,}" for n in numbers) + " |" for name, *numbers in lines]
    return rows, sum(len(s.wrong) for s in found.values())


# --- the command ----------------------------------------------------------------------------------------------------


def again(seed: str) -> int:
    """One trial, as its seed says."""
    kind, _, rest = seed.partition(":")
    try:
        if kind == "numeric":
            print(numeric.draw(int(rest)))
            wrong = break_numbers([int(rest)])[1]
        elif kind == "files":
            case = interrupted.read_case(seed)
            *_, found = interrupt(case.writer, only=case)
            for name, error in found:
                complain(name, error)
            wrong = len(found)
        elif kind in rubbish.KINDS:
            number, _, count = rest.partition(":")
            _, name, score = feed(kind, int(number), int(count or PORTION))
            for told in score.wrong:
                complain(name, told)
            wrong = len(score.wrong)
        else:
            raise ValueError(seed)
    except (ValueError, KeyError):
        print(f"no trial {seed!r}. Next: numeric:17, files:journal/rename:2:kill, code:1:600", file=sys.stderr)
        return 2
    print("failed" if wrong else "passed")
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description="Breaks training runs, disks and files; writes docs/reliability.md.")
    parser.add_argument("--seeds", type=int, default=200, help="how long the campaign is (default 200)")
    parser.add_argument("--seed", default="", help="one trial again, such as numeric:17")
    options = parser.parse_args()
    if options.seed:
        return again(options.seed)
    start = time.monotonic()
    numbers, broken = break_numbers(list(range(options.seeds)))
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        disks, torn = interrupt_all(pool, options.seeds)
        pieces, wrong = feed_all(pool, options.seeds)
    text = "\n".join(
        [
            "| faults in training | trials | faults | failed |",
            "|---|---|---|---|",
            *numbers,
            "",
            "| interrupted writes | operations | attempts | failed |",
            "|---|---|---|---|",
            *disks,
            "",
            "| malformed | opened | crashes | executions | false clean |",
            "|---|---|---|---|---|",
            *pieces,
        ]
    )
    print(f"\n{text}\n\n{time.monotonic() - start:.0f} s")
    write_table("reliability.md", "chaos", text, ("torch",))
    return int(bool(broken or torn or wrong))


if __name__ == "__main__":
    sys.exit(main())

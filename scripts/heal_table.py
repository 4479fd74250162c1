"""Trains the original of every case under the guard, alone and healing, and writes what came of it into docs/heal.md.

python scripts/heal_table.py                                # what `make heal` does; resumes where it stopped
python scripts/heal_table.py --cases lora-sft --seeds 0 1   # a part of it, printed only
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from written import ROOT, write_table

from nanproof.cases import find, find_all
from nanproof.cases.catalogue import Case
from nanproof.cases.result import NAME, Result, read_result

WAYS = {"guard alone": "--no-heal", "healed": "--heal"}
STOPPED = 66
"""The exit code of a run that the guard has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one training ended."""

    result: Result | None
    """None when the guard stopped it."""
    lost: int
    """Batches that were left out, steps that were undone among them."""
    islands: tuple[str, ...]
    share: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(10)))
    parser.add_argument("--cases", nargs="*", default=[case.name for case in find_all()])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "heal", help="what is there is not repeated")
    given = parser.parse_args()
    rows = []
    for name in given.cases:
        for way, option in WAYS.items():
            ended = [train(find(name), seed, option, given.out / option.lstrip("-")) for seed in given.seeds]
            rows.append(make_row(name, way, ended))
            print(rows[-1], flush=True)
    if len(given.cases) == len(find_all()) and given.seeds == list(range(10)):
        head = ["| original of | | came to its end | finite | score | at its target | batches lost | float32 islands |"]
        write_table("heal.md", "heal", "\n".join([*head, "|---" * 8 + "|", *rows]), ("torch",))
    return 0


def train(case: Case, seed: int, option: str, place: Path) -> Ended:
    """One training in a process of its own; what is there already is read."""
    name = f"{case.name}-{seed}"
    records = place / f"{name}-guard"
    summary = records / "run.json"
    if not summary.exists() or json.loads(summary.read_text())["exit_code"] is None:
        place.mkdir(parents=True, exist_ok=True)
        while records.exists():  # begun by a run that was killed
            records = place / f"{records.name}-again"
        summary = records / "run.json"
        words = ["-m", "nanproof", "run", option, "--quiet", "--run-dir", str(records)]
        words += case.command("original", seed=seed, out=place / name)[1:]
        done = subprocess.run(
            [sys.executable, *words], cwd=place, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True
        )
        if done.returncode not in (0, STOPPED):
            raise SystemExit(f"error: {case.name} seed {seed} {option}: {done.stderr.decode()[-2000:]}")
    guarded = json.loads(summary.read_text())["guarded"][-1]  # what was trained before it is the base model
    actions = guarded["actions"]
    repairs = guarded.get("repairs", [])
    return Ended(
        result=read_result(place / name) if (place / name / NAME).exists() else None,
        lost=guarded["steps"] - guarded.get("updates", 0) + actions.get("rollback", 0),
        islands=tuple(r["path"] for r in repairs),
        share=sum(r["share"] for r in repairs),
    )


def make_row(case: str, way: str, ended: list[Ended]) -> str:
    results = [e.result for e in ended if e.result is not None]
    finite = sum(r.bad_parameters + r.bad_buffers == 0 for r in results)
    values = [r.value for r in results]
    chance = f" (chance {results[0].chance:g}, target {results[0].target:g})" if results else ""
    score = f"{results[0].metric} {min(values):.2f} to {max(values):.2f}{chance}" if results else "–"
    target = sum(r.value >= r.target for r in results)
    lost = [e.lost for e in ended]
    islands = [len(e.islands) for e in ended]
    count = f"{min(islands)} to {max(islands)}, at most {max(e.share for e in ended):.0%} of the parameters"
    whole = len(ended)
    return (
        f"| {case} | {way} | {len(results)} of {whole} | {finite} of {len(results)} | {score} | {target} of {whole} |"
        f" {min(lost)} to {max(lost)} | {count if max(islands) else '–'} |"
    )


if __name__ == "__main__":
    sys.exit(main())

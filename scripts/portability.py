"""Trains every case under several instruction sets and seeds, and writes what happened into docs/cases/README.md.

python scripts/portability.py                               # what `make portability` does; resumes where it stopped
python scripts/portability.py --settings default --seeds 0  # a part of it, printed only

One machine can play older ones: ATEN_CPU_CAPABILITY limits torch's own kernels, ONEDNN_MAX_CPU_ISA those of oneDNN.
The two are lowered together. The programs use one thread whatever OMP_NUM_THREADS says; that a run with two is the
same bit for bit is checked at the first seed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from written import ROOT, write_table

from nanproof.cases import find, find_all
from nanproof.cases.catalogue import Case
from nanproof.cases.result import Result, read_result
from nanproof.errors import NonFiniteError

SETTINGS = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
"""What ATEN_CPU_CAPABILITY may be, and the limit of oneDNN that belongs to it."""
VARIANTS = ("original", "stable")


def playable() -> list[str]:
    """The settings that this processor can play: kernels of a set that it lacks would end in an illegal instruction."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    needs = {"default": [], "avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq"]}
    return [name for name in SETTINGS if all(flag in flags for flag in needs[name])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", default=playable(), choices=list(SETTINGS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(10)))
    parser.add_argument("--cases", nargs="*", default=[case.name for case in find_all()])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "portability", help="what is there is not repeated")
    parser.add_argument("--train", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train_all(find(given.train[0]), Path(given.train[1]), given.seeds, given.variants)
        return 0
    whole = given.settings == playable() and given.seeds == list(range(10)) and len(given.cases) == 4
    bad = []
    rows = []
    for name in given.cases:
        case = find(name)
        for setting in given.settings:
            results = run_setting(case, setting, given.seeds, given.out / setting / name)
            bad += [f"{name} under {setting}: {problem}" for problem in problems(case, results)]
            rows.append(make_row(case, setting, results))
            print(rows[-1], flush=True)
        if len(given.seeds) == 1:
            continue
        again = given.out / "two-threads" / name
        same = run_setting(case, given.settings[-1], given.seeds[:1], again, variants=("original",), threads=2)
        first = given.out / given.settings[-1] / name
        for result in same:
            if result.digest != read_result(first / f"{result.config}-{result.seed}").digest:
                bad.append(f"{name} {result.config}: two threads give another run than one")
    print("\n".join(bad) or "every original died and every stable variant trained")
    if whole and not bad:
        head = ["| case | instruction set | original died | stable trained | its score |", "|---|---|---|---|---|"]
        write_table("cases/README.md", "portability", "\n".join([*head, *rows]), ("torch",))
    return int(bool(bad))


def run_setting(
    case: Case, setting: str, seeds: list[int], folder: Path, variants: Sequence[str] = VARIANTS, threads: int = 1
) -> list[Result]:
    """Results of the variants at all seeds; what is in the folder already is not trained again."""
    limits = {"ATEN_CPU_CAPABILITY": setting, "ONEDNN_MAX_CPU_ISA": SETTINGS[setting], "OMP_NUM_THREADS": str(threads)}
    words = [sys.executable, __file__, "--train", case.name, str(folder), "--seeds", *map(str, seeds)]
    words += ["--variants", *variants]
    subprocess.run(words, env=os.environ | limits, check=True)
    return [read_result(folder / f"{variant}-{seed}") for variant in variants for seed in seeds]


def train_all(case: Case, folder: Path, seeds: list[int], variants: Sequence[str]) -> None:
    """Train in this process, one run after the other: what takes long is to start one."""
    import torch

    from nanproof.cases.program import Job
    from nanproof.cases.ranks import Ranks
    from nanproof.cases.settings import load

    torch.set_num_threads(1)  # as the programs do
    cpu = torch.device("cpu")
    program: Any = importlib.import_module(f"{case.module}.train")
    for variant in variants:
        for seed in seeds:
            out = folder / f"{variant}-{seed}"
            if (out / "result.json").is_file():
                continue
            if out.exists():  # begun by a run that was killed
                out.rename(folder / f"{out.name}.killed-{os.getpid()}")
            cfg = load(case.folder / "configs", variant)
            steps = 3 if (case.name, variant) == ("lora-sft", "original") else cfg.training.steps  # dead at once
            torch.manual_seed(seed)
            job = Job(
                case=case.name,
                config=variant,
                cfg=cfg,
                seed=seed,
                steps=steps,
                device=cpu,
                out=out,
                resume=None,
                ranks=Ranks(cpu),
            )
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(NonFiniteError):
                program.train(job)
            if case.name == "lora-sft":
                from accelerate.state import AcceleratorState

                AcceleratorState._reset_state(True)


def problems(case: Case, results: list[Result]) -> list[str]:
    """What is not as it must be on every machine."""
    found = []
    for result in results:
        name = f"{result.config} seed {result.seed}"
        if result.config == "stable" and result.outcome != "trained":
            found.append(f"{name} is {result.outcome}: {result.metric} {result.value:.3f}, target {result.target}")
        if result.config == "original" and result.outcome != "died":
            found.append(f"{name} is {result.outcome} after {result.steps} steps")
        elif result.config == "original" and (result.first_bad_step or 0) > case.within:
            found.append(f"{name} died at step {result.first_bad_step}, later than {case.within}")
    return found


def make_row(case: Case, setting: str, results: list[Result]) -> str:
    original = [r for r in results if r.config == "original"]
    stable = [r for r in results if r.config == "stable"]
    deaths = [r.first_bad_step for r in original if r.first_bad_step is not None]
    died = f"{len(deaths)} of {len(original)}" + (f", at step {min(deaths)} to {max(deaths)}" if deaths else "")
    trained = f"{sum(r.outcome == 'trained' for r in stable)} of {len(stable)}"
    values = [r.value for r in stable]
    scores = f"{stable[0].metric} {min(values):.2f} to {max(values):.2f} (target {stable[0].target})"
    return f"| {case.name} | {setting} | {died} | {trained} | {scores} |"


if __name__ == "__main__":
    sys.exit(main())

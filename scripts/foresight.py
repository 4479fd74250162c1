"""Trains runs that die by themselves, and healthy ones: how early does a forecast warn? Writes docs/foresight.md.

python scripts/foresight.py             # what `make foresight` does; resumes where it stopped
python scripts/foresight.py --report    # only the report, of what was recorded before

Every run is recorded once, unguarded; the forecast then reads the recorded numbers in the guard's own cadence. The
families are split: the constants of `nanproof/forecast.py` were chosen by some, and the report is about the others.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from written import ROOT, write_table

sys.path.insert(0, str(ROOT / "benchmarks"))
from recorded import Recorded, record

from nanproof.cases.catalogue import find_all
from nanproof.files import make_folder
from nanproof.forecast import CALM, CLOSER, WARN, Forecast

TUNED = {"regression", "recurrent", "elman", "bootstrap", "wasserstein", "residual", "image", "finetune", "rare"}
SEEDS_DYING, SEEDS_HEALTHY, SEEDS_ORIGINAL = 3, 5, 3
STEPS, SLOW = 600, {"text": 300, "ppo": 300, "eager": 300}
EVERY, BEGINNING, OUTPUTS = 10, 20, 8
"""As the guard reads by default: `Watch.every`, `foresight.BEGINNING`, `Watch.automatic`."""
LEAD, TOO_EARLY = 10, 300
"""A warning counts when the run dies between so many steps after it; one that comes earlier is a false one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "foresight", help="what is there is not repeated")
    parser.add_argument("--report", action="store_true", help="record nothing")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    make_folder(given.out)
    if given.part is not None:
        record_all(given.out, given.part)
        return 0
    if not given.report:
        words = [sys.executable, __file__, "--out", str(given.out), "--part"]
        parts = [subprocess.Popen([*words, str(n)], env={**os.environ, "OMP_NUM_THREADS": "1"}) for n in range(2)]
        codes = [part.wait() for part in parts]
        if any(codes):
            print("error: a training failed, see above. Next: fix it and run this again; what is done stays")
            return 2
    runs = [judge(r) for r in load(given.out)]
    text = report(runs)
    print(text)
    write_table("foresight.md", "foresight", text, ("torch",))
    return 0


# --- recording --------------------------------------------------------------------------------------------------------


def slug(name: object) -> str:
    return re.sub(r"[^a-z0-9.]+", "_", str(name).lower())


def record_all(out: Path, part: int) -> None:
    import torch
    from dying import CALM as HEALTHY
    from dying import DYING

    torch.set_num_threads(1)
    jobs = [("dying", t, seed) for seed in range(SEEDS_DYING) for t in DYING]
    jobs += [("calm", t, seed) for seed in range(SEEDS_HEALTHY) for t in HEALTHY]
    for kind, training, seed in jobs[part::2]:
        target = out / f"{kind}-{slug(training)}-{seed}.npz"
        if not target.exists():
            run = record(training, seed, STEPS if kind == "dying" else SLOW.get(training.family, STEPS))
            run.save(target.with_suffix(".part.npz"))
            target.with_suffix(".part.npz").replace(target)
            print(
                f"{training}, seed {seed}: {f'died at {run.death}' if run.death is not None else 'lived'}", flush=True
            )
    originals = [(case, seed) for seed in range(SEEDS_ORIGINAL) for case in find_all()]
    for case, seed in originals[part::2]:
        folder = out / "originals" / f"{case.name}-{seed}"
        if not (folder / "training_log.jsonl").exists():
            subprocess.run(case.command("original", seed=seed, out=folder), capture_output=True, check=False)


def load(out: Path) -> list[Recorded]:
    """Every recorded run that died where it should or lived where it should, and the logs of the four originals."""
    found = []
    for path in sorted(out.glob("*.npz")):
        run = Recorded.load(path)
        if path.name.startswith("dying-") == (run.death is not None):
            found.append(run)
    return found + [original(p) for p in sorted((out / "originals").glob("*/training_log.jsonl"))]


def original(path: Path) -> Recorded:
    """The run of an original, as its own log has it: nothing but loss, gradient norm, scale and largest activation."""
    from nanproof.logs import read
    from nanproof.logs.foresee import HALF_MAX, chosen_columns

    series = read(path)
    columns = chosen_columns(series)
    last = max(int(c.steps[-1]) for c in columns.values())
    values = {name: np.full(last + 1, math.nan) for name in columns}
    for name, column in columns.items():
        values[name][column.steps] = column.values
    bad = [int(s) for n in ("loss", "grad_norm") if n in columns for s in columns[n].steps[columns[n].bad][:1]]
    limit = {n: HALF_MAX for n in columns if n.startswith("absmax/") and series.loss_scale is not None}
    name, _, seed = path.parent.name.rpartition("-")
    return Recorded(name, name, int(seed), min(bad, default=None), values, limit)


# --- judging ----------------------------------------------------------------------------------------------------------


@dataclass
class Judged:
    """A run with what each detector had to say at every step before its death: the higher, the worse."""

    run: Recorded
    scores: dict[str, np.ndarray]
    builds_up: bool

    @property
    def length(self) -> int:
        return self.run.death if self.run.death is not None else self.run.steps

    def warnings(self, detector: str, threshold: float) -> list[int]:
        """Steps at which a warning is due: once, and again after a calm time."""
        found: list[int] = []
        calm = CALM
        for step, score in enumerate(self.scores[detector][: self.length]):
            if score >= threshold:
                if calm >= CALM:
                    found.append(step)
                calm = 0
            else:
                calm += 1
        return found

    def lead(self, detector: str, threshold: float) -> int | None:
        """Steps between the first warning that counts and the death."""
        assert self.run.death is not None
        ahead = [self.run.death - s for s in self.warnings(detector, threshold)]
        return max((n for n in ahead if n <= TOO_EARLY), default=None)

    def false(self, detector: str, threshold: float) -> int:
        """Warnings of a run that lived, or long before its death."""
        steps = self.warnings(detector, threshold)
        return len(steps) if self.run.death is None else sum(self.run.death - s > TOO_EARLY for s in steps)


def judge(run: Recorded) -> Judged:
    scores = {"forecast": risks(run)} | {name: rule(run) for name, rule in RULES.items()}
    return Judged(run, scores, run.death is not None and builds_up(run))


def risks(run: Recorded) -> np.ndarray:
    """The risk at every step, with the readings that the guard would have made."""
    outputs = [k for k in run.series if k.startswith("absmax/")]
    room = {
        k: math.log(run.limits.get(k, 3.4e38) / v) for k in outputs if 0 < (v := float(run.series[k][0])) < math.inf
    }
    outputs = sorted(room, key=lambda k: room[k])[:OUTPUTS] or outputs
    tensors = [k for k in run.series if k.startswith(("update_ratio/", "grad_norm/"))]
    free = [k for k in ("loss", "grad_norm", "scale") if k in run.series]
    logged = not tensors  # a log is read as it is
    forecast, found = Forecast(), []
    for step in range(run.death if run.death is not None else run.steps):
        names = list(free)
        read = logged or step < BEGINNING or forecast.risk >= CLOSER
        names += outputs if read or step % EVERY == 0 else []
        names += tensors if read or step % EVERY == 1 else []
        forecast.read(step, {k: float(run.series[k][step]) for k in names}, run.limits)
        found.append(forecast.risk)
    return np.array(found)


def builds_up(run: Recorded) -> bool:
    """In hindsight: whether a signal left the range of its history for good, ten steps before the death or earlier.

    From that step on it stays above everything before it and above twice its median, and it ends at eight times its
    range or more.
    """
    assert run.death is not None
    for name, values in run.series.items():
        if name.partition("/")[0] not in ("loss", "grad_norm", "absmax", "update_ratio"):
            continue
        x = np.abs(values[: run.death].astype(float))
        x = x[np.isfinite(x)][3:]
        if len(x) < LEAD + 8:
            continue
        reach, least = np.maximum.accumulate(x), np.minimum.accumulate(x[::-1])[::-1]
        for t in range(5, len(x) - LEAD + 1):
            if least[t] >= max(reach[t - 1], 2 * np.median(x[:t])) and x[-1] >= 8 * reach[t - 1]:
                return True
    return False


def _over(values: np.ndarray, usual: Callable[[np.ndarray], float]) -> np.ndarray:
    """Each value as judged by those of the 128 steps before it."""
    found = np.zeros(len(values))
    for i in range(LEAD, len(values)):
        before = values[max(0, i - 128) : i]
        before = before[np.isfinite(before)]
        found[i] = usual(np.append(before, values[i])) if len(before) >= LEAD and np.isfinite(values[i]) else 0.0
    return found


def _sigmas(x: np.ndarray) -> float:
    return float((x[-1] - x[:-1].mean()) / max(float(x[:-1].std()), 1e-12))


def _halvings(run: Recorded) -> np.ndarray:
    if "scale" not in run.series:
        return np.zeros(run.steps)
    falls = np.append(0, np.diff(run.series["scale"]) < 0).astype(float)
    falls[:BEGINNING] = 0  # the scaler looks for its scale
    return np.array([falls[max(0, i - 99) : i + 1].sum() for i in range(len(falls))])


RULES: dict[str, Callable[[Recorded], np.ndarray]] = {
    "gradient norm over its median": lambda r: _over(
        r.series["grad_norm"], lambda x: float(x[-1] / max(float(np.median(x[:-1])), 1e-30))
    ),
    "loss over its mean, in σ": lambda r: _over(r.series["loss"], _sigmas),
    "loss-scale halvings in 100 steps": _halvings,
}
USUAL = {"forecast": WARN, "gradient norm over its median": 10, "loss over its mean, in σ": 3}
USUAL["loss-scale halvings in 100 steps"] = 1


# --- the report -------------------------------------------------------------------------------------------------------


def report(runs: Sequence[Judged]) -> str:
    unseen = [r for r in runs if r.run.family not in TUNED]
    tuned = [r for r in runs if r.run.family in TUNED]
    parts = [
        headline(unseen, "never tuned on"),
        headline(tuned, "tuned on"),
        by_family(runs),
        roc(unseen),
        missed(unseen),
    ]
    return "\n\n".join(parts)


def headline(runs: Sequence[Judged], which: str) -> str:
    deaths = [r for r in runs if r.run.death is not None]
    building, healthy = [r for r in deaths if r.builds_up], [r for r in runs if r.run.death is None]
    steps = sum(r.length for r in runs)
    false = sum(r.false("forecast", WARN) for r in runs)
    leads = [r.lead("forecast", WARN) for r in building]
    early = [n for n in leads if n is not None and n >= LEAD]
    shares = [n / r.length for n, r in zip(leads, building, strict=True) if n is not None and n >= LEAD]
    sudden = [r.lead("forecast", WARN) for r in deaths if not r.builds_up]
    in_time = sum(n is not None and n >= LEAD for n in sudden)
    low, middle, high = np.percentile(early, [25, 50, 75]) if early else (math.nan,) * 3
    return f"""### Families {which}

| | |
|---|---|
| deaths that build up | {len(building)} |
| … warned of, {LEAD} steps ahead or more | **{len(early) / max(1, len(building)):.0%}** ({len(early)}) |
| … warned of at all | {sum(n is not None for n in leads)} |
| lead in steps: median (quartiles) | {middle:.0f} ({low:.0f} to {high:.0f}) |
| lead as a share of the run: median | {np.median(shares) if shares else math.nan:.0%} |
| deaths without build-up | {len(sudden)}, of which {in_time} warned of {LEAD} steps ahead |
| healthy runs | {len(healthy)} |
| false warnings | **{false}** in {steps:,} steps: {100_000 * false / max(1, steps):.2f} per 100,000 |"""


def by_family(runs: Sequence[Judged]) -> str:
    rows = []
    for family in sorted({r.run.family for r in runs}):
        mine = [r for r in runs if r.run.family == family]
        building = [r for r in mine if r.builds_up]
        early = sum((r.lead("forecast", WARN) or 0) >= LEAD for r in building)
        sudden = sum(r.run.death is not None and not r.builds_up for r in mine)
        false = sum(r.false("forecast", WARN) for r in mine)
        healthy = sum(r.run.death is None for r in mine)
        rows.append(
            f"| {family}{' (tuned on)' if family in TUNED else ''} | {len(building)} | {early} | {sudden} |"
            f" {healthy} | {false} |"
        )
    head = "| family | deaths that build up | warned of in time | other deaths | healthy runs | false warnings |"
    return "### By family\n\n" + "\n".join([head, "|---|---|---|---|---|---|", *rows])


def roc(runs: Sequence[Judged]) -> str:
    """The share of deaths warned of in time, at the threshold that allows so many false warnings."""
    allowed = (1, 5, 20, 100)
    building, steps = [r for r in runs if r.builds_up], sum(r.length for r in runs)
    rows = []
    for name, usual in USUAL.items():
        curve = [point(runs, building, steps, name, t) for t in thresholds(runs, name)]
        at = point(runs, building, steps, name, usual)
        best = [max((y for x, y in curve if x <= limit), default=0.0) for limit in allowed]
        rows.append(
            f"| {name} | {usual:g}: {at[1]:.0%} at {at[0]:.1f} | " + " | ".join(f"{y:.0%}" for y in best) + " |"
        )
    head = "| detector | as usually set: share of deaths at false warnings per 100,000 steps | " + " | ".join(
        f"≤ {n}" for n in allowed
    )
    return "### Against simple rules, on families never tuned on\n\n" + "\n".join(
        [f"{head} |", "|---|---|" + "---|" * 4, *rows]
    )


def thresholds(runs: Iterable[Judged], name: str) -> list[float]:
    values = np.concatenate([r.scores[name][: r.length] for r in runs])
    values = values[np.isfinite(values) & (values > 0)]
    return sorted(set(np.quantile(values, 1 - np.logspace(-5, -0.3, 40)).tolist())) if len(values) else [1.0]


def point(runs: Sequence[Judged], building: Sequence[Judged], steps: int, name: str, t: float) -> tuple[float, float]:
    false = sum(r.false(name, t) for r in runs)
    return 100_000 * false / steps, sum((r.lead(name, t) or 0) >= LEAD for r in building) / max(1, len(building))


def missed(runs: Sequence[Judged]) -> str:
    late = [r for r in runs if r.builds_up and (r.lead("forecast", WARN) or 0) < LEAD]
    said = [f"{r.run.name}, seed {r.run.seed} (death at step {r.length})" for r in late]
    return "### Missed\n\n" + ("\n".join(f"- {s}" for s in said) if said else "None.")


if __name__ == "__main__":
    sys.exit(main())

"""Trains runs that die by themselves, and healthy ones: how early does a forecast warn? Writes docs/foresight.md.

python scripts/foresight.py             # what `make foresight` does; resumes where it stopped
python scripts/foresight.py --report    # only the report, of what was recorded before

Every run is recorded once, unguarded, by the parts that a guard reads with; the forecast then reads the recorded
numbers in the guard's own cadence. The families of `benchmarks/first_look.py` were written before the last change of
`nanproof/forecast.py` and first looked at after it; the others were known.
"""

from __future__ import annotations

import argparse
import importlib
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
from trainings import Training

from nanproof.cases.catalogue import find_all
from nanproof.files import make_folder
from nanproof.forecast import CALM, WARN, Forecast
from nanproof.guard.foresight import BEGINNING, Cadence
from nanproof.guard.options import Watch

SEEDS = {"first_look": (3, 3), "unseen": (2, 3), "fresh": (2, 2), "dying": (1, 2)}
"""Seeds of every dying and every healthy setting, by the module that it is in."""
NEW, KNOWN = "never looked at", "known before"
SEEDS_ORIGINAL = 3
STEPS, SLOW = 600, {"text": 300, "ppo": 300, "eager": 300, "patches": 300}
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
    recorded, lived = load(given.out)
    runs, lived = [judge(r) for r in recorded], [judge(r) for r in lived]
    text = report(runs, lived)
    print(text)
    write_table("foresight.md", "foresight", text, ("torch",))
    return 0


# --- recording --------------------------------------------------------------------------------------------------------


def slug(name: object) -> str:
    return re.sub(r"[^a-z0-9.]+", "_", str(name).lower())


def path_of(out: Path, kind: str, training: Training, seed: int) -> Path:
    return out / f"{kind}-{slug(training)}-{seed}.npz"


def planned() -> list[tuple[str, Training, int]]:
    """Every run with its kind and its seed."""
    jobs = []
    for name, (dies, lives) in SEEDS.items():
        module = importlib.import_module(name)
        for seed in range(max(dies, lives)):
            jobs += [("dying", t, seed) for t in module.DYING if seed < dies]
            jobs += [("calm", t, seed) for t in module.CALM if seed < lives]
    return jobs


def record_all(out: Path, part: int) -> None:
    import torch

    torch.set_num_threads(1)
    jobs = planned()
    for kind, training, seed in jobs[part::2]:
        target = path_of(out, kind, training, seed)
        if not target.exists():
            steps = STEPS if kind == "dying" else SLOW.get(training.family, STEPS)
            run = record(training, seed, steps)
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


def load(out: Path) -> tuple[list[Recorded], list[Recorded]]:
    """The runs that died and the healthy ones; and those that should have died and lived."""
    found: list[Recorded] = []
    lived: list[Recorded] = []
    for kind, training, seed in planned():
        path = path_of(out, kind, training, seed)
        if path.exists():
            run = Recorded.load(path)
            (lived if run.death is None and kind == "dying" else found).append(run)
    return found + [original(p) for p in sorted((out / "originals").glob("*/training_log.jsonl"))], lived


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
    limit = {n: HALF_MAX for n in columns if n.startswith("column/") and series.loss_scale is not None}
    name, _, seed = path.parent.name.rpartition("-")
    return Recorded(name, name, int(seed), min(bad, default=None), values, limit, seconds=0.0)


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
    columns = [k for k in run.series if k.startswith("column/")]  # a log is read as it is
    modules = chosen(run)
    gradients, updates = ([k for k in run.series if k.startswith(kind)] for kind in ("grad_norm/", "update_ratio/"))
    free = [k for k in ("loss", "grad_norm", "scale") if k in run.series] + columns
    forecast, cadence, sampled, found = Forecast(), Cadence(Watch().every), False, []
    for step in range(run.death if run.death is not None else run.steps):
        cadence.next(step, closer=forecast.look_closer, names=modules)
        read = modules if cadence.modules is None else cadence.modules
        names = free + [k for kind in ("absmax/", "logits/") for m in read if (k := kind + m) in run.series]
        names += gradients if cadence.on else []
        names += updates if sampled and cadence.sampled else []  # the difference between two samples
        sampled = cadence.sampled
        forecast.read(step, {k: float(run.series[k][step]) for k in names}, run.limits)
        found.append(forecast.risk)
    return np.array(found)


def chosen(run: Recorded) -> list[str]:
    """The modules that the guard would watch: those with the least headroom in the first step."""
    room = {}
    for name, values in run.series.items():
        kind, _, module = name.partition("/")
        if kind == "absmax" and 0 < (first := float(values[0])) < math.inf:
            room[module] = math.log(run.limits.get(name, 3.4e38) / first)
    nearest = sorted(room, key=lambda m: room[m])[: Watch().automatic]
    return [*dict.fromkeys([*nearest, *(k[7:] for k in run.series if k.startswith("logits/"))])]


def builds_up(run: Recorded) -> bool:
    """In hindsight: whether a signal left the range of its history for good, ten steps before the death or earlier.

    From that step on it stays above everything before it and above twice its median, and it ends at eight times its
    range or more.
    """
    assert run.death is not None
    for name, values in run.series.items():
        if name.partition("/")[0] not in ("loss", "grad_norm", "absmax", "logits", "column", "update_ratio"):
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


def report(runs: Sequence[Judged], lived: Sequence[Judged]) -> str:
    groups = {which: [r for r in runs if group(r.run.family) == which] for which in (NEW, KNOWN)}
    new = groups[NEW]
    dead = [r for r in runs if r.run.death is not None]
    warned = sum(bool(r.warnings("forecast", WARN)) for r in lived)
    there, wanted = len(runs) + len(lived), len(planned()) + SEEDS_ORIGINAL * len(find_all())
    unfinished = f"**Not finished: {there} of {wanted} runs are recorded.** " if there < wanted else ""
    minutes = sum(r.run.seconds for r in (*runs, *lived)) / 60
    took = f" All but the originals took {minutes:.0f} minutes of CPU time." if math.isfinite(minutes) else ""
    parts = [
        f"{unfinished}{len(dead)} runs died and {len(runs) - len(dead)} were healthy. {len(lived)} more were meant to"
        f" die and lived, and {warned} of them were warned of; they count as neither.{took}",
        *(headline(found, which) for which, found in groups.items() if found),
        by_family(runs),
        roc(new),
        missed(new),
    ]
    return "\n\n".join(parts)


def group(family: str) -> str:
    """Whether a family was known when the forecast was last changed."""
    import first_look

    return NEW if family in {t.family for t in (*first_look.DYING, *first_look.CALM)} else KNOWN


def headline(runs: Sequence[Judged], which: str) -> str:
    deaths = [r for r in runs if r.run.death is not None]
    building, healthy = [r for r in deaths if r.builds_up], [r for r in runs if r.run.death is None]
    steps = sum(r.length for r in healthy)
    false, early_on = (sum(r.false("forecast", WARN) for r in which) for which in (healthy, deaths))
    leads = [r.lead("forecast", WARN) for r in building]
    early = [n for n in leads if n is not None and n >= LEAD]
    shares = [n / r.length for n, r in zip(leads, building, strict=True) if n is not None and n >= LEAD]
    sudden = [r.lead("forecast", WARN) for r in deaths if not r.builds_up]
    in_time = sum(n is not None and n >= LEAD for n in sudden)
    share = f"**{len(early) / max(1, len(building)):.0%}** ({len(early)}); {interval(len(early), len(building))}"
    rate, most = (100_000 * n / max(1, steps) for n in (false, most_of(false)))
    low, middle, high = np.percentile(early, [25, 50, 75]) if early else (math.nan,) * 3
    least, half, most = np.percentile(shares, [25, 50, 75]) if shares else (math.nan,) * 3
    return f"""### Families {which}

| | |
|---|---|
| deaths that build up | {len(building)} |
| … warned of, {LEAD} steps ahead or more | {share} |
| … warned of at all | {sum(n is not None for n in leads)} |
| lead in steps: median (quartiles) | {middle:.0f} ({low:.0f} to {high:.0f}) |
| lead as a share of the run: median (quartiles) | {half:.0%} ({least:.0%} to {most:.0%}) |
| deaths without build-up | {len(sudden)}, of which {in_time} warned of {LEAD} steps ahead |
| healthy runs | {len(healthy)} |
| false warnings | **{false}** in {steps:,} healthy steps: {rate:.1f} per 100,000, {most:.1f} at most |
| warnings more than {TOO_EARLY} steps before a death | {early_on} |"""


def interval(found: int, of: int) -> str:
    """The 95 % interval of a share (Wilson), as if runs were independent."""
    z, n = 1.96, max(1, of)
    p = found / n
    middle, wide = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((middle + side * wide) / (1 + z * z / n) for side in (-1, 1))
    return f"95% interval {low:.0%} to {high:.0%}"


def most_of(count: int) -> float:
    """The largest number of events to be expected, with a confidence of 95 %, when so many came (Poisson)."""
    most = 0.0
    while math.exp(-most) * sum(most**i / math.factorial(i) for i in range(count + 1)) > 0.05:
        most += 0.01
    return most


def by_family(runs: Sequence[Judged]) -> str:
    rows = []
    for family in sorted({r.run.family for r in runs}):
        mine = [r for r in runs if r.run.family == family]
        building = [r for r in mine if r.builds_up]
        early = sum((r.lead("forecast", WARN) or 0) >= LEAD for r in building)
        sudden = sum(r.run.death is not None and not r.builds_up for r in mine)
        false = sum(r.false("forecast", WARN) for r in mine if r.run.death is None)
        healthy = sum(r.run.death is None for r in mine)
        rows.append(f"| {family} | {group(family)} | {len(building)} | {early} | {sudden} | {healthy} | {false} |")
    head = "| family | | deaths that build up | warned of in time | other deaths | healthy runs | false warnings |"
    return "### By family\n\n" + "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def roc(runs: Sequence[Judged]) -> str:
    """The share of deaths warned of in time, at the threshold that allows so many false warnings."""
    allowed = (1, 5, 20, 100)
    building, healthy = [r for r in runs if r.builds_up], [r for r in runs if r.run.death is None]
    rows = []
    for name, usual in USUAL.items():
        curve = [point(healthy, building, name, t) for t in thresholds(runs, name)]
        at = point(healthy, building, name, usual)
        best = [max((y for x, y in curve if x <= limit), default=0.0) for limit in allowed]
        rows.append(
            f"| {name} | {usual:g}: {at[1]:.0%} at {at[0]:.1f} | " + " | ".join(f"{y:.0%}" for y in best) + " |"
        )
    head = "| detector | as usually set: share of deaths at false warnings per 100,000 healthy steps | " + " | ".join(
        f"≤ {n}" for n in allowed
    )
    return "### Against simple rules, on families never looked at\n\n" + "\n".join(
        [f"{head} |", "|---|---|" + "---|" * 4, *rows]
    )


def thresholds(runs: Iterable[Judged], name: str) -> list[float]:
    values = np.concatenate([r.scores[name][: r.length] for r in runs])
    values = values[np.isfinite(values) & (values > 0)]
    return sorted(set(np.quantile(values, 1 - np.logspace(-5, -0.3, 40)).tolist())) if len(values) else [1.0]


def point(healthy: Sequence[Judged], building: Sequence[Judged], name: str, t: float) -> tuple[float, float]:
    """False warnings per 100,000 healthy steps, and the share of deaths warned of in time, at a threshold."""
    false, steps = sum(r.false(name, t) for r in healthy), sum(r.length for r in healthy)
    found = sum((r.lead(name, t) or 0) >= LEAD for r in building)
    return 100_000 * false / max(1, steps), found / max(1, len(building))


def missed(runs: Sequence[Judged]) -> str:
    late = [r for r in runs if r.builds_up and (r.lead("forecast", WARN) or 0) < LEAD]
    said = [f"{r.run.name}, seed {r.run.seed} (death at step {r.length})" for r in late]
    return "### Missed, in families never looked at\n\n" + ("\n".join(f"- {s}" for s in said) if said else "None.")


if __name__ == "__main__":
    sys.exit(main())

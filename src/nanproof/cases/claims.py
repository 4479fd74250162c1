"""What the post-mortems recommended, and how each recommendation is judged: by training with it and nothing else."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import NanproofError, UsageError
from .catalogue import Case
from .result import Result, read_result

Verdict = Literal["helped", "inert", "harmful"]

OTHER_SEEDS = (1, 2)  # added to the seed in hand: what lives must live there too


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a recommendation did, in one word and in figures."""

    verdict: Verdict
    measured: str


class Runs:
    """Trains what is asked for, each setting once, below one folder.

    runs = Runs(find("radiodiff"), Path("runs/compare"), seed=0)
    runs.result("original", "training.grad_clip_norm=0.5").outcome
    """

    def __init__(self, case: Case, folder: Path, seed: int, tell: Callable[[str], None] = lambda words: None) -> None:
        self.case, self.seed = case, seed
        self._folder, self._tell = folder, tell
        self._made: dict[tuple[str, ...], Path] = {}

    def folder(self, config: str, *overrides: str) -> Path:
        """The folder of the run with this config and these overrides, trained now unless it was before."""
        key = (config, *overrides)
        if key not in self._made:
            self._tell(" ".join(key))
            out = self._folder / f"{len(self._made):02d}-{config}"
            train(self.case, config, seed=self.seed, out=out, overrides=overrides)
            self._made[key] = out
        return self._made[key]

    def result(self, config: str, *overrides: str) -> Result:
        return read_result(self.folder(config, *overrides))

    def losses(self, config: str, *overrides: str) -> list[str]:
        """The log of a run, line by line; nothing in it depends on the clock."""
        return (self.folder(config, *overrides) / "training_log.jsonl").read_text().splitlines()

    def elsewhere(self) -> list[Runs]:
        """The same at other seeds."""
        return [self._at(self.seed + more) for more in OTHER_SEEDS]

    def _at(self, seed: int) -> Runs:
        return Runs(self.case, self._folder / f"seed-{seed}", seed, lambda words: self._tell(f"{words} seed={seed}"))


def train(case: Case, config: str, *, seed: int, out: Path, overrides: Sequence[str] = ()) -> None:
    """Train one variant in a process of its own."""
    words = case.command(config, seed=seed, out=out, overrides=overrides)
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode == 2:  # its own word about a wrong argument
        raise UsageError(ended.stderr.strip().splitlines()[-1].removeprefix("error: "))
    if not (out / "result.json").is_file():
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NanproofError(f"{case.name} {config} ended with code {ended.returncode}: {last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One old recommendation, and how to find out what it does."""

    advice: str
    before: str
    after: str
    why: str
    """What it really does, and what helps instead."""
    overrides: tuple[str, ...] = ()
    """The original with this alone changed."""
    measure: Callable[[Runs], Judgement] | None = None
    """Where the fate of such a run does not tell."""

    def judge(self, runs: Runs) -> Judgement:
        return self.measure(runs) if self.measure is not None else judge_by_fate(runs, "original", *self.overrides)


def judge_by_fate(runs: Runs, config: str, *overrides: str) -> Judgement:
    """What a change did to a run that dies without it.

    At which step a run dies depends on its seed and on every rounding on the way, so one that still dies was not
    helped, whatever the step; and one that lives was helped only if it lives at other seeds too.
    """
    old, new = runs.result("original"), runs.result(config, *overrides)
    same = new.digest == old.digest and not old.bad_parameters  # NaN looks like NaN, whatever came before it
    if same or runs.losses(config, *overrides) == runs.losses("original"):
        return Judgement(verdict="inert", measured="the same run, bit for bit")
    if new.bad_parameters and math.isfinite(new.loss):
        bad = f"{new.bad_parameters} parameters are NaN"
        return Judgement(verdict="harmful", measured=f"hides it: the loss is {new.loss:.2g} to the end, {bad}")
    if new.outcome == "died":
        return Judgement(verdict="inert", measured=f"{_death(new)}, without it {_death(old)}")
    if new.guessing:
        return Judgement(verdict="harmful", measured=f"finite but dead: {_score(new)}")
    others = [again.result(config, *overrides) for again in runs.elsewhere()]
    for other in others:
        if other.outcome in ("died", "dead"):
            fate = _death(other) if other.outcome == "died" else f"is dead, {_score(other)}"
            return Judgement(
                verdict="inert", measured=f"lives at seed {new.seed} ({_score(new)}), {fate} at seed {other.seed}"
            )
    values = ", ".join(f"{r.value:.2f}" for r in (new, *others))
    return Judgement(verdict="helped", measured=f"finite at {1 + len(others)} seeds: {new.metric} {values}")


def _death(result: Result) -> str:
    return f"dies at step {result.first_bad_step}" if result.outcome == "died" else "is dead"


def _score(result: Result) -> str:
    return f"{result.metric} {result.value:.2f} (chance {result.chance:.2f})"

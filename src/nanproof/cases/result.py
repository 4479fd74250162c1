"""What is left of a training run: ``result.json`` in its folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .. import files
from ..errors import UsageError
from ..records import from_json, to_json

NAME = "result.json"

Outcome = Literal["died", "dead", "short", "trained"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended.

    >>> run = Result(
    ...     case="mm-ldlm", config="original", seed=0, steps=40, first_bad_step=21, skipped=18, loss=float("nan"),
    ...     metric="token accuracy", value=0.25, chance=0.25, target=0.9, questions=1024, first_activation=95.0,
    ...     largest_activation=1e19, bad_parameters=0, bad_buffers=0, lr=0.1, seconds=7.0, cpu_seconds=6.8, digest="",
    ... )
    >>> run.survived, run.outcome, f"{run.growth:.0e}"
    (20, 'died', '1e+17')
    """

    case: str
    config: str
    seed: int
    steps: int
    """Steps asked for."""
    first_bad_step: int | None
    """The first step, counted from 1, whose loss, or whose gradients (without a loss scaler), were not finite."""
    skipped: int
    """Steps whose update was left out or emptied by the program or its scaler."""
    loss: float
    metric: str
    value: float
    chance: float
    """What guessing scores."""
    target: float
    questions: int
    """How many answers the metric is a mean of."""
    first_activation: float
    """The first finite one that was watched; NaN when there was none."""
    largest_activation: float
    bad_parameters: int
    bad_buffers: int
    lr: float
    """The learning rate in force at the end."""
    seconds: float
    cpu_seconds: float
    digest: str
    """SHA-256 of the final parameters: two runs that agree in it did the same, bit for bit."""

    @property
    def survived(self) -> int:
        """Steps before the first bad one."""
        return self.steps if self.first_bad_step is None else self.first_bad_step - 1

    @property
    def growth(self) -> float:
        """How many times larger than at the first step the watched activation became."""
        return self.largest_activation / self.first_activation

    @property
    def guessing(self) -> bool:
        """Whether the metric is within three standard errors of chance, or below it."""
        return self.value <= self.chance + 3 * math.sqrt(self.chance * (1 - self.chance) / self.questions)

    @property
    def outcome(self) -> Outcome:
        """Died of NaN or Inf; finite but dead, no better than guessing; short of its target; or trained."""
        if self.first_bad_step is not None:
            return "died"
        if self.guessing:
            return "dead"
        return "trained" if self.value >= self.target else "short"


def write_result(folder: Path, result: Result) -> None:
    """Put it into a run's folder."""
    files.write_atomic(folder / NAME, json.dumps(to_json(result), indent=2) + "\n")


def read_result(folder: str | Path) -> Result:
    """The result in a run's folder."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise UsageError(f"{folder} holds no {NAME}", hint="the run has not ended yet, or was killed: look at its log")
    return from_json(Result, json.loads(path.read_text()))

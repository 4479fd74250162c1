"""The folder of a run: ``config.yaml``, ``training_log.jsonl``, ``checkpoints/`` and, at the end, ``result.json``."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from .. import files
from ..errors import UsageError
from ..records import to_json
from .program import Job
from .result import Result, write_result

SHOW_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the model answers on data that it has not seen."""

    metric: str
    value: float
    chance: float
    target: float
    questions: int


class Recorder:
    """Writes down what happens; it looks at the numbers and changes nothing. Only the first rank writes."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.log = files.JsonLines(job.out / "training_log.jsonl")
        if job.ranks.first:
            if self.log.path.exists() and job.resume is None:
                raise UsageError(f"{job.out} holds a run already", hint="choose another --out, or go on with --resume")
            files.make_folder(job.out / "checkpoints")
            files.write_atomic(job.out / "config.yaml", yaml.safe_dump(job.cfg.tree, sort_keys=False))
        self.first_bad_step: int | None = None
        self.bad_in_a_row = 0
        self.skipped = 0
        self._activations: list[float] = []
        self._last: dict[str, Any] = {}
        self._started = (time.monotonic(), time.process_time())

    def step(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        activation: float,
        skipped: bool = False,
        scale: float | None = None,
        **watched: float,
    ) -> None:
        """One step: its loss before any treatment, the norm before clipping, the largest activation.

        With a loss scale, gradients that are not finite are the scaler's daily work; without one they are the end.
        """
        bad = not math.isfinite(loss) or (scale is None and not math.isfinite(grad_norm))
        if bad and self.first_bad_step is None:
            self.first_bad_step = step
        self.bad_in_a_row = self.bad_in_a_row + 1 if bad else 0
        self.skipped += skipped
        if math.isfinite(activation):
            self._activations.append(activation)
        line = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "activation": activation}
        line |= ({"scale": scale} if scale is not None else {}) | watched
        self._last = line
        if self.job.ranks.first:
            self.log.append([to_json(line | {"skipped": skipped})])
            if step % SHOW_EVERY == 0 or step == self.first_bad_step or step == self.job.steps:
                print("  ".join(f"{k} {v:.4g}" if k != "step" else f"step {v}" for k, v in line.items()), flush=True)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, whatever is in it."""
        if self.job.ranks.first:
            with files.atomic_file(self.job.out / "checkpoints" / f"step_{step:06d}.pt") as file:
                torch.save({**state, "step": step, "config": self.job.cfg.tree}, file)

    def finish(self, model: nn.Module, score: Score) -> None:
        """Write the result, with the score of the trained model."""
        if not self.job.ranks.first:
            return
        parameters = [p.detach().cpu() for p in model.parameters()]
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        result = Result(
            case=self.job.case,
            config=self.job.config,
            seed=self.job.seed,
            steps=self.job.steps,
            first_bad_step=self.first_bad_step,
            skipped=self.skipped,
            loss=self._last["loss"],
            metric=score.metric,
            value=score.value,
            chance=score.chance,
            target=score.target,
            questions=score.questions,
            first_activation=next(iter(self._activations), math.nan),
            largest_activation=max(self._activations, default=math.nan),
            bad_parameters=sum(not bool(p.isfinite().all()) for p in parameters),
            bad_buffers=sum(not bool(b.isfinite().all()) for b in buffers),
            lr=self._last["lr"],
            seconds=time.monotonic() - self._started[0],
            cpu_seconds=time.process_time() - self._started[1],
            digest=_digest(parameters),
        )
        write_result(self.job.out, result)
        print(
            f"{result.outcome}: {score.metric} {score.value:.3f} (chance {score.chance:.3f}, target {score.target}), "
            f"{result.survived} of {result.steps} steps finite, {result.skipped} skipped, "
            f"{result.bad_parameters} parameters and {result.bad_buffers} buffers not finite",
            flush=True,
        )


def _digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def keep_code(job: Job, folder: Path) -> None:
    """The program beside the log, as trackers keep it: what decides how a run computes may stand in its code."""
    if job.ranks.first:
        files.make_folder(job.out / "code")
        for source in sorted(folder.glob("*.py")):
            files.write_atomic(job.out / "code" / source.name, source.read_bytes())


def load_checkpoint(job: Job) -> dict[str, Any] | None:
    """The checkpoint that the job resumes from, if any."""
    if job.resume is None:
        return None
    path = job.resume
    if path.is_dir():
        found = sorted([*path.glob("step_*.pt"), *path.glob("checkpoints/step_*.pt")], key=lambda p: p.name)
        if not found:
            raise UsageError(f"{path} holds no checkpoint", hint="give a run's folder, or one file of it")
        path = found[-1]
    if not path.is_file():
        raise UsageError(f"there is no checkpoint {path}", hint="give a run's folder, or one file of it")
    state: dict[str, Any] = torch.load(path, map_location=job.device, weights_only=True)
    if state["step"] >= job.steps:
        raise UsageError(f"{path} is at step {state['step']} already", hint=f"raise --steps above {state['step']}")
    return state

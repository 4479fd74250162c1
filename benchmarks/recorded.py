"""Records what could be seen of a training at every step: the curves that `scripts/foresight.py` forecasts from.

    run = record(training, seed=0, steps=600)
    run.death, run.series["grad_norm"], run.limits

A run is trained once and kept; forecasts are tried on the recorded numbers as often as one likes.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainings import Training, make_optimizer, rate

from nanproof.guard.attention import Logits
from nanproof.guard.foresight import Outputs
from nanproof.guard.precursors import Precursors
from nanproof.guard.signals import norms

SKIPPED = 30
"""Steps in a row that a loss scaler leaves out before the run counts as dead."""


@dataclass
class Recorded:
    """A run: every series with one value per step (NaN where there is none), and the step at which it died."""

    name: str
    family: str
    seed: int
    death: int | None
    series: dict[str, np.ndarray] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    """The largest value that a series can hold, where a dtype says so."""
    seconds: float = math.nan
    """The CPU time of training and recording it."""

    @property
    def steps(self) -> int:
        return len(self.series["loss"])

    def save(self, path: Path) -> None:
        about = {k: v for k, v in vars(self).items() if k != "series"}
        np.savez_compressed(path, about=json.dumps(about), **{k: v.astype(np.float32) for k, v in self.series.items()})

    @classmethod
    def load(cls, path: Path) -> Recorded:
        with np.load(path) as kept:
            about: dict[str, Any] = json.loads(str(kept["about"]))
            return cls(**about, series={k: kept[k] for k in kept.files if k != "about"})


def record(training: Training, seed: int, steps: int) -> Recorded:
    """Train until the end, or some steps beyond the death, and read at every step what a guard reads at some."""
    start = time.process_time()
    torch.manual_seed(seed)
    task = training.task(**dict(training.knobs))
    parts = task.parts or [(task.model, task.loss)]
    optimizers = [make_optimizer(training, model) for model, _ in parts]
    half = training.precision == "float16"
    scaler = torch.amp.GradScaler("cpu", enabled=half, growth_interval=200)
    readers = [
        Reader(model, o, f"{i}." if i else "") for i, ((model, _), o) in enumerate(zip(parts, optimizers, strict=True))
    ]
    rows: list[dict[str, float]] = []
    death, skipped = None, 0
    for step in range(steps):
        for reader in readers:
            reader.begin()
        names: list[str] = []
        values: list[Tensor] = []
        for i, ((_, loss_of), optimizer, reader) in enumerate(zip(parts, optimizers, readers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = training.lr * rate(training.schedule, step, steps)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = loss_of(step)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            norm, found, numbers = reader.gradients()
            names += [f"loss {i}" if i else "loss", f"grad_norm {i}" if i else "grad_norm", *found]
            values += [torch.stack([loss.detach().float(), norm]), *numbers]
            if training.clip:
                nn.utils.clip_grads_with_norm_(reader.parameters, training.clip, norm)
            scaler.step(optimizer)
        for reader in readers:
            found, numbers = reader.outputs()
            names, values = names + found, values + numbers
        row = dict(zip(names, torch.cat(values).tolist(), strict=True))
        vital = [v for k, v in row.items() if k.startswith("loss") or (k.startswith("grad_norm") and "/" not in k)]
        bad = [v for v in (vital[::2] if half else vital) if not math.isfinite(v)]
        death = step if bad and death is None else death
        if half:
            row["scale"] = scaler.get_scale()
            scaler.update()
            skipped = skipped + 1 if scaler.get_scale() < row["scale"] else 0
            death = step - SKIPPED if skipped > SKIPPED and death is None else death
        rows.append({k: v for k, v in row.items() if " " not in k})
        if death is not None and step >= death + 2:
            break
    every = dict.fromkeys(k for row in rows for k in row)
    series = {n: np.array([row.get(n, math.nan) for row in rows]) for n in every}
    limits = {k: v for reader in readers for k, v in reader.limits.items()}
    return Recorded(str(training), training.family, seed, death, series, limits, time.process_time() - start)


class Reader:
    """The parts by which a guard reads a model, here at every step and for every module."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, part: str) -> None:
        self.parameters = list(model.parameters())
        self._named = list(model.named_parameters())
        self._part = part
        self._outputs, self._logits = Outputs(model, ["*"], 0), Logits(model, [], automatic=8)
        self._precursors = Precursors(self._named, [optimizer])
        self._outputs.listen(None)
        self._logits.listen(None)
        self._step = 0
        self._chosen = False

    def begin(self) -> None:
        self._outputs.seen, self._logits.seen = {}, {}

    def gradients(self) -> tuple[Tensor, list[str], list[Tensor]]:
        """The gradient norm; names and values of what is read of each weight matrix."""
        named = [(n, p.grad) for n, p in self._named if p.grad is not None]
        norm, each = norms([g for _, g in named])
        assert each is not None
        names = [f"grad_norm/{self._part}{n}" if g.dim() > 1 else f"bias {self._part}{n}" for n, g in named]
        self._step += 1
        sample = self._precursors.sample(self._step)
        read = sample.now() if sample is not None else {}
        return norm, names + [self._named_part(k) for k in read], [each, torch.tensor([*read.values()])]

    def outputs(self) -> tuple[list[str], list[Tensor]]:
        seen = {"absmax": self._outputs.seen, "logits": self._logits.seen}
        names = [f"{kind}/{self._part}{n}" for kind, found in seen.items() for n in found]
        largest = [torch.maximum(-low, high).float().reshape(1) for low, high in self._outputs.seen.values()]
        if not self._chosen:  # modules without attention need not be looked into again
            self._chosen = True
            self._logits.choose({k: v.item() for k, v in self._logits.seen.items()})
            self._logits.listen(None)
        return names, [*largest, *(v.float().clamp_min(0.0).reshape(1) for v in self._logits.seen.values())]

    @property
    def limits(self) -> dict[str, float]:
        found = {f"absmax/{self._part}{k}": v for k, v in self._outputs.limits.items()}
        found |= {f"logits/{self._part}{k}": v for k, v in self._logits.limits.items()}
        largest = min(torch.finfo(p.dtype).max for p in self.parameters)
        return found | ({"grad_norm": largest} if largest < 1e30 and not self._part else {})

    def _named_part(self, key: str) -> str:
        kind, slash, name = key.partition("/")
        return f"{kind}{slash}{self._part}{name}"

"""Records what could be seen of a training at every step: the curves that `scripts/foresight.py` forecasts from.

    run = record(training, seed=0, steps=600)
    run.death, run.series["grad_norm"], run.limits

A run is trained once and kept; forecasts are tried on the recorded numbers as often as one likes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainings import Training, make_optimizer, rate

from nanproof.guard.precursors import Precursors
from nanproof.guard.signals import absmax

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
    """Train until the end, or some steps beyond the death."""
    torch.manual_seed(seed)
    task = training.task(**dict(training.knobs))
    parts = task.parts or [(task.model, task.loss)]
    optimizers = [make_optimizer(training, model) for model, _ in parts]
    half = training.precision == "float16"
    scaler = torch.amp.GradScaler("cpu", enabled=half, growth_interval=200)
    outputs = Outputs([model for model, _ in parts])
    precursors = [Precursors(list(m.named_parameters()), [o]) for (m, _), o in zip(parts, optimizers, strict=True)]
    rows: list[dict[str, float]] = []
    death, skipped = None, 0
    for step in range(steps):
        row: dict[str, float] = {}
        outputs.seen.clear()
        for i, ((model, loss_of), optimizer) in enumerate(zip(parts, optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = training.lr * rate(training.schedule, step, steps)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = loss_of(step)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            read = precursors[i].read()
            norm = nn.utils.clip_grad_norm_(model.parameters(), training.clip or math.inf)
            scaler.step(optimizer)
            part = f"{i}." if i else ""
            bad = not math.isfinite(loss.item()) or (not half and not math.isfinite(norm.item()))
            death = step if bad and death is None else death
            if i == 0:
                row |= {"loss": loss.item(), "grad_norm": norm.item(), "lr": optimizer.param_groups[0]["lr"]}
            if read is not None:
                names, values = read
                named = dict(zip(names, values.tolist(), strict=True))
                row |= {_of_part(k, part): v for k, v in named.items() if i == 0 or "/" in k}
        if half:
            row["scale"] = scaler.get_scale()
            scaler.update()
            skipped = skipped + 1 if scaler.get_scale() < row["scale"] else 0
            death = step - SKIPPED if skipped > SKIPPED and death is None else death
        row |= {f"absmax/{k}": v.item() for k, v in outputs.seen.items()}
        rows.append(row)
        if death is not None and step >= death + 2:
            break
    names = dict.fromkeys(k for row in rows for k in row)
    series = {n: np.array([row.get(n, math.nan) for row in rows]) for n in names}
    return Recorded(str(training), training.family, seed, death, series, outputs.limits)


def _of_part(name: str, part: str) -> str:
    kind, slash, tensor = name.partition("/")
    return f"{kind}{slash}{part}{tensor}"


class Outputs:
    """The largest magnitude of every module's output."""

    def __init__(self, models: list[nn.Module]) -> None:
        self.seen: dict[str, Tensor] = {}
        self.limits: dict[str, float] = {}
        for i, model in enumerate(models):
            for name, module in model.named_modules():
                part = f"{i}." if i else ""
                module.register_forward_hook(self._hook(f"{part}{name or 'model'}"))

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(out, Tensor) and out.is_floating_point() and out.requires_grad:
                found = absmax(out.detach())
                self.seen[name] = torch.maximum(found, self.seen[name]) if name in self.seen else found
                self.limits[f"absmax/{name}"] = torch.finfo(out.dtype).max

        return hook

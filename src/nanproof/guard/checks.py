"""Wrong arguments are found before the first step, each with what to do instead."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UsageError
from .state import Training


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}", hint=f"use {' or '.join(known)}")


def check_numbers(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not value > 0:
            or_none = ", or None" if name in ("max_norm", "snapshot_every", "locate_seconds") else ""
            raise UsageError(f"{name} is {value}", hint=f"give a positive number{or_none}")


def check_average(ema: Any) -> None:
    if ema is not None and not (hasattr(ema, "update_parameters") or hasattr(ema, "update") or callable(ema)):
        raise UsageError(
            f"{type(ema).__name__} has no update_parameters(model) or update(model)",
            hint="pass torch.optim.swa_utils.AveragedModel, an object with update(model), or a function of the model",
        )


def check_late(training: Training, dropping: bool) -> None:
    """What the device cannot hold back by itself is refused, not done wrongly."""
    for optimizer in training.optimizers:
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise UsageError(
                f"sync='late' needs an optimizer that can leave a step out on the device;"
                f" {type(optimizer).__name__} cannot",
                hint="build it with fused=True (Adam, AdamW, SGD, Adagrad), or use sync='exact'",
            )
    if training.ema is not None:
        raise UsageError("sync='late' cannot hold back an averaged model", hint="use sync='exact' with ema")
    if dropping:
        raise UsageError("dropping single micro-batches needs their verdict at once", hint="use sync='exact'")
    if any(isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) for s in training.schedulers):
        raise UsageError("ReduceLROnPlateau needs the loss at once", hint="use sync='exact'")

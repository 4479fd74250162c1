"""Carrying a good step out: clip, step, schedule, average; and the learning rate's way back after a rollback."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .state import Training


def clip(training: Training, max_norm: float | None, norm: float | Tensor) -> None:
    """Scale gradients down to ``max_norm``, as torch does, given the norm that was judged.

    A host norm within the bound needs no work: torch would multiply by exactly one.
    """
    if max_norm is None or (isinstance(norm, float) and max_norm / (norm + 1e-6) >= 1.0):
        return
    total = torch.tensor(norm, device=training.device) if isinstance(norm, float) else norm
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    torch._foreach_mul_([getattr(g, "_local_tensor", g) for _, g in training.gradients()], coefficient)


class Backoff:
    """A factor on the learning rate that returns to one over a number of steps.

    >>> b = Backoff(); b.start(0.5, 2)
    >>> [b.factor, (b.advance(), b.factor)[1], (b.advance(), b.factor)[1]]
    [0.5, 0.7071067811865476, 1.0]
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._growth = 1.0

    def start(self, factor: float, recovery: int) -> None:
        self.factor *= factor
        self._growth = self.factor ** (-1.0 / recovery)

    def advance(self) -> None:
        self.factor = min(1.0, self.factor * self._growth)

    @contextmanager
    def on(self, optimizer: Optimizer) -> Iterator[None]:
        """A block in which the lower learning rate is in force.

        Only there, so that schedulers that compute from the last value are not disturbed.
        """
        full = [g["lr"] for g in optimizer.param_groups] if self.factor < 1.0 else []
        for group, lr in zip(optimizer.param_groups, full, strict=False):
            group["lr"] = lr * self.factor
        try:
            yield
        finally:
            for group, lr in zip(optimizer.param_groups, full, strict=False):
                group["lr"] = lr

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor, "growth": self._growth}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor, self._growth = state["factor"], state["growth"]


def step_optimizers(training: Training, backoff: Backoff, *, veto: Tensor | None = None, scaled: bool = False) -> None:
    """Step every optimizer; with ``veto`` (a device flag) fused ones leave everything as it is when it is true.

    With ``scaled`` GradScaler has its say, as in a plain loop; a step that was judged good does not need it.

    """
    for optimizer in training.optimizers:
        if veto is not None:
            optimizer.grad_scale, optimizer.found_inf = None, veto.to(torch.float32)  # type: ignore[attr-defined]
        try:
            with backoff.on(optimizer):
                if scaled and training.scaler is not None:
                    training.scaler.step(optimizer)
                else:
                    optimizer.step()
        finally:
            if veto is not None:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def step_schedulers(training: Training, loss: float) -> None:
    """Advance the schedules; those that look at a metric get the loss."""
    for scheduler in training.schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()


def update_average(training: Training) -> None:
    """Let the averaged model see the new parameters."""
    ema: Any = training.ema
    if ema is None:
        return
    if hasattr(ema, "update_parameters"):
        ema.update_parameters(training.model)
    elif hasattr(ema, "update"):
        ema.update(training.model)
    else:
        ema(training.model)


def back_off_scale(training: Training, floor: float, scale: float) -> bool:
    """Lower GradScaler's scale after an overflow as it would itself, but not below the floor.

    True when the floor stopped it: then the overflow is no ordinary one.
    """
    scaler = training.scaler
    assert scaler is not None
    lower: float = scale * scaler.get_backoff_factor()
    hold_scale(training, max(lower, min(scale, floor)))
    scaler._growth_tracker.zero_()
    return lower < floor


def hold_scale(training: Training, scale: float) -> None:
    """Make GradScaler forget this step's overflow and keep (or take) a scale; its growth counter stays."""
    if training.scaler is None or not math.isfinite(scale):
        return
    if training.defers_scale:
        training.held_scale = float(scale)  # the loop's own update() comes later and must find its records
    else:
        training.scaler.update(float(scale))

"""What can be set for a guard, in groups, and what is refused before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UsageError
from .training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is measured besides loss and gradients.

    >>> Watch(modules=["blocks.*.attn"], every=25).every
    25
    """

    modules: Sequence[str] = ()
    """Patterns of module names whose outputs' largest magnitude is read, with its headroom to the dtype's maximum."""
    params: Sequence[str] = ()
    """Patterns of parameter names whose largest magnitude is read (gates, temperatures, scales); of weight matrices
    the log also has the norm, the gradient norm and the relative size of updates."""
    automatic: int = 8
    """How many module outputs are watched besides: those that have the least headroom in the first step. 0: none, and
    no weight matrices either."""
    every: int = 10
    """How often, in steps; the first ones and those under suspicion are all read."""
    chance: float | None = None
    """The loss of a model that has learned nothing; a run that stays there while gradients vanish is called dead."""
    still_after: int = 20
    """Warn when no parameter has changed over that many steps."""

    def __post_init__(self) -> None:
        for name in ("modules", "params"):  # one pattern is a pattern, not a row of letters
            if isinstance(pattern := getattr(self, name), str):
                object.__setattr__(self, name, (pattern,))
        check_numbers("watch.", every=self.every, chance=self.chance, still_after=self.still_after)
        if self.automatic < 0:
            raise UsageError(f"watch.automatic is {self.automatic}", hint="give 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What is written down, and where it goes besides the run's folder.

    >>> Records(log_every=1).keep
    3
    """

    log_every: int = 50
    """Lines of the log that are written together; a bad step is written at once."""
    incident_bytes: int = 64 << 20
    """Tensors larger than this are left out of an incident's bundle."""
    keep: int = 3
    """How many checkpoints `Guard.save` keeps; the last good one is never deleted."""
    loggers: Sequence[Any] = ()
    """TensorBoard writers, MLflow clients, W&B or Trackio runs, or functions of (step, values)."""

    def __post_init__(self) -> None:
        check_numbers("records.", log_every=self.log_every, incident_bytes=self.incident_bytes, keep=self.keep)


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}", hint=f"use {' or '.join(known)}")


def check_numbers(prefix: str = "", **numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not value > 0:
            or_none = ", or None" if name in ("max_norm", "chance") else ""
            raise UsageError(f"{prefix}{name} is {value}", hint=f"give a positive number{or_none}")


def check_average(ema: Any) -> None:
    if ema is not None and not (hasattr(ema, "update_parameters") or hasattr(ema, "update") or callable(ema)):
        raise UsageError(
            f"{type(ema).__name__} has no update_parameters(model) or update(model)",
            hint="pass torch.optim.swa_utils.AveragedModel, an object with update(model), or a function of the model",
        )


def check_optimizers(training: Training) -> None:
    """`Guard.step` calls optimizers without a closure."""
    if any(isinstance(o, torch.optim.LBFGS) for o in training.optimizers):
        raise UsageError(
            "LBFGS evaluates its closure many times within one step, which Guard.step cannot hand to it",
            hint="run your own loop under `nanproof run`, which guards LBFGS, or use a first-order optimizer",
        )


def check_deferred(training: Training, dropping: bool) -> None:
    """What the device cannot hold back by itself is refused, not done wrongly."""
    for optimizer in training.optimizers:
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise UsageError(
                f"timing='deferred' needs an optimizer that can leave a step out on the device;"
                f" {type(optimizer).__name__} cannot",
                hint="build it with fused=True (Adam, AdamW, SGD, Adagrad), or use timing='exact'",
            )
    if training.ema is not None:
        raise UsageError("timing='deferred' cannot hold back an averaged model", hint="use timing='exact' with ema")
    if dropping:
        raise UsageError("dropping single micro-batches needs their verdict at once", hint="use timing='exact'")
    if any(isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) for s in training.schedulers):
        raise UsageError("ReduceLROnPlateau needs the loss at once", hint="use timing='exact'")

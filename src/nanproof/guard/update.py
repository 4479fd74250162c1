"""Making an update: clip, step, schedule, average; and the learning rate's way back after a rollback."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .step import Decision
from .training import Training, gradients_of


def clip(parameters: list[tuple[str, nn.Parameter]], max_norm: float | None, norm: float | Tensor | None) -> None:
    """Scale gradients down to ``max_norm``, as torch does, given the norm that was judged.

    A host norm within the bound needs no work: torch would multiply by exactly one. Without a norm torch computes it.
    """
    if max_norm is None or (isinstance(norm, float) and max_norm / (norm + 1e-6) >= 1.0):
        return
    if norm is None:
        torch.nn.utils.clip_grad_norm_([p for _, p in parameters], max_norm)
        return
    grads = [getattr(g, "_local_tensor", g) for _, g in gradients_of(parameters)]
    if not grads:
        return
    total = torch.tensor(norm, device=grads[0].device) if isinstance(norm, float) else norm
    torch._foreach_mul_(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0))


Lowered = Callable[[Optimizer], AbstractContextManager[None]]
"""Makes blocks in which an optimizer has the learning rate that it is to step with."""


def make_update(training: Training, decision: Decision, lowered: Lowered, *, veto: Tensor | None = None) -> None:
    """Step optimizers, scaler, schedules and the averaged model, as the loop would."""
    norm = decision.reading.grad_norm
    # a step that was judged good needs no second check by GradScaler; one that is only observed gets it
    scaled = veto is None and training.scaler is not None and not math.isfinite(norm)
    step_optimizers(training, lowered, veto=veto, scaled=scaled)
    if training.scaler is not None:
        training.scaler.update()
    step_schedulers(training, 0.0 if veto is not None else decision.reading.loss)
    if veto is None:
        update_average(training)


class Backoff:
    """A factor on the learning rate that returns to one over a number of steps.

    >>> b = Backoff(); b.start(0.5, 2)
    >>> [b.factor, (b.advance(), b.factor)[1], (b.advance(), b.factor)[1]]
    [0.5, 0.7071067811865476, 1.0]
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._growth = 1.0
        self.ignored_by = ""
        """The optimizer that did not step with the rate that it was given."""

    def start(self, factor: float, recovery: int) -> None:
        self.factor *= factor
        self._growth = self.factor ** (-1.0 / recovery)

    def advance(self) -> None:
        self.factor = min(1.0, self.factor * self._growth)

    @contextmanager
    def on(self, optimizer: Optimizer) -> Iterator[None]:
        """A block in which the lower learning rate is in force, whoever sets the full one.

        Only there, so that neither a scheduler that computes from the last value nor a script that sets the rate
        itself is disturbed. An optimizer that replaces the rate inside its step is noticed.
        """
        groups = optimizer.param_groups if self.factor < 1.0 else []
        full = [g["lr"] for g in groups]
        lowered = [lr * self.factor for lr in full]
        for group, lr in zip(groups, lowered, strict=True):
            group["lr"] = lr
        try:
            yield
        finally:
            for group, lr, given in zip(groups, full, lowered, strict=True):
                if group["lr"] is not given:
                    self.ignored_by = type(optimizer).__name__
                else:
                    group["lr"] = lr

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor, "growth": self._growth}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor, self._growth = state["factor"], state["growth"]


def step_optimizers(training: Training, lowered: Lowered, *, veto: Tensor | None = None, scaled: bool = False) -> None:
    """Step every optimizer; with ``veto`` (a device flag) fused ones leave everything as it is when it is true.

    With ``scaled`` GradScaler has its say, as in a plain loop.
    """
    for optimizer in training.optimizers:
        if veto is not None:
            optimizer.grad_scale, optimizer.found_inf = None, veto.to(torch.float32)  # type: ignore[attr-defined]
        try:
            with lowered(optimizer):
                if scaled:
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


FACTORS = frozenset({"lr", "weight_decay", "betas", "eps", "momentum"})
"""Options that an update multiplies or divides by: never infinite on purpose."""


class Hyperparameters:
    """The optimizers' options: finite ones are remembered, a non-finite one is replaced by the last finite value.

    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> sgd = torch.optim.SGD([w], lr=0.1)
    >>> options = Hyperparameters(); options.remember([sgd])
    >>> sgd.param_groups[0]["lr"] = float("nan")
    >>> options.check([sgd]), sgd.param_groups[0]["lr"]
    (['lr of SGD group 0'], 0.1)

    An option that is infinite from the beginning is a bound that does not bind:

    >>> sgd.param_groups[0]["growth_rate"] = float("inf")
    >>> options.check([sgd]), sgd.param_groups[0]["growth_rate"]
    ([], inf)
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int, str], Any] = {}

    def remember(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the options as they are now for good, as far as they are finite."""
        for name, _, value in _options(optimizers):
            if self._good(name, value):
                self._last[name] = value

    def check(self, optimizers: Sequence[Optimizer]) -> list[str]:
        """The options that were not finite, by name; the last finite values are in their place."""
        found = []
        for name, group, value in _options(optimizers):
            if not self._good(name, value):
                number, i, key = name
                optimizer = next(o for o in optimizers if id(o) == number)
                found.append(f"{key} of {type(optimizer).__name__} group {i}")
                last = self._last.get(name, optimizer.defaults.get(key, 0.0))
                if isinstance(group[key], Tensor):
                    group[key].fill_(last)
                else:
                    group[key] = last
        return found

    def _good(self, name: tuple[int, int, str], value: Any) -> bool:
        if not _finite(value) and name not in self._last and name[2] not in FACTORS and value in (math.inf, -math.inf):
            self._last[name] = value  # infinite from the beginning: a bound that is off, as Prodigy's growth rate
        return _finite(value) or self._last.get(name) == value


def _options(optimizers: Sequence[Optimizer]) -> Iterator[tuple[tuple[int, int, str], dict[str, Any], Any]]:
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":  # else a host read
                    yield (id(optimizer), i, key), group, float(value)
                elif type(value) is float or type(value) is tuple:
                    yield (id(optimizer), i, key), group, value


def _finite(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)

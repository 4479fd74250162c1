"""`smoke`: some real training steps, measured closely; the model is changed by them, as by any training."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ...locating.replay import run_step
from ...tensors import nonfinite
from .chance import watch_chance
from .checks import SmokeReport, judge
from .layers import watch_layers
from .measures import copy_of, largest_in, relative_change, without_gradient, zero_share
from .trial import Trial


def smoke(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 10,
    watch: Sequence[str] = (),
) -> SmokeReport:
    """Train ``steps`` steps on what ``step()`` returns, a loss, and check everything that can be checked.

    Without an optimizer AdamW with its defaults is used. ``watch`` are patterns of parameter names whose size
    is told: gates, temperatures, scales.
    """
    if steps < 0:
        raise UsageError(f"steps is {steps}", hint="give 0 or more")
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("the model has no parameter that trains", hint="build it with requires_grad, or unfreeze it")
    return judge(_train(model, step, optimizer, steps, watch))


def _train(
    model: nn.Module,
    step: Callable[[], Any],
    optimizer: torch.optim.Optimizer | None,
    steps: int,
    watch: Sequence[str],
) -> Trial:
    named = dict(model.named_parameters())
    trained = {n: p for n, p in named.items() if p.requires_grad}
    bad = tuple(str(f) for n, t in [*named.items(), *model.named_buffers()] if (f := nonfinite(n, t)))
    watched = {n: p for n, p in named.items() if any(fnmatch.fnmatchcase(n, w) for w in watch)}
    before = {n: largest_in(p) for n, p in watched.items()}
    start = {n: copy_of(p) for n, p in trained.items()}
    optimizer = optimizer or torch.optim.AdamW(list(trained.values()))
    losses: list[float] = []
    norms: list[float] = []
    with watch_chance() as seen, watch_layers(model) as layers:
        _backward(optimizer, step, losses)
    chance = seen.chance
    bad_gradients = tuple(
        str(f) for n, p in trained.items() if p.grad is not None and (f := nonfinite(f"gradient of {n}", p.grad))
    )
    missing, zeros = tuple(without_gradient(trained)), zero_share(trained)
    norms.append(_norm(trained))
    stopped = ""
    for n in range(steps):
        if not math.isfinite(losses[-1]) or not math.isfinite(norms[-1]):
            stopped = f"stopped before step {n + 1}: a step on it would destroy the weights"
            break
        optimizer.step()
        _backward(optimizer, step, losses)
        norms.append(_norm(trained))
    moved = {n: relative_change(p, start[n]) for n, p in trained.items()} if losses[1:] else {}
    return Trial(
        losses=tuple(losses),
        norms=tuple(norms),
        chance=chance,
        layers=tuple(layers.values()),
        bad_at_start=bad,
        bad_gradients=bad_gradients,
        without_gradient=missing,
        unmoved=tuple(n for n, m in moved.items() if m == 0),
        largest_move=max(moved.values(), default=0.0),
        zero_gradients=zeros,
        optimizer=type(optimizer).__name__,
        eps=optimizer.defaults.get("eps"),
        parameters=sum(p.numel() for p in named.values()),
        trainable=sum(p.numel() for p in trained.values()),
        watched={n: (before[n], largest_in(p)) for n, p in watched.items()},
        stopped=stopped,
    )


def _backward(optimizer: torch.optim.Optimizer, step: Callable[[], Any], losses: list[float]) -> None:
    optimizer.zero_grad()
    loss = run_step(step)
    if loss.grad_fn is None:
        raise UsageError("the loss does not depend on the model", hint="return the loss with its graph, not detached")
    loss.backward()  # type: ignore[no-untyped-call]
    losses.append(float(loss.detach()))  # host sync: a test, not a training


def _norm(trained: Mapping[str, nn.Parameter]) -> float:
    grads = [p.grad.double() for p in trained.values() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

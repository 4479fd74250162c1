"""Whether an optimizer wrote a bad parameter: its last update, computed again from the state that it left."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .values import INF, kind_of


def writer_of(parameter: Tensor, optimizer: torch.optim.Optimizer | None) -> str:
    """One sentence on how an optimizer made a parameter bad; empty when it cannot be told.

    >>> p = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    >>> adam = torch.optim.Adam([p])
    >>> p.grad = torch.full_like(p, 1e-5)
    >>> adam.step()
    >>> "eps 1e-08 is 0 in float16" in writer_of(p, adam)
    True
    """
    group = next((g for g in (optimizer.param_groups if optimizer else ()) if _holds(g, parameter)), None)
    if optimizer is None or group is None:
        return ""
    name, state = type(optimizer).__name__, dict(optimizer.state.get(parameter, {}))
    lr = float(group.get("lr", 0.0))
    if not math.isfinite(lr):
        return f"{name} wrote it: its learning rate is {lr}"
    if not state:
        return f"{name} has not updated it yet: it was bad when it was made (torch.empty, nn.init) or loaded"
    for key, value in state.items():
        if isinstance(value, Tensor) and kind_of(value):
            return f"{name} wrote it: its {key} is not finite, so a gradient of an earlier step was not"
    return _moments(name, parameter, group, state) or _decay(name, parameter, group, lr)


def _holds(group: dict[str, Any], parameter: Tensor) -> bool:
    return any(p is parameter for p in group["params"])


def _moments(name: str, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> str:
    """Adam and its kin: lr · m / (sqrt(v) + eps), in the format of the state."""
    mean, square = state.get("exp_avg"), state.get("exp_avg_sq")
    if not isinstance(square, Tensor) or "eps" not in group:
        return ""
    eps = torch.tensor(group["eps"], dtype=square.dtype)
    if float(eps) == 0 and bool((square == 0).any()):
        return f"{name} wrote it: exp_avg_sq is 0 there and eps {group['eps']:g} is 0 in {_format(square)}: m / 0"
    if isinstance(mean, Tensor):
        step = float(group.get("lr", 0.0)) * mean / (square.sqrt() + eps.to(square.device))
        if kind_of(step):
            return f"{name} wrote it: the update is not finite in {_format(square)} (lr {float(group['lr']):g})"
    return ""


def _decay(name: str, parameter: Tensor, group: dict[str, Any], lr: float) -> str:
    decay = float(group.get("weight_decay", 0.0))
    if lr * decay > 2:
        return f"{name} wrote it: lr · weight_decay = {lr * decay:.3g} makes every weight grow without bound"
    if kind_of(parameter) == INF:
        return f"{name} wrote it: the parameter left the range of {_format(parameter)} (lr {lr:g})"
    return f"{name} updated it last (lr {lr:g})"


def _format(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

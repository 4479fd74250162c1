"""The scale of a loss: GradScaler's, or one that a loop has multiplied its loss with by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


def scale_of(scaler: Any, device: torch.device) -> Tensor | None:
    """A GradScaler's scale on the device, so that it can be read without a wait."""
    if scaler is None:
        return None
    if scaler._scale is None:
        scaler.scale(torch.zeros((), device=device))  # it makes its tensors on first use
    found: Tensor = scaler._scale
    return found


def is_scaled(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether a scaler has not unscaled the gradients of an optimizer yet."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    return state is None or state["stage"] is OptState.READY


def backed_off(scaler: Any, scale: float, floor: float) -> float:
    """The scale after an ordinary overflow: lower, as GradScaler itself would, but not below the floor."""
    lower: float = scale * scaler.get_backoff_factor()
    scaler._growth_tracker.zero_()
    return max(lower, min(scale, floor))


def is_loss_scale(factor: float) -> bool:
    """Whether a constant factor of a loss is a hand-made loss scale: a power of two, or too large to be a weight."""
    return factor >= 4096 or (factor >= 64 and math.frexp(factor)[0] == 0.5)


def factor_of(loss: Tensor) -> float:
    """The constant that a loss was multiplied with last: a hand-made loss scale, or a share; 1 when there is none.

    >>> x = torch.ones((), requires_grad=True)
    >>> factor_of((x * x) * 1024.0), factor_of((x * x) / 4), factor_of(x * x)
    (1024.0, 0.25, 1.0)
    """
    node: Any = loss.grad_fn
    name = node.name() if node is not None else ""
    if name not in ("DivBackward0", "MulBackward0") or len(node.next_functions) != 2:
        return 1.0
    if node.next_functions[1][0] is not None:
        return 1.0  # the other factor is part of the graph
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or other.device.type != "cpu":
        return 1.0  # on a device it could only be read by waiting
    value = float(other)
    if not 0 < abs(value) < math.inf:
        return 1.0
    return abs(1.0 / value) if name == "DivBackward0" else abs(value)

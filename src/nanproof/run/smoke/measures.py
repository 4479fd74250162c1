"""Numbers of parameters and gradients that a trial records; they read the host, which a test may."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ...tensors import is_finite, local_values


def largest_in(tensor: Tensor) -> float:
    """The largest magnitude; NaN when something is not finite."""
    values = local_values(tensor.detach())
    return float(values.double().abs().max()) if values.numel() and is_finite(values) else math.nan


def copy_of(tensor: Tensor) -> Tensor:
    """The values that this process holds, to compare with later."""
    return local_values(tensor.detach()).clone()


def relative_change(now: Tensor, start: Tensor) -> float:
    """How far a parameter is from its start, relative to the size that it had."""
    size = float(start.double().norm())
    change = float((local_values(now.detach()).double() - start.double()).norm())
    return change / size if size > 0 else change


def without_gradient(trained: Mapping[str, Tensor]) -> Iterable[str]:
    """The names of parameters whose gradient is missing or zero everywhere."""
    return (n for n, p in trained.items() if p.grad is None or not bool((local_values(p.grad) != 0).any()))


def zero_share(trained: Mapping[str, Tensor]) -> float:
    """Half gradients that were rounded to zero; in full precision a zero gradient says something else."""
    grads = [local_values(p.grad) for p in trained.values() if p.grad is not None]
    half = [g for g in grads if g.dtype == torch.float16]
    count = sum(g.numel() for g in half)
    return sum(int((g == 0).sum()) for g in half) / count if count else 0.0

"""What can be seen of a step without waiting for the device: magnitudes and norms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..tensors import local_values, parts_of, tensors_in


def absmax(tensor: Tensor) -> Tensor:
    """The largest magnitude, NaN if there is any; cannot overflow, one pass, no host read."""
    values = local_values(tensor)
    if values.numel() == 0:
        return torch.zeros((), device=values.device)
    if values.element_size() == 1:
        values = values.float()
    if values.device.type == "cpu" and not values.is_complex():  # there the norm takes ten times as long
        low, high = torch.aminmax(values)
        return torch.maximum(high, -low).float()
    largest: Tensor = torch.linalg.vector_norm(values, math.inf)
    return largest.float()


def level_flag(value: Any) -> Tensor | None:
    """True on the device when any floating tensor within is not finite; None when there is none to look at.

    A tensor without memory (meta, or fake as `torch.compile` leaves them behind) has no values that could be bad.
    """
    parts = [p for _, t in tensors_in(value) for p in parts_of(t)]
    found = [absmax(p) for p in parts if p.is_floating_point()]
    return ~torch.isfinite(torch.stack(found)).all() if found else None


def total_norm(grads: list[Tensor]) -> Tensor:
    """The L2 norm over all gradients as a float32 scalar; the same on every rank for sharded ones."""
    return norms(grads)[0]


@torch.no_grad()
def norms(grads: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The L2 norm over all gradients, and those of each of them where they are a step towards it."""
    if not grads:
        return torch.zeros(()), None
    grads = [local_values(g) if g.is_complex() else g for g in grads]
    sharded = [g for g in grads if hasattr(g, "_local_tensor")]
    plain = [g for g in grads if not hasattr(g, "_local_tensor")]
    if not sharded and len({(type(g), g.dtype, g.device) for g in plain}) == 1 and type(plain[0]) is Tensor:
        # a float16 norm overflows at 65,504; sum half-precision gradients in float32
        full = plain[0].dtype in (torch.float32, torch.float64)
        each = torch.stack(torch._foreach_norm(plain, 2, dtype=None if full else torch.float32))
        return torch.linalg.vector_norm(each).float(), each
    parts = []
    if plain and all(g.dtype in (torch.float32, torch.float64) for g in plain):
        parts.append(get_total_norm(plain))
    elif plain:
        found = torch._foreach_norm(plain, 2, dtype=torch.float32)
        parts.append(torch.linalg.vector_norm(torch.stack([p.to(plain[0].device) for p in found])))
    if sharded:
        norm = get_total_norm(sharded)
        parts.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    total = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))
    return total.float(), None


@torch.no_grad()
def careful_norm(grads: list[Tensor]) -> float:
    """The L2 norm in float64, which no float32 gradients can overflow; waits for the device."""
    squares = [float(local_values(g).double().square().sum()) for g in grads]
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan

"""What can be seen of a step without waiting for the device: losses taken apart, magnitudes, norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..errors import UsageError
from ..tensors import local_values, tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What a forward pass returned, taken apart."""

    total: Tensor
    components: Mapping[str, Tensor]
    prediction: Any = None


def losses_of(returned: Any, weights: Mapping[str, float]) -> Losses:
    """Take apart a loss, a dictionary of components, (loss, prediction), or an output with ``.loss``."""
    prediction = None
    if isinstance(returned, tuple) and len(returned) == 2:
        returned, prediction = returned
    if not isinstance(returned, Tensor | Mapping) and isinstance(getattr(returned, "loss", None), Tensor):
        prediction = getattr(returned, "logits", prediction)
        returned = returned.loss
    if isinstance(returned, Mapping) and returned and all(isinstance(v, Tensor) for v in returned.values()):
        unknown = sorted(set(weights) - set(returned))
        if unknown:
            raise UsageError(
                f"loss_weights names {unknown[0]!r}, which is no loss component", hint=f"use {sorted(returned)}"
            )
        # a component of weight zero stays out of the sum: 0 · NaN is NaN
        parts = [weights.get(k, 1.0) * _scalar(v) for k, v in returned.items() if weights.get(k, 1.0) != 0]
        return Losses(total=torch.stack(parts).sum(), components=dict(returned), prediction=prediction)
    if not isinstance(returned, Tensor):
        raise UsageError(
            f"the step returned {type(returned).__name__}, not a loss",
            hint="return the loss tensor, a dictionary of named losses, or (loss, prediction)",
        )
    return Losses(total=_scalar(returned), components={}, prediction=prediction)


def _scalar(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise UsageError(f"the loss has shape {tuple(loss.shape)}", hint="reduce it to one number, for example .mean()")
    if not loss.requires_grad:
        raise UsageError("the loss does not depend on any parameter", hint="remove no_grad or detach from its way")
    return loss.reshape(())


def absmax(tensor: Tensor) -> Tensor:
    """The largest magnitude, NaN if there is any; cannot overflow, one pass, no host read."""
    values = local_values(tensor)
    if values.numel() == 0:
        return torch.zeros((), device=values.device)
    if values.element_size() == 1:
        values = values.float()
    largest: Tensor = torch.linalg.vector_norm(values, math.inf)
    return largest.float()


def level_flag(value: Any) -> Tensor | None:
    """True on the device when any floating tensor within is not finite; None when there is none to look at."""
    found = [absmax(t) for _, t in tensors_in(value) if t.is_floating_point() or t.is_complex()]
    return ~torch.isfinite(torch.stack(found)).all() if found else None


@torch.no_grad()
def total_norm(grads: list[Tensor]) -> Tensor:
    """The L2 norm over all gradients as a float32 scalar; the same on every rank for sharded ones."""
    if not grads:
        return torch.zeros(())
    sharded = [g for g in grads if hasattr(g, "_local_tensor")]
    plain = [g for g in grads if not hasattr(g, "_local_tensor")]
    norms = []
    if plain and all(g.dtype in (torch.float32, torch.float64) for g in plain):
        norms.append(get_total_norm(plain))
    elif plain:
        # a float16 norm overflows at 65,504; sum half-precision gradients in float32
        parts = torch._foreach_norm(plain, 2, dtype=torch.float32)
        norms.append(torch.linalg.vector_norm(torch.stack([p.to(plain[0].device) for p in parts])))
    if sharded:
        norm = get_total_norm(sharded)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return total.float() if total.dtype != torch.float32 else total


@torch.no_grad()
def careful_norm(grads: list[Tensor]) -> float:
    """The L2 norm in float64, which no float32 gradients can overflow; waits for the device."""
    squares = [float(local_values(g).double().square().sum()) for g in grads]
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan

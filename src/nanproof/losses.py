"""Read the loss out of what a training step returned: one rule for the guard, locate and smoke.

>>> import torch
>>> w = torch.ones((), requires_grad=True)
>>> losses_of({"ce": 2 * w, "kl": 3 * w}, {"kl": 0.5}).total.item()
3.5
>>> losses_of((2 * w, "logits")).total.item()
2.0
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The loss of a step, the named components it is the sum of, and the prediction beside it."""

    total: Tensor
    components: Mapping[str, Tensor]
    prediction: Any = None


def losses_of(returned: Any, weights: Mapping[str, float] | None = None, *, needs_grad: bool = True) -> Losses:
    """Take apart a loss, a dictionary of components, (loss, prediction, ...), or an output with a ``loss``.

    A dictionary or output with an entry ``loss`` (transformers, Lightning) holds its total there; any other
    dictionary of tensors is the sum of its entries, each times its weight. A scaled loss is read as it is.
    """
    weights = weights or {}
    prediction = None
    if isinstance(returned, tuple) and returned and not hasattr(returned, "loss"):
        returned, prediction = returned[0], returned[1] if len(returned) > 1 else None
    if not isinstance(returned, Tensor):
        inside = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
        if isinstance(inside, Tensor) and not weights:
            logits = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
            prediction = prediction if logits is None else logits
            returned = inside
    if isinstance(returned, Mapping) and returned and all(isinstance(v, Tensor) for v in returned.values()):
        return Losses(
            total=_weighted_sum(returned, weights, needs_grad), components=dict(returned), prediction=prediction
        )
    if not isinstance(returned, Tensor):
        raise UsageError(
            f"the step returned {type(returned).__name__}, not a loss",
            hint="return the loss tensor, a dictionary of named losses, or (loss, prediction)",
        )
    return Losses(total=_scalar(returned, needs_grad), components={}, prediction=prediction)


def _weighted_sum(components: Mapping[str, Tensor], weights: Mapping[str, float], needs_grad: bool) -> Tensor:
    unknown = sorted(set(weights) - set(components))
    if unknown:
        raise UsageError(
            f"loss_weights names {unknown[0]!r}, which is no loss component", hint=f"use {sorted(components)}"
        )
    # a component of weight zero stays out of the sum: 0 · NaN is NaN
    kept = {k: v for k, v in components.items() if weights.get(k, 1.0) != 0}
    if not kept:
        raise UsageError("every loss component has weight 0", hint="give at least one component a weight")
    # one dtype, as sum() would promote: torch.stack refuses mixed ones
    parts = [weights.get(k, 1.0) * _scalar(v, needs_grad) for k, v in kept.items()]
    dtype = functools.reduce(torch.promote_types, [p.dtype for p in parts])
    return torch.stack([p.to(dtype) for p in parts]).sum()


def _scalar(loss: Tensor, needs_grad: bool) -> Tensor:
    if loss.numel() != 1:
        raise UsageError(f"the loss has shape {tuple(loss.shape)}", hint="reduce it to one number, for example .mean()")
    if needs_grad and not loss.requires_grad:
        raise UsageError("the loss does not depend on any parameter", hint="remove the no_grad or detach before it")
    return loss if loss.ndim == 0 else loss.reshape(())

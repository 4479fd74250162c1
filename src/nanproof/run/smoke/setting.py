"""What the user hands to a smoke test: a factory of model, step and optimizer, or a model and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ...locating.again import load_function

_FACTORY = "which returns (model, step_fn) or (model, step_fn, optimizer)"

Setting = tuple[nn.Module, Callable[[], Any], torch.optim.Optimizer | None]


def from_factory(spec: str) -> Setting:
    """``train.py:make``: a function that returns (model, step_fn) or (model, step_fn, optimizer)."""
    made = load_function(spec, _FACTORY)()
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module) and callable(made[1]):
        return made[0], made[1], made[2] if len(made) == 3 else None
    raise UsageError(f"{spec} returned {_kind(made)}", hint=f"write a function {_FACTORY}")


def from_model(model_spec: str, batch_spec: str | None) -> Setting:
    """A model by itself, fed with a batch: as keywords when that is a mapping, as arguments when a tuple."""
    model = load_function(model_spec, "which returns a model")()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{model_spec} returned {_kind(model)}, not a model", hint="return a torch.nn.Module")
    if batch_spec is None:
        return model, lambda: _no_batch(model), None
    batch = load_function(batch_spec, "which returns a batch for the model")()

    def step() -> Tensor:
        if isinstance(batch, dict):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple) else model(batch)
        return loss_in(output)

    return model, step, None


def loss_in(output: Any) -> Tensor:
    """The loss that a model returns, or a stand-in: the mean square of its first output."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next((t for t in _tensors(output) if t.is_floating_point() and t.requires_grad), None)
    if first is None:
        raise UsageError("the model returned no tensor to train on", hint="return a loss or a floating tensor")
    return first if first.numel() == 1 else first.square().mean()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [t for part in parts for t in _tensors(part)]


def _no_batch(model: nn.Module) -> Tensor:
    raise UsageError(f"{type(model).__name__} needs something to run on", hint="add --batch FILE:FUNCTION")


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__

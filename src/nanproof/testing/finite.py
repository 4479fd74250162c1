"""`assert_finite`: no NaN and no Inf in a model, an optimizer or any nest of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import NonFiniteError, UsageError
from ..tensors import nonfinite


def assert_finite(what: Any, name: str = "") -> None:
    """Raise NonFiniteError unless every number in ``what`` is finite.

    >>> model = nn.Linear(2, 2)
    >>> assert_finite(model)
    >>> _ = model.bias.data.fill_(torch.inf)
    >>> assert_finite(model)
    Traceback (most recent call last):
    nanproof.errors.NonFiniteError: bias: 2 +Inf of 2 values, first at [0] (float32)

    ``what`` is a module (parameters, buffers and gradients), an optimizer (its state and the gradients it is
    about to apply), a tensor, an array or a number, or a dict, list or tuple of these. ``name`` goes before the
    path of the tensor in the message.
    """
    for path, tensor in _tensors(what, name):
        found = nonfinite(path or "tensor", tensor)
        if found:
            raise NonFiniteError(f"{found.name}: {found.census}")


def _tensors(what: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in ``what`` with its path, in a fixed order."""
    match what:
        case None | str() | bytes() | bool() | int():
            return
        case Tensor():
            yield path, what
        case float() | complex():
            yield path, torch.tensor(what, dtype=torch.float64 if isinstance(what, float) else torch.complex128)
        case np.ndarray() | np.generic():
            if what.dtype.kind in "fc":
                yield path, torch.from_numpy(np.array(what))
        case nn.Module():
            yield from _of_module(what, path)
        case torch.optim.Optimizer():
            yield from _of_optimizer(what, path or "optimizer")
        case Mapping():
            for key, value in what.items():
                yield from _tensors(value, f"{path}[{key!r}]")
        case list() | tuple() | set() | frozenset():
            for i, value in enumerate(what):
                yield from _tensors(value, f"{path}[{i}]")
        case _:
            # Passing over what we cannot read would call it finite.
            raise UsageError(
                f"{path or 'the argument'} is a {type(what).__name__}, which cannot be looked into",
                hint="pass its tensors in a dict, list or tuple",
            )


def _of_module(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    dot = f"{path}." if path else ""
    parameters = dict(module.named_parameters())
    for name, tensor in [*parameters.items(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise UsageError(f"{dot}{name} has no values yet", hint="run one forward pass of the model first")
        yield dot + name, tensor
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            yield f"grad of {dot}{name}", parameter.grad


def _of_optimizer(optimizer: torch.optim.Optimizer, path: str) -> Iterator[tuple[str, Tensor]]:
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            place = f"{path}.param_groups[{i}]['params'][{j}]"
            yield place, parameter
            if parameter.grad is not None:
                yield f"grad of {place}", parameter.grad
            yield from _tensors(dict(optimizer.state.get(parameter, {})), f"state of {place}")

"""`select`: torch.where whose untaken branch cannot poison the gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import UsageError

Branch = Callable[..., Tensor] | Tensor | float


def select(
    condition: Tensor, then: Branch, otherwise: Branch, *inputs: Tensor, fill: float | tuple[float, ...] = 0.5
) -> Tensor:
    """``then(*inputs)`` where the condition holds, ``otherwise(*inputs)`` elsewhere; each sees only its own.

    >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
    >>> select(x > 0, torch.log, 0.0, x).sum().backward()
    >>> x.grad
    tensor([0., 1.])
    >>> torch.where(x > 0, torch.log(x), 0.0).sum().backward()  # adds 0 · ∞ = NaN
    >>> x.grad
    tensor([nan, 2.])

    A branch is a function that works element by element, or a tensor or number to use as it is. Each function
    is called once, on inputs whose elements that belong to the other branch were replaced by ``fill``: one
    number, or one per input. Choose it where the function and its slope are finite: 0.5 suits log, sqrt, 1/x,
    acos and atanh; acosh wants 2.
    """
    fills = fill if isinstance(fill, tuple) else (fill,) * len(inputs)
    if len(fills) != len(inputs):
        raise UsageError(
            f"fill has {len(fills)} numbers for {len(inputs)} inputs", hint="give one number, or one per input"
        )
    if condition.dtype != torch.bool:
        raise UsageError(f"condition is {condition.dtype}", hint="compare, for example x > 0, or use .bool()")
    if not inputs and (callable(then) or callable(otherwise)):
        raise UsageError("select got a function and no input", hint="pass the tensors that it is called with")
    taken = [torch.where(condition, x, f) for x, f in zip(inputs, fills, strict=True)]
    untaken = [torch.where(condition, f, x) for x, f in zip(inputs, fills, strict=True)]
    return torch.where(
        condition,
        then(*taken) if callable(then) else then,
        otherwise(*untaken) if callable(otherwise) else otherwise,
    )

"""Masks as the operations take them: bool or integer, of any shape that broadcasts to the tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import UsageError


def keep_of(mask: Tensor | None, x: Tensor, name: str = "x") -> Tensor:
    """A bool tensor of ``x``'s shape: where the mask keeps. No mask keeps all.

    >>> keep_of(torch.tensor([1, 0]), torch.zeros(2, 2)).tolist()
    [[True, False], [True, False]]
    """
    if mask is None:
        return torch.ones_like(x, dtype=torch.bool)
    if mask.is_floating_point() or mask.is_complex():
        # 0.5 may be meant as a weight or as "keep": guessing would be silent.
        raise UsageError(
            f"mask is {mask.dtype}, and a mask is bool or integer",
            hint="pass mask.bool(), or weights= where the operation has it",
        )
    return expanded(mask.bool(), x, "mask", name)


def expanded(small: Tensor, x: Tensor, small_name: str, name: str) -> Tensor:
    """``small`` broadcast to ``x``'s shape."""
    last = x.shape[x.ndim - small.ndim :] if small.ndim <= x.ndim else None
    if last is None or any(a not in (1, b) for a, b in zip(small.shape, last, strict=True)):
        raise UsageError(
            f"{small_name} of shape {tuple(small.shape)} does not broadcast to {name} of shape {tuple(x.shape)}",
            hint=f"give {small_name} the shape of {name}, with 1 where it repeats",
        )
    return small.expand(x.shape)


def dims_of(dim: int | tuple[int, ...] | None, x: Tensor) -> tuple[int, ...]:
    """The dimensions to reduce; None is all of them."""
    if dim is None:
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def size_of(dims: tuple[int, ...], x: Tensor) -> int:
    """How many elements one reduction over ``dims`` takes in."""
    return math.prod([x.shape[dim] for dim in dims])

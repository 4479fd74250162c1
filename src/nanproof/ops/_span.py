"""Staying inside the span of a dtype: casts that saturate, and scaling that leaves the gradient alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def saturate(x: Tensor, finite: Tensor) -> Tensor:
    """Where ``finite`` says that the inputs were finite, an overflow becomes ±max; elsewhere it stays.

    >>> saturate(torch.tensor([torch.inf, torch.inf]), torch.tensor([True, False]))
    tensor([3.4028e+38,        inf])
    """
    limit = torch.finfo(x.dtype).max
    return torch.where(finite, x.clamp(-limit, limit), x)


def _fit(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= limit:
        return x.to(dtype)
    return torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype)


class _Cast(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return _fit(x, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.source = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _fit(grads[0], ctx.source), None


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast that saturates where the plain one overflows, in the backward pass too.

    >>> cast(torch.tensor([1e6, torch.inf]), torch.float16)
    tensor([65504.,    inf], dtype=torch.float16)
    """
    if x.dtype == dtype:
        return x
    result: Tensor = _Cast.apply(x, dtype)  # type: ignore[no-untyped-call]
    return result


class _PassThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def pass_through(x: Tensor, value: Tensor) -> Tensor:
    """``value`` in the forward pass, the gradient of ``x`` in the backward pass."""
    result: Tensor = _PassThrough.apply(x, value.detach())  # type: ignore[no-untyped-call]
    return result


def scaled(fn: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor) -> Tensor:
    """``fn(x)`` computed as ``scale * fn(x / scale)``, for a linear fn.

    The gradient of a linear fn does not depend on the scale. So the scale is applied to the values only: put
    into the backward pass, g·scale would overflow before the division by it could bring it back.
    """
    small = fn(pass_through(x, x / scale))
    return pass_through(small, saturate(small * scale, small.isfinite()))


def total(x: Tensor, dims: tuple[int, ...], size: int) -> Tensor:
    """The sum over ``dims``, kept as dimensions of one element; a sum of ``size`` numbers.

    >>> total(torch.full((3,), 3e38), (0,), 3)  # the partial sums overflow, the last step saturates
    tensor([3.4028e+38])
    """
    return (
        scaled(lambda u: u.sum(dims, keepdim=True), x, sum_scale(x, dims, size)) if size else x.sum(dims, keepdim=True)
    )


def sum_scale(x: Tensor, dims: tuple[int, ...], size: int) -> Tensor:
    """What to divide by so that ``size`` numbers can be added: 1, or a power of two where they are large."""
    limit = torch.finfo(x.dtype).max / size
    largest = x.detach().abs().amax(dims, keepdim=True)
    return torch.ones_like(largest).masked_fill(largest > limit, 2.0 ** math.ceil(math.log2(size)))


def total_to(x: Tensor, shape: torch.Size) -> Tensor:
    """The gradient ``x`` of a broadcast result, summed to the shape before broadcasting."""
    lead = x.ndim - len(shape)
    dims = tuple(d for d in range(x.ndim) if d < lead or (shape[d - lead] == 1 and x.shape[d] != 1))
    return total(x, dims, math.prod([x.shape[d] for d in dims])).reshape(shape) if dims else x


def drop_max(x: Tensor, dim: int) -> Tensor:
    """``x`` minus its maximum along ``dim``, at least −max; adding a constant changes no softmax.

    The difference of two finite numbers can overflow. It then saturates, and keeps its gradient.
    """
    top = x.detach().amax(dim, keepdim=True)
    shifted = x - top
    overflowed = shifted.isinf() & x.isfinite() & top.isfinite()
    lowest = torch.full_like(x, -torch.finfo(x.dtype).max)
    return torch.where(overflowed, pass_through(x, lowest), shifted)

"""`safe_norm`, `normalize`, `rms_norm`: squares are taken of numbers near 1, so none over- or underflows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._formats import numbers_of, positive_eps
from ._masks import dims_of, size_of
from ._span import cast, saturate


def _largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.detach().abs().amax(dims, keepdim=True)


def _apart(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """A scale, x / scale, and the norm of that, which is 1 or more; the norm of x is scale · norm.

    For the zero vector the three are 0, 0 and 1.
    """
    scale = _largest(x, dims)
    small = x / torch.where(scale > 0, scale, 1.0)
    squares = small.square().sum(dims, keepdim=True)
    return scale, small, torch.where(scale > 0, squares, 1.0).sqrt()


class _Norm(torch.autograd.Function):
    """Written out: through scale · norm the gradient g · scale could overflow, and g · x/‖x‖ cannot."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dims: tuple[int, ...]) -> Tensor:
        scale, _, norm = _apart(x, dims)
        return saturate(scale * norm, norm.isfinite())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.dims = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _, small, norm = _apart(ctx.saved_tensors[0], ctx.dims)
        return grads[0] * (small / norm), None


def safe_norm(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """The Euclidean norm; 0 with a gradient of zero for the zero vector.

    >>> x = torch.tensor([[3e38, 0.0], [3e-30, 4e-30], [0.0, 0.0]], requires_grad=True)
    >>> y = safe_norm(x, dim=-1)
    >>> y.detach()
    tensor([3.0000e+38, 5.0000e-30, 0.0000e+00])
    >>> y.sum().backward()
    >>> x.grad
    tensor([[1.0000, 0.0000],
            [0.6000, 0.8000],
            [0.0000, 0.0000]])

    A norm above the dtype's max saturates there; its gradient stays x/‖x‖.
    """
    numbers = numbers_of(x, "x")
    dims = dims_of(dim, x)
    wide = cast(x, numbers.wide)
    result: Tensor
    if size_of(dims, x):
        result = _Norm.apply(wide, dims)  # type: ignore[no-untyped-call]
    else:
        result = wide.sum(dims, keepdim=True)
    return cast(result, x.dtype) if keepdim else cast(result, x.dtype).squeeze(dims)


def normalize(x: Tensor, dim: int | tuple[int, ...] = -1, eps: float | None = None) -> Tensor:
    """x / max(‖x‖, eps): vectors of length 1; the zero vector stays 0, with a gradient of zero.

    >>> normalize(torch.tensor([[3e30, 4e30], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])

    By default eps is 2⁻⁶³ (float32, bfloat16), 2⁻⁵¹¹ (float64) or 2⁻¹⁵ (float16). A shorter vector is divided by
    eps instead of its length, so that the slope stays at 1/eps. Zero has no direction to move in, so it gets
    no gradient rather than that steepest one.
    """
    numbers = numbers_of(x, "x")
    eps = positive_eps(eps, 1 / numbers.steepest, numbers)
    dims = dims_of(dim, x)
    if not x.numel():
        return x.clone()
    wide = cast(x, numbers.wide)
    largest = _largest(wide, dims)
    wide = torch.where(largest == 0, 0.0, wide)
    scale = largest.clamp(min=eps)
    small = wide / scale
    squares = small.square().sum(dims, keepdim=True)
    # At scale = eps a sum of squares below 1 means ‖x‖ < eps; above it, the largest square is 1 by itself.
    short = squares < (eps / scale).square()
    return cast(small / torch.where(short, 1.0, squares).sqrt(), x.dtype)


def rms_norm(x: Tensor, dim: int | tuple[int, ...] = -1, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps), without a gain: write ``weight * rms_norm(x)``.

    >>> rms_norm(torch.tensor([[3e38, -3e38], [0.0, 0.0]]))
    tensor([[ 1., -1.],
            [ 0.,  0.]])

    eps is that of the format computed in: 2⁻²³ in general, 2⁻⁵² for float64.
    """
    numbers = numbers_of(x, "x")
    eps = positive_eps(eps, torch.finfo(numbers.wide).eps, numbers)
    dims = dims_of(dim, x)
    if not x.numel():
        return x.clone()
    wide = cast(x, numbers.wide)
    # At least √eps, so that neither x/scale nor eps/scale² exceeds 1. The result does not depend on it.
    scale = _largest(wide, dims).clamp(min=eps**0.5)
    small = wide / scale
    return cast(small * (small.square().mean(dims, keepdim=True) + (eps**0.5 / scale).square()).rsqrt(), x.dtype)

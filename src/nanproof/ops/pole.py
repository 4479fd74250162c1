"""`safe_div`, `safe_log`, `safe_sqrt`: the textbook up to a step before the pole, a straight line from there.

Each has an ``eps``: how near the pole the textbook still holds. By default it is the smallest power of two at
which the slope (for safe_div the value, 1/b) neither leaves the dtype nor overflows a norm once squared:

========  ====================  =========
dtype     safe_div, safe_log    safe_sqrt
========  ====================  =========
float64   2⁻⁵¹¹                 2⁻¹⁰²²
float32   2⁻⁶³                  2⁻¹²⁶
bfloat16  2⁻⁶³                  2⁻¹²⁶
float16   2⁻¹⁵                  2⁻³⁰
========  ====================  =========

For gentler slopes pass a larger one, such as ``eps_for(x.dtype)``; above all to safe_div, whose slope at the pole is
1/eps² and by default reaches the end of the dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ._formats import numbers_of, positive_eps
from ._span import cast, pass_through, saturate, total_to
from .branch import select


def safe_log(x: Tensor, eps: float | None = None) -> Tensor:
    """log(x); below ``eps``, the tangent of log at ``eps``.

    >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
    >>> y = safe_log(x, eps=1e-6)
    >>> y.detach()
    tensor([-14.8155,   0.0000])
    >>> y.sum().backward()
    >>> x.grad  # at most 1/eps
    tensor([1.0000e+06, 1.0000e+00])

    The tangent goes on through zero and below, so a wrong sign is still pushed back up: log(eps) − 1 at 0,
    ever lower from there, saturating at −max.
    """
    numbers = numbers_of(x, "x")
    eps = positive_eps(eps, 1 / numbers.steepest, numbers)
    wide = cast(x, numbers.wide)

    def tangent(v: Tensor) -> Tensor:
        rise = v / eps
        return pass_through(rise, saturate(rise, v.isfinite())) + (math.log(eps) - 1)

    return cast(select(wide >= eps, torch.log, tangent, wide), x.dtype)


def safe_sqrt(x: Tensor, eps: float | None = None) -> Tensor:
    """sqrt(x); below ``eps``, the straight line x/√eps, which meets it at ``eps`` and at 0.

    >>> x = torch.tensor([0.0, 4.0], requires_grad=True)
    >>> y = safe_sqrt(x, eps=1e-6)
    >>> y.detach()
    tensor([0., 2.])
    >>> y.sum().backward()
    >>> x.grad  # at most 1/√eps
    tensor([1.0000e+03, 2.5000e-01])

    The line goes on below zero: a variance of −1e-9 gives a small negative root and a gradient that lifts it.
    """
    numbers = numbers_of(x, "x")
    eps = positive_eps(eps, 1 / numbers.steepest**2, numbers)
    wide = cast(x, numbers.wide)
    slope = 1 / math.sqrt(eps)

    def line(v: Tensor) -> Tensor:
        rise = v * slope
        return pass_through(rise, saturate(rise, v.isfinite()))

    return cast(select(wide >= eps, torch.sqrt, line, wide), x.dtype)


class _Divide(torch.autograd.Function):
    """a/b with the tangent of 1/b below ``eps``.

    Written out, because where a/b² overflows a zero from upstream must still give 0, and 0 · ∞ is NaN. It
    broadcasts by itself for a like reason: the gradient of a broadcast b is a sum, which can overflow, too.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, eps: float) -> Tensor:
        near, safe_b, tangent = _tangent(b, eps)
        return saturate(torch.where(near, a * tangent, a / safe_b), a.isfinite() & b.isfinite())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, ctx.eps = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (g,) = grads
        a, b = ctx.saved_tensors
        near, safe_b, tangent = _tangent(b, ctx.eps)
        finite = g.isfinite() & a.isfinite() & b.isfinite()
        grad_a = saturate(torch.where(near, g * tangent, g / safe_b), finite)
        # Shrinking steps first: then an overflow on the way is one of the result.
        slope = torch.where(safe_b.abs() < 1, g / safe_b * a / safe_b, a / safe_b / safe_b * g)
        grad_b = saturate(-slope, finite)
        return total_to(grad_a, a.shape), total_to(grad_b, b.shape), None


def _tangent(b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Where b is near the pole, b with ±eps there, and the tangent of 1/b there."""
    near = b.abs() < eps
    edge = torch.full_like(b, eps).copysign(torch.where(b < 0, b, 1.0).detach())
    return near, torch.where(near, edge, b), (2 - torch.where(near, b, edge) / edge) / edge


def safe_div(a: Tensor, b: Tensor, eps: float | None = None) -> Tensor:
    """a/b; where |b| < ``eps``, a times the tangent of 1/b at ±eps.

    >>> a, b = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 4.0])
    >>> safe_div(a, b, eps=1e-3)
    tensor([0.0000e+00, 2.0000e+03, 2.5000e-01])

    So 0/0 is 0, and 1/0 is 2/eps: twice the value at eps, with the slope at eps, −1/eps². A zero counts as
    positive. The gradient of b saturates at ±max where a/b² leaves the dtype.
    """
    if a.dtype != b.dtype:
        raise UsageError(f"a is {a.dtype} and b is {b.dtype}", hint="convert one: a.to(b.dtype)")
    numbers = numbers_of(a, "a")
    eps = positive_eps(eps, 1 / numbers.steepest, numbers)
    wide_a, wide_b = cast(a, numbers.wide), cast(b, numbers.wide)
    return cast(_Divide.apply(wide_a, wide_b, eps), a.dtype)  # type: ignore[no-untyped-call]

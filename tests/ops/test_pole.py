from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanproof.errors import UsageError
from nanproof.ops import eps_for, safe_div, safe_log, safe_sqrt

torch.set_num_threads(1)
MAX = torch.finfo(torch.float32).max


def slope(y: Tensor, x: Tensor) -> list[float]:
    return torch.autograd.grad(y.sum(), x)[0].tolist()


def test_log_follows_its_tangent_below_eps() -> None:
    eps = 2.0**-10
    x = torch.tensor([eps, eps / 2, 0.0, -1.0, -MAX], requires_grad=True)
    y = safe_log(x, eps)
    top = math.log(eps)
    assert y.tolist() == pytest.approx([top, top - 0.5, top - 1, top - 1 - 1024, -MAX])
    assert slope(y, x) == [1024.0] * 5  # the saturated value, too, is still pushed up


def test_sqrt_is_a_line_below_eps() -> None:
    eps = 2.0**-10
    x = torch.tensor([eps, eps / 4, 0.0, -eps, -MAX], requires_grad=True)
    y = safe_sqrt(x, eps)
    assert y.tolist() == [2.0**-5, 2.0**-7, 0.0, -(2.0**-5), -MAX]
    assert slope(y, x) == [16.0, 32.0, 32.0, 32.0, 32.0]


def test_div_follows_the_tangent_of_its_inverse_below_eps() -> None:
    b = torch.tensor([0.25, 0.125, 0.0, -0.0, -0.125], requires_grad=True)
    y = safe_div(torch.ones(5), b, eps=0.25)
    assert y.tolist() == [4.0, 6.0, 8.0, 8.0, -6.0]
    assert slope(y, b) == [-16.0] * 5


def test_div_saturates_with_a_gradient() -> None:
    a = torch.tensor([MAX, -MAX], requires_grad=True)
    b = torch.tensor([0.5, 2.0**-40], requires_grad=True)
    y = safe_div(a, b)
    assert y.tolist() == [MAX, -MAX]
    assert slope(safe_div(a, b), a) == [2.0, 2.0**40]
    assert slope(y, b) == [-MAX, MAX]


def test_a_small_upstream_brings_a_steep_gradient_back_into_range() -> None:
    a = torch.tensor(MAX)
    b = torch.tensor(2.0**-3, requires_grad=True)
    (safe_div(a, b) * 2.0**-20).backward()
    assert b.grad is not None
    assert b.grad.item() == -MAX * 2.0**-14


def test_the_gradient_of_a_broadcast_divisor_is_a_sum_that_saturates() -> None:
    b = torch.zeros(1, 1, requires_grad=True)
    a = torch.full((3, 4), MAX, requires_grad=True)
    assert slope(safe_div(a, b), b) == [[-MAX]]
    b = torch.full((4,), 2.0, requires_grad=True)
    assert slope(safe_div(torch.ones(3, 4), b), b) == [-0.75] * 4
    scalar = torch.tensor(2.0, requires_grad=True)
    assert slope(safe_div(torch.ones(3), scalar), scalar) == -0.75


def test_zero_over_zero_is_zero() -> None:
    assert safe_div(torch.zeros(1), torch.zeros(1)).item() == 0.0


@pytest.mark.parametrize("fn", [safe_log, safe_sqrt])
def test_default_slopes_do_not_overflow_a_gradient_norm(fn: type[safe_log]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.zeros(3, dtype=dtype, requires_grad=True)
        fn(x).sum().backward()
        assert x.grad is not None
        assert (x.grad > 0).all()
        assert x.grad.norm(dtype=torch.promote_types(dtype, torch.float32)).isfinite()


def test_errors() -> None:
    with pytest.raises(UsageError, match=r"^eps is 0, and the computation in torch\.float32 needs at least 1\.2e-38\."):
        safe_log(torch.ones(1), eps=0)
    with pytest.raises(UsageError, match=r"^eps is 1e-40, .* Next: give a larger number, or leave it out"):
        safe_sqrt(torch.ones(1), eps=1e-40)
    with pytest.raises(UsageError, match=r"^a is torch\.float32 and b is torch\.float16\. Next: convert one"):
        safe_div(torch.ones(1), torch.ones(1).half())


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16"])
def test_eps_for_is_not_lost_beside_one_and_has_a_finite_slope(name: str) -> None:
    dtype = getattr(torch, name)
    eps = torch.tensor(eps_for(dtype), dtype=dtype)
    assert 1 + eps > 1
    assert (1 / eps / eps).isfinite()
    assert eps_for(name) == eps_for(dtype)


def test_eps_for_refuses_integers() -> None:
    with pytest.raises(UsageError, match=r"^torch\.int64 is not a floating-point format\. Next: use one of float64"):
        eps_for(torch.int64)

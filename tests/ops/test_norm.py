from __future__ import annotations

import pytest
import torch

from nanproof.ops import normalize, rms_norm, safe_norm

torch.set_num_threads(1)
FORMATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_whole_span_is_scaled_without_loss(dtype: torch.dtype) -> None:
    """(3, 4, 0) times any power of two that fits has a norm of 5 times it, and the same direction and gradient."""
    top, bottom = {torch.float64: (1021, -1020), torch.float16: (13, -14)}.get(dtype, (125, -124))
    for power in {top, bottom, 0}:
        x = (torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64) * 2.0**power / 4).to(dtype).requires_grad_()
        norm = safe_norm(x)
        norm.backward()
        assert norm.item() == 5 * 2.0**power / 4
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.tensor([0.6, 0.8, 0.0], dtype=dtype))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_norm_beyond_max_saturates_with_its_gradient(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    x = torch.full((4,), most, dtype=dtype, requires_grad=True)
    norm = safe_norm(x)
    norm.backward(torch.tensor(5.0, dtype=dtype))
    assert norm.item() == most
    assert x.grad is not None
    assert x.grad.tolist() == [2.5] * 4


def test_zero_has_no_direction_and_no_gradient() -> None:
    for fn in (safe_norm, normalize):
        x = torch.zeros(2, 3, requires_grad=True)
        y = fn(x, -1)
        y.sum().backward()
        assert not y.any()
        assert x.grad is not None
        assert not x.grad.any()


def test_normalize_divides_by_eps_below_it() -> None:
    x = torch.tensor([[0.03, 0.04], [0.3, 0.4]], requires_grad=True)
    y = normalize(x, eps=0.1)
    torch.testing.assert_close(y.detach(), torch.tensor([[0.3, 0.4], [0.6, 0.8]]))
    (grad,) = torch.autograd.grad(y[:, 0].sum(), x)
    torch.testing.assert_close(grad, torch.tensor([[10.0, 0.0], [1.28, -0.96]]))


def test_a_single_number_has_a_direction_that_does_not_change() -> None:
    x = torch.tensor([[-3.0, 0.0]], requires_grad=True)
    y = normalize(x)
    (grad,) = torch.autograd.grad(y[0, 0], x)
    assert y.tolist() == [[-1.0, 0.0]]
    assert grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e30])
def test_rms_norm_is_that_of_torch(scale: float) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    expected = torch.nn.functional.rms_norm(x, (8,), eps=2.0**-23)
    torch.testing.assert_close(rms_norm(x.float()), expected.float(), rtol=1e-5, atol=0)


def test_dims_and_nothing() -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(safe_norm(x, (0, 2), keepdim=True), x.norm(dim=(0, 2), keepdim=True))
    torch.testing.assert_close(safe_norm(x), x.norm())
    torch.testing.assert_close(normalize(x, 1), torch.nn.functional.normalize(x, dim=1))
    torch.testing.assert_close(rms_norm(x, (1, 2)), torch.nn.functional.rms_norm(x, (3, 4)))
    assert safe_norm(torch.empty(2, 0), -1).tolist() == [0.0, 0.0]
    assert normalize(torch.empty(2, 0)).shape == rms_norm(torch.empty(2, 0)).shape == (2, 0)
    assert safe_norm(torch.tensor(-2.0)).item() == 2.0

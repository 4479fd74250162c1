from __future__ import annotations

import pytest
import torch

from nanproof.errors import UsageError
from nanproof.ops import masked_mean

torch.set_num_threads(1)
MAX = torch.finfo(torch.float32).max


def test_empty_rows_are_zero_with_zero_gradient_beside_full_ones() -> None:
    x = torch.tensor([[1.0, torch.nan], [3.0, torch.inf], [5.0, 7.0]], requires_grad=True)
    out = masked_mean(x, torch.tensor([[1, 0], [0, 0], [1, 1]]), dim=1)
    out.sum().backward()
    assert out.tolist() == [1.0, 0.0, 6.0]
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 0.0], [0.0, 0.0], [0.5, 0.5]]


def test_the_mean_of_large_numbers_is_exact_and_keeps_its_gradient() -> None:
    x = torch.full((3,), MAX, requires_grad=True)
    out = masked_mean(x)
    out.backward()
    assert out.item() == pytest.approx(MAX, rel=1e-6)
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("dim", [None, 0, -1, (0, 2)])
@pytest.mark.parametrize("keepdim", [True, False])
def test_dims_like_torch(dim: int | tuple[int, ...] | None, keepdim: bool) -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = (
        x.mean()
        if dim is None and not keepdim
        else x.mean(dim=dim or (0, 1, 2) if dim is None else dim, keepdim=keepdim)
    )
    torch.testing.assert_close(masked_mean(x, dim=dim, keepdim=keepdim), expected)


def test_a_mask_broadcasts_and_a_scalar_and_nothing_have_a_mean() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert masked_mean(x, torch.tensor([[True], [False]])).item() == 1.0
    assert masked_mean(x, torch.tensor([False, True, True])).item() == 3.0
    assert masked_mean(torch.tensor(4.0), torch.tensor(True)).item() == 4.0
    assert masked_mean(torch.empty(0)).item() == 0.0
    assert masked_mean(torch.empty(2, 0), dim=1, weights=torch.empty(0)).tolist() == [0.0, 0.0]


def test_weights() -> None:
    x = torch.tensor([1.0, torch.nan, 4.0], requires_grad=True)
    out = masked_mean(x, weights=torch.tensor([1e-45, 0.0, 1e-45]))
    out.backward()
    assert out.item() == 2.5
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0.0, 0.5]
    assert masked_mean(torch.ones(2), weights=torch.full((2,), MAX)).item() == 1.0
    assert masked_mean(torch.ones(2), weights=torch.zeros(2)).item() == 0.0
    assert masked_mean(torch.tensor([1.0, 5.0]), weights=torch.tensor([3, 1])).item() == 2.0
    assert masked_mean(torch.ones(2), weights=torch.tensor([torch.nan, 1.0])).isnan()


def test_errors() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(UsageError, match=r"^mask keeps nothing in 1 of 2 means\. Next: leave such batches out"):
        masked_mean(x, torch.tensor([[True], [False]]), dim=1, on_empty="raise")
    assert masked_mean(x, dim=1, on_empty="raise").tolist() == [1.0, 1.0]
    with pytest.raises(
        UsageError, match=r"^mask is torch\.float32, and a mask is bool or integer\. Next: pass mask\.bool"
    ):
        masked_mean(x, torch.ones(2, 3))
    with pytest.raises(
        UsageError, match=r"^mask of shape \(2,\) does not broadcast to x of shape \(2, 3\)\. Next: give"
    ):
        masked_mean(x, torch.ones(2, dtype=torch.bool))
    with pytest.raises(UsageError, match=r"^x is torch\.int64, and this operation takes .*Next: .*x\.float\(\)"):
        masked_mean(torch.ones(2, dtype=torch.long))
    with pytest.raises(UsageError, match=r"^weights require a gradient.*Next: pass weights\.detach\(\)"):
        masked_mean(x, weights=torch.ones(3, requires_grad=True))
    with pytest.raises(UsageError, match=r"^on_empty is 'nan'\. Next: use"):
        masked_mean(x, on_empty="nan")  # type: ignore[arg-type]

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nanproof.errors import UsageError
from nanproof.ops import masked_cross_entropy, masked_softmax, normalized_mse

torch.set_num_threads(1)
MAX = torch.finfo(torch.float32).max


def test_softmax_masks_nan_and_broadcasts() -> None:
    x = torch.tensor([[1.0, torch.nan, 2.0], [3.0, torch.inf, 3.0]], requires_grad=True)
    p = masked_softmax(x, torch.tensor([1, 0, 1]))
    torch.testing.assert_close(p.detach()[:, [0, 2]], x.detach()[:, [0, 2]].softmax(-1))
    (grad,) = torch.autograd.grad(p[:, 0].sum(), x)
    assert grad.isfinite().all()
    assert grad[:, 1].tolist() == [0.0, 0.0]
    assert grad[:, 0].all()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_softmax_makes_no_nan_inside_that_anomaly_mode_would_stop_at() -> None:
    x = torch.tensor([[-MAX, 0.0]], requires_grad=True)
    with torch.autograd.detect_anomaly():
        masked_softmax(x, torch.tensor([True, False])).sum().backward()


def test_softmax_of_very_negative_rows_and_of_minus_inf() -> None:
    x = torch.tensor([[-MAX, -MAX, MAX], [-torch.inf, 0.0, 0.0]])
    assert masked_softmax(x, torch.tensor([True, True, False])).tolist() == [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]
    assert masked_softmax(x, dim=0)[:, 1].tolist() == [0.0, 1.0]


def test_cross_entropy_is_that_of_torch() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 5, 3, generator=rng), torch.randint(0, 5, (4, 3), generator=rng)
    y[0, 0] = y[2, 1] = -100
    torch.testing.assert_close(masked_cross_entropy(x, y, dim=1), F.cross_entropy(x, y))
    torch.testing.assert_close(
        masked_cross_entropy(x, y, dim=1, reduction="sum"), F.cross_entropy(x, y, reduction="sum")
    )
    class_weights = torch.rand(5, generator=rng)
    weighed = masked_cross_entropy(x, y, dim=1, weights=class_weights[y.clamp(min=0)])
    torch.testing.assert_close(weighed, F.cross_entropy(x, y, class_weights))
    mask = torch.tensor([[1], [0], [1], [1]])
    torch.testing.assert_close(masked_cross_entropy(x, y, mask, dim=1), F.cross_entropy(x[[0, 2, 3]], y[[0, 2, 3]]))


def test_cross_entropy_over_nothing_is_zero_with_zero_gradient() -> None:
    x = torch.full((2, 3), torch.nan, requires_grad=True)
    loss = masked_cross_entropy(x, torch.tensor([-100, -100]))
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_cross_entropy_saturates_with_the_gradient_of_the_formula(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    x = torch.tensor([[most, -most]], dtype=dtype, requires_grad=True)
    for reduction in ("mean", "sum", "none"):
        loss = masked_cross_entropy(x, torch.tensor([1]), reduction=reduction)  # type: ignore[arg-type]
        assert loss.item() == most
        assert torch.autograd.grad(loss.sum(), x)[0].tolist() == [[1.0, -1.0]]
    two = masked_cross_entropy(x.expand(2, 2), torch.tensor([1, 1]), reduction="sum")
    assert two.item() == most
    assert torch.autograd.grad(two, x)[0].tolist() == [[2.0, -2.0]]


def test_cross_entropy_lets_minus_inf_rule_out_a_class() -> None:
    x = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    loss = masked_cross_entropy(x, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(0.693147)
    assert x.grad is not None
    assert x.grad.tolist() == [[-0.5, 0.5, 0.0]]
    assert masked_cross_entropy(x, torch.tensor([2])).isinf()


def test_normalized_mse_does_not_depend_on_scale_or_offset() -> None:
    rng = torch.Generator().manual_seed(0)
    t, noise = torch.randn(100, generator=rng), torch.randn(100, generator=rng)
    plain = normalized_mse(t + 0.1 * noise, t)
    torch.testing.assert_close(plain, (0.1 * noise).square().mean() / t.var(correction=0), rtol=1e-4, atol=0)
    torch.testing.assert_close(normalized_mse(1e30 * (t + 0.1 * noise), 1e30 * t), plain, rtol=1e-3, atol=0)
    assert normalized_mse(t.mean().expand(100), t).item() == pytest.approx(1, rel=1e-5)


def test_normalized_mse_masks_nan_and_has_a_zero_for_nothing() -> None:
    p = torch.tensor([1.0, torch.nan, 4.0], requires_grad=True)
    t = torch.tensor([1.0, torch.inf, 2.0], requires_grad=True)
    loss = normalized_mse(p, t, torch.tensor([1, 0, 1]), eps=0.75)
    loss.backward()
    assert loss.item() == pytest.approx(2.0)  # mean(0, 4) over a variance of 0.25 + 0.75
    assert p.grad is not None
    assert t.grad is not None
    assert p.grad.tolist() == pytest.approx([0.0, 0.0, 2.0])
    assert t.grad.tolist() == pytest.approx([0.0, 0.0, -2.0])
    p.grad = None
    empty = normalized_mse(p, t, torch.zeros(3, dtype=torch.bool))
    empty.backward()
    assert empty.item() == 0.0
    assert p.grad is not None
    assert p.grad.tolist() == [0.0] * 3


def test_normalized_mse_gradient_survives_a_saturated_value() -> None:
    p = torch.tensor([1e33, -1e33], requires_grad=True)
    loss = normalized_mse(p, torch.zeros(2))
    (grad,) = torch.autograd.grad(loss * 2.0**-20, p)  # 2⁻²⁰ brings p/eps back into the dtype
    assert loss.item() == MAX
    torch.testing.assert_close(grad, torch.tensor([1.0, -1.0]) * 1e33 * 2.0**3)


def test_errors() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(
        UsageError, match=r"^target has shape \(3,\), and logits without dim -1 have \(2,\)\. Next: say"
    ):
        masked_cross_entropy(x, torch.zeros(3, dtype=torch.long))
    with pytest.raises(
        UsageError, match=r"^target is torch\.float32, and holds class numbers\. Next: pass target\.long"
    ):
        masked_cross_entropy(x, torch.zeros(2))
    with pytest.raises(UsageError, match=r"^reduction is 'max'\. Next: use"):
        masked_cross_entropy(x, torch.tensor([0, 1]), reduction="max")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r'^weights need reduction="mean", not "sum"\. Next: multiply'):
        masked_cross_entropy(x, torch.tensor([0, 1]), weights=torch.ones(2), reduction="sum")
    with pytest.raises(UsageError, match=r"^mask of shape \(3,\) does not broadcast to target of shape \(2,\)"):
        masked_cross_entropy(x, torch.tensor([0, 1]), torch.ones(3, dtype=torch.bool))
    with pytest.raises(
        UsageError, match=r"^pred is torch\.float32 \(2, 3\) and target is torch\.float32 \(3,\)\. Next: give"
    ):
        normalized_mse(x, torch.zeros(3))

from __future__ import annotations

import pytest
import torch

from nanproof.errors import UsageError
from nanproof.ops import log_sinkhorn, sinkhorn

torch.set_num_threads(1)


def test_rows_and_columns_sum_to_one() -> None:
    p = sinkhorn(torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0)), iterations=100)
    torch.testing.assert_close(p.sum(-1), torch.ones(5, 4))
    torch.testing.assert_close(p.sum(-2), torch.ones(5, 4))


def test_rows_sum_to_one_after_a_single_iteration() -> None:
    p = sinkhorn(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) * 5, iterations=1)
    torch.testing.assert_close(p.sum(-1), torch.ones(4))


@pytest.mark.parametrize(("dtype", "big"), [(torch.float32, 1e30), (torch.float16, 65504.0), (torch.float32, 3e38)])
def test_huge_logits_pick_the_permutation(dtype: torch.dtype, big: float) -> None:
    logits = torch.tensor([[-big, big], [big, -big]], dtype=dtype, requires_grad=True)
    p = sinkhorn(logits)
    p.sum().backward()
    assert p.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert log_sinkhorn(logits).isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_errors() -> None:
    with pytest.raises(
        UsageError, match=r"^logits have shape \(2, 3\), and Sinkhorn takes square matrices\. Next: put"
    ):
        sinkhorn(torch.zeros(2, 3))
    with pytest.raises(UsageError, match=r"^iterations is 0\. Next: give at least 1"):
        log_sinkhorn(torch.zeros(2, 2), iterations=0)
    assert sinkhorn(torch.empty(0, 3, 3)).shape == (0, 3, 3)

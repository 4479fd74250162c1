from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanproof import ops
from nanproof.errors import NonFiniteError, UsageError
from nanproof.testing import assert_stable

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_safe_operations_pass(dtype: torch.dtype) -> None:
    x = torch.ones(3, 4, dtype=dtype)
    for op in (ops.safe_log, ops.safe_sqrt, ops.safe_norm, ops.normalize, ops.rms_norm, ops.masked_softmax):
        assert_stable(op, x)
    assert_stable(ops.safe_div, (x, x))
    assert_stable(ops.normalized_mse, (x, x))


def test_names_the_edge_and_the_forward_pass() -> None:
    with pytest.raises(NonFiniteError) as caught:
        assert_stable(torch.log, torch.ones(2))
    assert str(caught.value) == (
        "log breaks at 9 of 14 edge inputs (float32), first where input 0 is 0: forward has 2 -Inf of 2 values, "
        "first at [0] (float32). Next: replace the operation that breaks; nanproof.ops has safe ones"
    )


def test_names_the_gradient_that_broke() -> None:
    with pytest.raises(NonFiniteError, match=r"input 0 is 0\.0: gradient of input 0 has 2 \+Inf of 2 values"):
        assert_stable(torch.sqrt, torch.ones(2), edges=[0.0])


def test_pairs_of_inputs_are_tried() -> None:
    def ratio(a: Tensor, b: Tensor) -> Tensor:
        return a / (b.abs() + 1)  # fine with either alone at an edge, when the other is 1

    def product(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    assert_stable(ratio, (torch.ones(1), torch.ones(1)))
    with pytest.raises(NonFiniteError, match=r"input 0 is max/2 and input 1 is max/2: forward has 1 \+Inf"):
        assert_stable(product, (torch.ones(1), torch.ones(1)))


def test_edges_side_by_side_are_tried() -> None:
    def spread(x: Tensor) -> Tensor:
        return x.max() - x.min()

    with pytest.raises(
        NonFiniteError, match=r"breaks at 1 of 14 .*input 0 is all edges side by side: forward has 1 \+Inf"
    ):
        assert_stable(spread, torch.ones(4))


def test_parameters_of_a_module_are_looked_at() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x.detach().sign() * self.scale.sqrt()

    with pytest.raises(NonFiniteError, match=r"^Scaled breaks .*gradient of parameter scale has 1 \+Inf"):
        assert_stable(Scaled(), torch.ones(1), edges=[1.0])


def test_integer_inputs_stay_and_outputs_may_nest() -> None:
    def loss(x: Tensor, y: Tensor) -> dict[str, list[Tensor]]:
        return {"loss": [F.cross_entropy(x, y)]}

    assert_stable(loss, (torch.ones(2, 3), torch.tensor([0, 2])), edges=[0.0, 1.0, 1e30])


def test_an_exception_says_at_which_edge() -> None:
    def picky(x: Tensor) -> Tensor:
        if (x == 0).all():
            raise RuntimeError("no")
        return x

    with pytest.raises(RuntimeError) as caught:
        assert_stable(picky, torch.ones(1))
    assert caught.value.__notes__ == ["raised by assert_stable(picky) where input 0 is 0"]


def test_usage_errors() -> None:
    with pytest.raises(UsageError, match=r"inputs hold no floating-point tensor\. Next: pass at least one"):
        assert_stable(torch.log, torch.ones(1, dtype=torch.long))
    with pytest.raises(UsageError, match=r"edges is empty\. Next: give at least one"):
        assert_stable(torch.log, torch.ones(1), edges=[])
    with pytest.raises(UsageError, match=r"the function gave a NoneType\. Next: let it return tensors"):
        assert_stable(lambda x: None, torch.ones(1))

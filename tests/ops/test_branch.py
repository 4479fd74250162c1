from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanproof.errors import UsageError
from nanproof.ops import select

torch.set_num_threads(1)


def test_each_branch_sees_only_its_own_elements() -> None:
    seen: dict[str, list[float]] = {}

    def note(name: str) -> object:
        def branch(v: Tensor) -> Tensor:
            seen[name] = v.tolist()
            return v * 2

        return branch

    x = torch.tensor([-1.0, torch.nan, 3.0])
    out = select(x > 0, note("then"), note("otherwise"), x, fill=7.0)  # type: ignore[arg-type]
    assert seen["then"] == [7.0, 7.0, 3.0]
    assert seen["otherwise"][0] == -1.0
    assert seen["otherwise"][2] == 7.0
    assert out[[0, 2]].tolist() == [-2.0, 6.0]


def test_gradient_of_the_untaken_branch_is_zero() -> None:
    x = torch.tensor([-torch.inf, -1.0, 0.0, 4.0], requires_grad=True)
    select(x > 0, torch.sqrt, 0.0, x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 0.25]


def test_several_inputs_with_a_fill_each_and_a_tensor_as_a_branch() -> None:
    a, b = torch.tensor([1.0, 1.0], requires_grad=True), torch.tensor([0.0, 2.0], requires_grad=True)
    out = select(b != 0, torch.div, torch.full((2,), 9.0), a, b, fill=(0.0, 1.0))
    out.sum().backward()
    assert out.tolist() == [9.0, 0.5]
    assert b.grad is not None
    assert b.grad.tolist() == [0.0, -0.25]


def test_errors() -> None:
    x = torch.ones(2)
    with pytest.raises(UsageError, match=r"^fill has 2 numbers for 1 inputs\. Next: give one number, or one per input"):
        select(x > 0, torch.log, 0.0, x, fill=(1.0, 1.0))
    with pytest.raises(UsageError, match=r"^condition is torch\.float32\. Next: compare"):
        select(x, torch.log, 0.0, x)
    with pytest.raises(UsageError, match=r"^select got a function and no input\. Next: pass the tensors"):
        select(x > 0, torch.log, 0.0)

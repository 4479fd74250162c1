from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from torch import nn

from nanproof.errors import NonFiniteError, UsageError
from nanproof.testing import assert_finite

torch.set_num_threads(1)


def test_counts_kinds_and_names_the_first_index() -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    x[0, 2], x[1, 0], x[1, 1] = torch.inf, torch.nan, -torch.inf
    with pytest.raises(NonFiniteError) as caught:
        assert_finite(x)
    assert str(caught.value) == "tensor: 1 NaN, 1 +Inf, 1 -Inf of 6 values, first at [0, 2] (bfloat16)"


def test_module_parameters_buffers_and_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert_finite(model)
    model[0].weight.grad = torch.full((3, 2), torch.nan)
    with pytest.raises(NonFiniteError, match=r"^grad of 0\.weight: 6 NaN of 6 values, first at \[0, 0\]"):
        assert_finite(model)
    model[1].running_var[1] = torch.inf
    with pytest.raises(NonFiniteError, match=r"^net\.1\.running_var: 1 \+Inf of 3 values, first at \[1\]"):
        assert_finite(model, "net")


def test_optimizer_state() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([p])
    p.sum().backward()
    optimizer.step()
    assert_finite(optimizer)
    optimizer.state[p]["exp_avg_sq"][2] = -torch.inf
    place = r"state of optimizer\.param_groups\[0\]\['params'\]\[0\]\['exp_avg_sq'\]: 1 -Inf of 3 values"
    with pytest.raises(NonFiniteError, match=place):
        assert_finite(optimizer)


def test_nests_numbers_and_arrays() -> None:
    Point = collections.namedtuple("Point", "x y")
    fine = {"a": [torch.ones(1), (1.0, 2, None, "text", True)], "b": Point(np.ones(2), np.float32(1))}
    assert_finite(fine)
    with pytest.raises(NonFiniteError, match=r"^\['a'\]\[1\]\[0\]: 1 NaN"):
        assert_finite({"a": [torch.ones(1), (float("nan"),)]})
    with pytest.raises(NonFiniteError, match=r"^\['b'\]\[0\]: 1 \+Inf of 2 values, first at \[1\]"):
        assert_finite({"b": Point(np.array([0.0, np.inf]), 0)})


@pytest.mark.parametrize(
    ("name", "code", "kind"),
    [
        ("float8_e4m3fn", 0x7F, "NaN"),
        ("float8_e4m3fn", 0x7E, None),
        ("float8_e4m3fnuz", 0x80, "NaN"),
        ("float8_e5m2", 0x7C, "+Inf"),
        ("float8_e5m2", 0xFC, "-Inf"),
        ("float8_e5m2fnuz", 0x80, "NaN"),
        ("float8_e8m0fnu", 0xFF, "NaN"),
        ("float8_e8m0fnu", 0xFE, None),
    ],
)
def test_eight_bit_formats_by_code(name: str, code: int, kind: str | None) -> None:
    x = torch.tensor([[0x01, code]], dtype=torch.uint8).view(getattr(torch, name))
    if kind is None:
        assert_finite(x)
        return
    with pytest.raises(NonFiniteError) as caught:
        assert_finite(x)
    assert str(caught.value) == f"tensor: 1 {kind} of 2 values, first at [0, 1] ({name})"


def test_complex_sparse_and_integer_tensors() -> None:
    assert_finite(torch.ones(2, dtype=torch.int64))
    with pytest.raises(NonFiniteError, match=r"1 NaN of 2 values, first at \[1\] \(complex64\)"):
        assert_finite(torch.tensor([1j, complex(0, float("nan"))]))
    with pytest.raises(NonFiniteError, match=r"1 \+Inf of 4 values, first at \[1, 0\]"):
        assert_finite(torch.tensor([[0.0, 1.0], [torch.inf, 0.0]]).to_sparse())


def test_what_cannot_be_read_is_not_called_finite() -> None:
    with pytest.raises(UsageError, match=r"\['x'\] is a object, which cannot be looked into\. Next: pass its tensors"):
        assert_finite({"x": object()})
    with pytest.raises(UsageError, match=r"weight is on the meta device and has no values\. Next: load"):
        assert_finite(nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"weight has no values yet\. Next: run one forward"):
        assert_finite(nn.LazyLinear(2))

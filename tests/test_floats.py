"""The table of formats, over every code of the 8- and 16-bit ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nanproof.errors import UsageError
from nanproof.floats import FORMATS, Format, find_format, format_of

SMALL = [f for f in FORMATS if f.bits in (8, 16)]
# torch's conversion to float32 is right for all of these; its isfinite is not (see below)
IN_TORCH = [f for f in SMALL if hasattr(torch, f.name)]


def every_code(f: Format) -> np.ndarray:
    return np.arange(1 << f.bits).astype(f.storage)


def torch_values(f: Format) -> np.ndarray:
    signed = torch.from_numpy(every_code(f).view(f"i{f.bits // 8}").copy())
    return signed.view(getattr(torch, f.name)).to(torch.float64).numpy()


@pytest.mark.parametrize("f", IN_TORCH, ids=lambda f: f.name)
def test_every_code_decodes_as_torch_converts_it(f: Format) -> None:
    np.testing.assert_array_equal(f.decode(every_code(f)), torch_values(f))


@pytest.mark.parametrize("f", IN_TORCH, ids=lambda f: f.name)
def test_every_code_is_classified(f: Format) -> None:
    codes, values = every_code(f), torch_values(f)
    np.testing.assert_array_equal(f.is_nan(codes), np.isnan(values))
    np.testing.assert_array_equal(f.is_inf(codes), np.isinf(values))


def test_all_formats_but_fp4_are_compared_with_torch() -> None:
    assert {f.name for f in IN_TORCH} == {f.name for f in FORMATS if f.bits in (8, 16)}


def test_where_torch_is_wrong_the_definition_counts() -> None:
    e8m0 = format_of("float8_e8m0fnu")
    nan = torch.tensor([0xFF], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.isfinite(nan).item(), "torch is right now: drop this test and the remark in floats.py"
    assert e8m0.is_nan(np.array([0xFF], np.uint8))[0]


@pytest.mark.parametrize("f", [f for f in FORMATS if f.bits >= 16], ids=lambda f: f.name)
def test_limits_agree_with_torch(f: Format) -> None:
    info = torch.finfo(getattr(torch, f.name))
    assert (f.max, f.smallest_normal, f.machine_eps) == (info.max, info.tiny, info.eps)
    one = torch.tensor(f.smallest_subnormal, dtype=getattr(torch, f.name))
    assert one.double().item() == f.smallest_subnormal
    assert (one / 2).item() in (0.0, f.smallest_subnormal)


@pytest.mark.parametrize("f", SMALL, ids=lambda f: f.name)
def test_limits_follow_from_all_codes(f: Format) -> None:
    values = f.decode(every_code(f))
    finite = values[np.isfinite(values)]
    assert f.max == finite.max()
    assert f.smallest_subnormal == finite[finite > 0].min()


def test_fp4_has_sixteen_numbers_and_no_nan() -> None:
    f = format_of("fp4")
    codes = np.arange(16, dtype=np.uint8)
    assert f.decode(codes).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert not f.is_nan(codes).any()
    assert not f.is_inf(codes).any()


@pytest.mark.parametrize("f", [f for f in FORMATS if f.first_nonfinite], ids=lambda f: f.name)
def test_two_integer_maxima_find_every_nonfinite_code(f: Format) -> None:
    assert f.first_nonfinite is not None
    positive, negative = f.first_nonfinite
    if f.bits <= 16:
        codes = every_code(f)
    else:  # around every boundary of the wide formats
        edges = np.array([0, positive, f.sign_bit, negative, (1 << f.bits) - 1], dtype=object)
        near = {int(e) + d for e in edges for d in range(-3, 4)}
        codes = np.array(sorted(n for n in near if 0 <= n < 1 << f.bits), dtype=f.storage)
    found = ((codes < f.sign_bit) & (codes >= positive)) | (codes >= negative)
    np.testing.assert_array_equal(found, f.is_nan(codes) | f.is_inf(codes))


@pytest.mark.parametrize("f", FORMATS, ids=lambda f: f.name)
def test_safe_eps_survives_division_and_stands_beside_one(f: Format) -> None:
    assert 1 / f.safe_eps**2 <= f.max
    assert f.safe_eps >= f.machine_eps
    if f.bits >= 16:
        eps = torch.tensor(f.safe_eps, dtype=getattr(torch, f.name))
        assert torch.isfinite(1 / eps**2)
        assert 1 + eps > 1


def test_exp_limit_is_where_exp_overflows() -> None:
    for name in ("float16", "bfloat16", "float32"):
        f, dtype = format_of(name), getattr(torch, name)
        below, above = f.exp_limit * 0.99, f.exp_limit * 1.01
        assert torch.isfinite(torch.exp(torch.tensor(below, dtype=torch.float64)).to(dtype))
        assert torch.isinf(torch.exp(torch.tensor(above, dtype=dtype)))


def test_names_of_torch_numpy_safetensors_and_people() -> None:
    for name in (torch.bfloat16, "torch.bfloat16", "BF16", "bfloat16"):
        assert format_of(name).name == "bfloat16"
    assert format_of(np.dtype("float32")).name == "float32"
    assert format_of(np.float16).name == "float16"
    assert format_of("F8_E4M3").name == "float8_e4m3fn"
    assert find_format("int64") is None
    with pytest.raises(UsageError, match=r"int64 is not a floating-point format\. Next: use one of float64"):
        format_of("int64")
    assert math.isclose(format_of("fp16").exp_limit, 11.0898, rel_tol=1e-4)

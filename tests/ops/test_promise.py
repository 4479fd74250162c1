"""The promise of `nanproof.ops`, one row of CASES per operation and one test per clause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanproof import ops
from nanproof.floats import format_of

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KEEP = torch.tensor([[True, True, False, True], [False, False, False, False], [True, False, True, True]])
TARGET = torch.tensor([0, -100, 3])
SLOPE = {torch.float64: 2.0**511, torch.float32: 2.0**63, torch.bfloat16: 2.0**63, torch.float16: 2.0**15}


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operation, the textbook in float64, and where (as a bool tensor) the two must agree."""

    name: str
    op: Callable[..., Tensor]
    textbook: Callable[..., Tensor]
    inputs: int = 1
    shape: tuple[int, ...] = (3, 4)
    where: Callable[..., Tensor | bool] = lambda *_: True
    # What an error of one rounding is measured against: cancellation makes more of it than the result.
    measure: Callable[..., Tensor] = lambda result, *_: result.abs()
    roundings: int = 16
    squares: bool = False


def _softmax(x: Tensor) -> Tensor:
    powers = torch.where(KEEP, (x - torch.where(KEEP, x, -torch.inf).amax(-1, keepdim=True)).exp(), 0.0)
    return torch.where(KEEP.any(-1, keepdim=True), powers / powers.sum(-1, keepdim=True), 0.0)


def _mean(x: Tensor) -> Tensor:
    return torch.where(KEEP, x, 0.0).sum(-1) / KEEP.sum(-1).clamp(min=1)


def _weighted(x: Tensor) -> Tensor:
    w = torch.tensor([1.0, 0.0, 2.0, 4.0], dtype=x.dtype)
    return (x * w).sum(-1) / w.sum()


def _std(t: Tensor) -> Tensor:
    return (t.detach()[KEEP.expand(t.shape)].var(correction=0) + 2.0**-23).sqrt()


def _nmse(p: Tensor, t: Tensor) -> Tensor:
    return (p - t)[KEEP.expand(p.shape)].square().mean() / _std(t).square()


def _rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 2.0**-23).sqrt()


def _sinkhorn(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x - x.logsumexp(-2, keepdim=True)
        x = x - x.logsumexp(-1, keepdim=True)
    return x


CASES = [
    Case(
        name="masked_mean",
        op=partial(ops.masked_mean, mask=KEEP, dim=-1),
        textbook=_mean,
        measure=lambda r, x: _mean(x.abs()),
    ),
    Case(
        name="weighted_mean",
        op=lambda x: ops.masked_mean(x, weights=torch.tensor([1.0, 0.0, 2.0, 4.0]), dim=-1),
        textbook=_weighted,
        measure=lambda r, x: _weighted(x.abs()),
    ),
    Case(
        name="safe_div",
        op=ops.safe_div,
        textbook=torch.div,
        inputs=2,
        where=lambda a, b: b.abs() >= 1 / SLOPE[b.dtype],
    ),
    Case(name="safe_log", op=ops.safe_log, textbook=torch.log, where=lambda x: x >= 1 / SLOPE[x.dtype]),
    Case(
        name="safe_sqrt",
        op=ops.safe_sqrt,
        textbook=torch.sqrt,
        where=lambda x: (x >= 1 / SLOPE[x.dtype] ** 2) | (x == 0),
    ),
    Case(name="safe_norm", op=partial(ops.safe_norm, dim=-1), textbook=lambda x: x.norm(dim=-1), squares=True),
    Case(
        name="normalize",
        op=ops.normalize,
        textbook=lambda x: x / x.norm(dim=-1, keepdim=True),
        squares=True,
        where=lambda x: x.double().norm(dim=-1, keepdim=True) >= 1 / SLOPE[x.dtype],
    ),
    Case(
        name="rms_norm",
        op=partial(ops.rms_norm, eps=2.0**-23),
        textbook=_rms,
        squares=True,
    ),
    Case(name="masked_softmax", op=partial(ops.masked_softmax, mask=KEEP), textbook=_softmax, roundings=400),
    Case(
        name="masked_cross_entropy",
        op=lambda x: ops.masked_cross_entropy(x, TARGET.expand(x.shape[:-1]), reduction="none"),
        textbook=lambda x: F.cross_entropy(x.movedim(-1, 1), TARGET.expand(x.shape[:-1]), reduction="none"),
        measure=lambda r, x: r.abs() + 1,
    ),
    Case(
        name="normalized_mse",
        op=partial(ops.normalized_mse, mask=KEEP, eps=2.0**-23),
        textbook=_nmse,
        inputs=2,
        squares=True,
        measure=lambda r, p, t: r.abs() * (1 + t.abs().amax() / _std(t)),
    ),
    Case(
        name="log_sinkhorn",
        op=partial(ops.log_sinkhorn, iterations=3),
        textbook=_sinkhorn,
        shape=(2, 3, 3),
        where=lambda x: bool(x.abs().max() <= torch.finfo(x.dtype).max / 4),
        measure=lambda r, x: x.abs().amax() + 1,
    ),
    Case(
        name="sinkhorn",
        op=partial(ops.sinkhorn, iterations=3),
        textbook=lambda x: _sinkhorn(x).exp(),
        shape=(2, 3, 3),
        where=lambda x: bool(x.abs().max() <= 100),
        roundings=4000,
    ),
    Case(
        name="select",
        op=lambda x: ops.select(x > 0, torch.sqrt, lambda v: v / 2, x),
        textbook=lambda x: torch.where(x > 0, x.sqrt(), x / 2),
    ),
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
bounded = settings(max_examples=10, deadline=None, derandomize=True, database=None)


def edges(dtype: torch.dtype) -> list[float]:
    f = format_of(dtype)
    sizes = [f.smallest_subnormal, f.smallest_normal / 2, f.smallest_normal, 1 / SLOPE[dtype], 1.0, f.max / 2, f.max]
    return [0.0, -0.0, *sizes, *(-s for s in sizes)]


def finite_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> st.SearchStrategy[Tensor]:
    size = torch.Size(shape).numel()
    width = {torch.float64: 64, torch.float16: 16}.get(dtype, 32)
    element = st.one_of(
        st.sampled_from(edges(dtype)),
        st.floats(allow_nan=False, allow_infinity=False, width=width),  # type: ignore[arg-type]
        st.floats(-10, 10),
    )
    limit = torch.finfo(dtype).max

    def build(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).clamp(-limit, limit).to(dtype).reshape(shape)

    return st.lists(element, min_size=size, max_size=size).map(build)


def ordinary_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> st.SearchStrategy[Tensor]:
    size = torch.Size(shape).numel()
    element = st.floats(0.125, 8) | st.floats(-8, -0.125)
    return st.lists(element, min_size=size, max_size=size).map(lambda v: torch.tensor(v, dtype=dtype).reshape(shape))


def run(fn: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out) if upstream is None else upstream)
    return out.detach(), list(grads)


def draw_inputs(data: st.DataObject, case: Case, dtype: torch.dtype, kind=finite_tensors) -> list[Tensor]:  # type: ignore[no-untyped-def]
    return [data.draw(kind(dtype, case.shape), label=f"input {i}") for i in range(case.inputs)]


def draw_upstream(data: st.DataObject, like: Tensor) -> Tensor | None:
    if data.draw(st.booleans(), label="ones"):
        return None
    values = st.lists(st.floats(-8, 8), min_size=like.numel(), max_size=like.numel())
    return torch.tensor(data.draw(values, label="upstream"), dtype=like.dtype).reshape(like.shape)


def assert_promise(case: Case, inputs: list[Tensor], upstream: Tensor | None) -> None:
    dtype = inputs[0].dtype
    out, grads = run(case.op, inputs, upstream)
    assert {t.dtype for t in (out, *grads)} == {dtype}
    assert out.isfinite().all(), f"value: {out[~out.isfinite()]}"
    for i, grad in enumerate(grads):
        assert grad.isfinite().all(), f"gradient {i}: {grad[~grad.isfinite()]}"
    exact = [x.double() for x in inputs]
    reference = case.textbook(*exact)
    f = format_of(dtype)
    tolerance = case.roundings * f.machine_eps * case.measure(reference, *exact) + 8 * f.smallest_subnormal
    must = reference.isfinite() & (reference.abs() <= f.max) & case.where(*inputs)
    if case.squares and dtype == torch.float64:  # nothing wider is left to compute the textbook in
        must = must & all(((x == 0) | ((x.abs() > 1e-150) & (x.abs() < 1e150))).all() for x in inputs)
    off = must & ~((out.double() - reference).abs() <= tolerance)
    assert not off.any(), f"{out[off]} is not {reference[off]}"


@every_dtype
@every_case
@settings(bounded, max_examples=30)
@given(data=st.data())
def test_finite_and_true_for_every_finite_input(case: Case, dtype: torch.dtype, data: st.DataObject) -> None:
    inputs = draw_inputs(data, case, dtype)
    assert_promise(case, inputs, draw_upstream(data, case.op(*inputs)))


@every_dtype
@every_case
def test_finite_and_true_for_every_combination_of_edges(case: Case, dtype: torch.dtype) -> None:
    """All rows of three edge values beside a 1; for two inputs, all pairs of edge values."""
    rows = torch.cartesian_prod(*[torch.tensor(edges(dtype), dtype=dtype)] * 3)
    rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    if case.shape == (3, 4):
        x = rows[: len(rows) // 3 * 3].reshape(-1, 3, 4)
    else:
        x = rows.flatten()[: rows.numel() // 9 * 9].reshape(-1, 3, 3)
    upstream = torch.empty_like(case.op(*[x] * case.inputs)).uniform_(-3, 3, generator=torch.Generator().manual_seed(0))
    for g in (None, upstream, torch.zeros_like(upstream)):
        assert_promise(case, [x, x.roll(1, -1)][: case.inputs], g)


@every_dtype
@every_case
@bounded
@given(data=st.data())
def test_gradient_agrees_with_the_textbook(case: Case, dtype: torch.dtype, data: st.DataObject) -> None:
    inputs = draw_inputs(data, case, dtype, ordinary_tensors)
    upstream = draw_upstream(data, case.op(*inputs))
    _, expected = run(case.textbook, [x.double() for x in inputs], None if upstream is None else upstream.double())
    _, grads = run(case.op, inputs, upstream)
    for grad, wanted in zip(grads, expected, strict=True):
        must = wanted.isfinite() & case.where(*inputs)
        scale = max(1.0, float(wanted[must].abs().max()))
        error = (grad.double() - wanted)[must].abs().max()
        assert error <= 64 * format_of(dtype).machine_eps * scale, f"{grad} is not {wanted}"


@every_case
def test_first_and_second_derivatives(case: Case) -> None:
    rng = torch.Generator().manual_seed(0)
    inputs = [
        (torch.rand(case.shape, generator=rng, dtype=torch.float64) + 0.5).requires_grad_() for _ in range(case.inputs)
    ]
    if case.name == "normalized_mse":
        inputs[1].requires_grad_(False)  # its variance is a constant, which finite differences cannot know
    assert torch.autograd.gradcheck(case.op, inputs)
    assert torch.autograd.gradgradcheck(case.op, inputs)


@every_dtype
@every_case
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo warns of itself
def test_compiles_without_a_graph_break(case: Case, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    inputs = [torch.linspace(-2, 3, torch.Size(case.shape).numel(), dtype=dtype).reshape(case.shape)] * case.inputs
    compiled = torch.compile(case.op, backend="aot_eager", fullgraph=True)
    for mine, eager in zip(run(compiled, inputs, None), run(case.op, inputs, None), strict=True):
        torch.testing.assert_close(mine, eager, rtol=0, atol=0)


@every_case
def test_works_with_per_sample_gradients(case: Case) -> None:
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.rand((5, *case.shape), generator=rng) + 0.5 for _ in range(case.inputs)]
    each = torch.func.vmap(torch.func.grad(lambda *xs: case.op(*xs).square().sum()))(*inputs)
    for i in range(5):
        sample = [x[i] for x in inputs]
        _, (grad, *_) = run(lambda *xs: case.op(*xs).square().sum(), sample, None)
        torch.testing.assert_close(each[i], grad)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_autocast_changes_nothing(case: Case, dtype: torch.dtype) -> None:
    inputs = [torch.linspace(-2, 3, torch.Size(case.shape).numel(), dtype=dtype).reshape(case.shape)] * case.inputs
    plain = run(case.op, inputs, None)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(case.op, inputs, None), plain, rtol=0, atol=0)


@every_dtype
@every_case
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_masked_is_not_hidden(case: Case, dtype: torch.dtype, bad: float) -> None:
    for i in range(case.inputs):
        inputs = [torch.ones(case.shape, dtype=dtype) for _ in range(case.inputs)]
        inputs[i].view(-1)[0] = bad
        if case.name == "safe_div" and i == 1 and bad == torch.inf:
            continue  # 1/Inf is 0, in the textbook as here
        assert not case.op(*inputs).isfinite().all()


@every_case
@every_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_gradient_is_not_hidden(case: Case, dtype: torch.dtype, bad: float) -> None:
    inputs = [torch.linspace(1, 2, torch.Size(case.shape).numel(), dtype=dtype).reshape(case.shape)] * case.inputs
    upstream = torch.full_like(case.op(*inputs), bad)
    _, grads = run(case.op, inputs, upstream)
    assert not grads[0].isfinite().all()

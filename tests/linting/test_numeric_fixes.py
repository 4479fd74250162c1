"""Safe fixes of the numerics rules, run: the old and the new code give the same values and gradients.

Unsafe ones are run where they promise something: the new code is finite where the old one was not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanproof.linting.catalogue import all_rules
from nanproof.linting.engine import Linter
from nanproof.linting.fix import fix
from nanproof.linting.rule import Rule
from nanproof.linting.settings import Settings

RULES = {rule.code: rule for rule in all_rules()}
HEAD = """import torch
import torch as th
import torch.nn as nn
import torch.nn.functional as F
from torch import exp, log
from torch.nn.functional import binary_cross_entropy as bce
"""


def repair(code: str, text: str, *, unsafe: bool = False) -> str:
    """The text after this rule's fixes; nothing may be left for it to find."""
    rule: Rule = RULES[code]
    linter = Linter([], [rule], Settings(info=True))
    fixed = fix(linter, Path("example.py"), text.encode(), unsafe=unsafe)
    assert fixed.changed
    assert fixed.compiles
    assert fixed.after.problems == ()
    return fixed.new.decode()


def run(text: str, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The value of the last function of a text, and its gradients."""
    names: dict[str, Any] = {}
    exec(compile(text, "example.py", "exec"), names)
    function = [v for v in names.values() if callable(v) and getattr(v, "__code__", None)][-1]
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    value = function(*given)
    learned = [x for x in given if x.requires_grad]
    if not learned:
        return (value,)
    seeds = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
    return (value.detach(), *torch.autograd.grad((value * seeds).sum(), learned, materialize_grads=True))


def numbers(*shape: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


SAFE = [
    # --- NP201: a mask that comes from a comparison holds only 0 and 1
    ("NP201", "def loss(x, y):\n    keep = y > 0\n    return (x * keep).sum() / keep.sum()", 2),
    ("NP201", "def loss(x, y):\n    m = (y > 0).float()\n    n = m.sum(dim=1)\n    return (x * m).sum(1) / n", 2),
    ("NP201", "def loss(x, y):\n    m = y.gt(-9)\n    x = (x * m).sum()\n    x = x / m.sum()\n    return x", 2),
    # --- NP206
    ("NP206", "def loss(x):\n    return torch.log(torch.softmax(x, dim=-1))", 1),
    ("NP206", "def loss(x):\n    return log(F.softmax(x, 1))", 1),
    ("NP206", "def loss(x):\n    return x.softmax(-1).log() * 2", 1),
    ("NP206", "def loss(x):\n    return -th.sigmoid(x + 1).log()", 1),
    ("NP206", "def loss(x):\n    return x.sigmoid().log().square()", 1),
    ("NP206", "def loss(x):\n    return torch.log(1 - torch.sigmoid(x))", 1),
    ("NP206", "def loss(x, y):\n    return torch.log(1.0 - torch.sigmoid(x - y))", 2),
    ("NP206", "def loss(x):\n    p = torch.softmax(x / 2, dim=0)\n    return torch.log(p)", 1),
    ("NP206", "def loss(x, y):\n    p = torch.sigmoid(x)\n    q = y * 2\n    return q * p.log()", 2),
    ("NP206", "def loss(x):\n    return torch.log(F.softmax(x, dim=1, dtype=torch.float32))", 1),
    # --- NP208
    ("NP208", "def f(x):\n    return torch.log(torch.sum(torch.exp(x), dim=1))", 1),
    ("NP208", "def f(x):\n    return x.exp().sum(-1).log()", 1),
    ("NP208", "def f(x, y):\n    return log(exp(x - y).sum(dim=-1, keepdim=True)) + 1", 2),
    ("NP208", "def f(x):\n    return torch.log(torch.exp(-x).sum(1, True))", 1),
    ("NP208", "def f(x):\n    return torch.log(torch.exp(x / 2).sum(axis=0, keepdims=True))", 1),
    ("NP208", "def f(x):\n    e = torch.exp(x)\n    return torch.log(e.sum(1))", 1),
    ("NP208", "def f(x):\n    total = torch.exp(x).sum(1)\n    return -torch.log(total)", 1),
    # --- NP209
    ("NP209", "def f(x):\n    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)", 1),
    ("NP209", "def f(x):\n    return 1 - torch.exp(x) / torch.sum(torch.exp(x), dim=1, keepdim=True)", 1),
    ("NP209", "def f(x, y):\n    return (x + y).exp() / (x + y).exp().sum(dim=0, keepdim=True)", 2),
    # --- NP214
    ("NP214", "def f(x, y):\n    return x / (y.abs().clamp(min=1) + 1e-8)", 2),
    ("NP214", "def f(x, y):\n    n = torch.clamp(y, min=1.0)\n    return x / (1e-10 + n)", 2),
]


@pytest.mark.parametrize(("code", "text", "count"), SAFE, ids=[f"{c}-{i}" for i, (c, _, _) in enumerate(SAFE)])
def test_a_safe_fix_keeps_values_and_gradients(code: str, text: str, count: int) -> None:
    old = f"{HEAD}\n\n{text}\n"
    new = repair(code, old)
    for seed in range(3):
        inputs = [numbers(4, 5, seed=7 * seed + i) for i in range(count)]
        before, after = run(old, inputs), run(new, inputs)
        assert all(torch.isfinite(x).all() for x in before)
        for a, b in zip(before, after, strict=True):
            torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-6)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def edges(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The values where rounding, underflow and overflow begin, in rows that are all small, all large, and mixed."""
    info = torch.finfo(dtype)
    low = [0.0, -0.0, info.smallest_normal, -info.smallest_normal, info.eps]
    near = [1.0, 1 - info.eps, 1 + info.eps, -1.0, -1 - info.eps]
    limit = torch.log(torch.tensor(info.max, dtype=torch.float64)).item()
    high = [limit - 2, -limit + 2, limit / 2, -limit / 2, 9.0]
    mixed = [0.5, -3.0, info.eps, limit / 3, -limit / 3]
    rows = torch.tensor([low, near, high, mixed], dtype=torch.float64).to(dtype)
    return rows.roll(seed, dims=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("code", "text", "count"), SAFE, ids=[f"{c}-{i}" for i, (c, _, _) in enumerate(SAFE)])
def test_a_safe_fix_makes_no_finite_result_worse_at_the_edges(
    code: str, text: str, count: int, dtype: torch.dtype
) -> None:
    """Values and gradients that were finite stay so, and are as near to the exact ones as before, to rounding."""
    old = f"{HEAD}\n\n{text}\n"
    new = repair(code, old)
    inputs = [edges(dtype, i) for i in range(count)]
    exact = run(new, [x.double() for x in inputs])
    for before, after, truth in zip(run(old, inputs), run(new, inputs), exact, strict=True):
        kept = torch.isfinite(before) & torch.isfinite(truth) & (truth.abs() < torch.finfo(dtype).max)
        assert torch.isfinite(after[kept]).all()
        old_error, new_error = ((x.double() - truth).abs()[kept] for x in (before, after))
        rounding = 16 * torch.finfo(dtype).eps * truth.abs()[kept].clamp(min=1)
        assert (new_error <= old_error + rounding).all()


SOFTPLUS = [
    "def f(x):\n    return torch.log(1 + torch.exp(x))",
    "def f(x):\n    return torch.log(torch.exp(-x) + 1.0)",
    "def f(x):\n    return (1 + (2 * x).exp()).log().square()",
    "def f(x):\n    return torch.log1p(torch.exp(x))",
]


@pytest.mark.parametrize("text", SOFTPLUS)
def test_the_fix_of_a_softplus_keeps_values_and_gradients_in_float32(text: str) -> None:
    old = f"{HEAD}\n\n{text}\n"
    new = repair("NP212", old, unsafe=True)
    x = numbers(4, 5)
    for a, b in zip(run(old, [x]), run(new, [x]), strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-6)


BCE = [
    "def loss(x, y):\n    return F.binary_cross_entropy(torch.sigmoid(x), y)",
    "def loss(x, y):\n    return bce(x.sigmoid(), y, reduction='none')",
    "def loss(x, y):\n    return F.binary_cross_entropy(input=x.sigmoid(), target=y)",
    "def loss(x, y):\n    p = torch.sigmoid(x)\n    return F.binary_cross_entropy(p, y)",
    "def loss(x, y):\n    return nn.BCELoss()(torch.sigmoid(2 * x), y)",
    "def loss(x, y):\n    criterion = nn.BCELoss(reduction='sum')\n    return criterion(x.sigmoid(), y)",
]


@pytest.mark.parametrize("text", BCE)
def test_the_fix_of_bce_keeps_values_and_gradients(text: str) -> None:
    old = f"{HEAD}\n\n{text}\n"
    new = repair("NP207", old)
    x, y = numbers(6, 3, scale=1.0), torch.rand(6, 3, generator=torch.Generator().manual_seed(1))
    for a, b in zip(run(old, [x, y])[:2], run(new, [x, y])[:2], strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-6)


def test_the_fix_of_a_mask_constant_keeps_the_weights() -> None:
    old = f"""{HEAD}

def train(model, batch):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(batch)


def attend(scores):
    scores = scores.masked_fill(scores < 0, -1e9)
    return scores.softmax(-1)
"""
    new = repair("NP217", old)
    x = numbers(6, 8)
    for a, b in zip(run(old, [x]), run(new, [x]), strict=True):
        torch.testing.assert_close(b, a)
    torch.testing.assert_close(run(new, [x.half()])[0].float(), run(old, [x])[0], rtol=1e-2, atol=1e-2)


def refused(text: str, inputs: list[torch.Tensor]) -> bool:
    try:
        run(text, inputs)
    except RuntimeError as error:
        return "not implemented for 'Long'" in str(error)
    return False


@pytest.mark.parametrize(("code", "text", "count"), SAFE, ids=[f"{c}-{i}" for i, (c, _, _) in enumerate(SAFE)])
def test_a_safe_fix_gives_integers_the_same_values_or_is_refused_by_torch(code: str, text: str, count: int) -> None:
    """`logsigmoid` and `softmax` refuse integers, which `log(sigmoid(x))` takes: an error, never another value."""
    old = f"{HEAD}\n\n{text}\n"
    new = repair(code, old)
    inputs = [torch.tensor([[3, -2, 0, 7, 1], [0, 0, 5, -9, 2]]) for _ in range(count)]
    if not refused(old, inputs) and not refused(new, inputs):
        torch.testing.assert_close(run(new, inputs)[0], run(old, inputs)[0], rtol=2e-5, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("divisor", ["x.std()", "(x.std())", "( x.std() )"])
def test_an_eps_is_added_with_one_pair_of_parentheses(divisor: str) -> None:
    new = repair("NP204", f"{HEAD}\n\ndef loss(x):\n    return (x - x.mean()) / {divisor}\n", unsafe=True)
    assert "/ (x.std() + 1e-6)" in new.replace("( ", "(").replace(" )", ")")


# --- unsafe fixes: what was NaN or infinite is finite afterwards ------------------------------------------------------

UNSAFE = [
    ("NP201", "def loss(x, mask):\n    return (x * mask).sum() / mask.sum()", (2, 3), torch.zeros(2, 3)),
    ("NP202", "def loss(x, mask):\n    return x[mask].mean()", (4,), torch.zeros(4, dtype=torch.bool)),
    ("NP203", "def loss(x):\n    return x / x.norm(dim=-1, keepdim=True)", (2, 3), None),
    ("NP203", "def loss(x, y):\n    return (x * y).sum(-1) / (x.norm(dim=-1) * 2)", (2, 3), torch.ones(2, 3)),
    ("NP204", "def loss(x):\n    return (x - x.mean()) / x.std()", (5,), None),
    ("NP205", "def loss(x):\n    return torch.sqrt((x ** 2).sum(-1))", (2, 3), None),
    ("NP205", "def loss(x):\n    return (x * 2).clamp(min=0).sqrt()", (2, 3), None),
    ("NP205", "def loss(x):\n    return x.var(dim=0) ** 0.5", (4, 3), None),
    ("NP210", "def f(x):\n    return torch.where(x > 0, torch.log(x), torch.zeros_like(x))", (3,), None),
    ("NP210", "def f(x):\n    return torch.where(x == 0, torch.ones_like(x), torch.sin(x) / x)", (3,), None),
    ("NP210", "def f(x):\n    return torch.where(x <= 0, x, x.sqrt())", (3,), None),
]


@pytest.mark.parametrize(
    ("code", "text", "shape", "other"), UNSAFE, ids=[f"{c}-{i}" for i, (c, *_) in enumerate(UNSAFE)]
)
def test_an_unsafe_fix_mends_what_it_says(
    code: str, text: str, shape: tuple[int, ...], other: torch.Tensor | None
) -> None:
    old = f"{HEAD}\n\n{text}\n"
    inputs = [torch.zeros(shape), *([other] if other is not None else [])]
    assert not all(torch.isfinite(v).all() for v in run(old, inputs)[:2])
    new = repair(code, old, unsafe=True)
    assert all(torch.isfinite(v).all() for v in run(new, inputs)[:2])


def test_a_fully_masked_row_is_finite_after_the_fix() -> None:
    body = "pad = x < 9\n    x = x.masked_fill(pad, float('-inf'))\n    return x.softmax(-1)"
    old = f"{HEAD}\n\ndef pool(x):\n    {body}\n"
    assert run(old, [torch.zeros(2, 3)])[0].isnan().all()
    assert run(repair("NP216", old, unsafe=True), [torch.zeros(2, 3)])[0].isfinite().all()


def test_an_angle_is_finite_after_the_fix() -> None:
    old = f"{HEAD}\n\ndef loss(x, y):\n    return torch.acos((x * y).sum(-1))\n"
    inputs = [torch.tensor([[1.0, 1e-4]]), torch.tensor([[1.0, 1e-2]])]
    assert run(old, inputs)[0].isnan().all()
    assert all(v.isfinite().all() for v in run(repair("NP211", old, unsafe=True), inputs))


def test_sinkhorn_on_logarithms_is_the_same_where_exponentials_live_and_finite_where_they_do_not() -> None:
    old = f"{HEAD}{RULES['NP218'].bad}"
    new = repair("NP218", old, unsafe=True)
    x = numbers(4, 4)
    for a, b in zip(run(old, [x]), run(new, [x]), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    large = torch.tensor([[0.0, 200.0], [1.0, 0.0]])
    assert run(old, [large])[0].isnan().any()
    assert all(v.isfinite().all() for v in run(new, [large]))


# --- when a fix must not be made, or not be called safe ---------------------------------------------------------------

CAREFUL = [
    ("NP206", "def loss(x):\n    p = torch.sigmoid(x)\n    return torch.log(p) + p"),
    ("NP206", "def loss(x):\n    p = torch.sigmoid(x)\n    x = x + 1\n    return torch.log(p) * x"),
    ("NP206", "def loss(x):\n    p = torch.sigmoid(x)\n    x[0] = 0\n    return torch.log(p) * x"),
    ("NP206", "def loss(net, x):\n    p = torch.sigmoid(net(x))\n    return torch.log(p)"),
    ("NP207", "def loss(x, y):\n    p = torch.sigmoid(x)\n    return F.binary_cross_entropy(p, y) + p.sum()"),
    ("NP207", "def loss(x, y, z):\n    f = nn.BCELoss()\n    return f(x.sigmoid(), y) + f(z, y)"),
    ("NP208", "def f(x):\n    e = torch.exp(x)\n    return e + torch.log(e.sum(1, keepdim=True))"),
    ("NP208", "def f(x):\n    return torch.log(torch.exp(x).sum())"),
    ("NP209", "def f(x):\n    e = torch.exp(x)\n    return e / e.sum(1, keepdim=True)"),
    ("NP209", "def f(x):\n    return torch.exp(x) / torch.exp(x).sum(1)"),
    ("NP201", "def loss(x, mask):\n    return (x * mask).sum() / mask.sum()"),
]


@pytest.mark.parametrize(("code", "text"), CAREFUL, ids=[f"{c}-{i}" for i, (c, _) in enumerate(CAREFUL)])
def test_no_safe_fix_where_the_value_is_used_elsewhere_or_has_changed(code: str, text: str) -> None:
    data = f"{HEAD}\n\n{text}\n".encode()
    linter = Linter([], [RULES[code]], Settings(info=True))
    assert linter.data(Path("example.py"), data).problems
    assert not fix(linter, Path("example.py"), data).changed


GONE = [
    ("NP206", "def loss(x):\n    x = torch.sigmoid(x)\n    return torch.log(x)"),
    ("NP206", "def loss(x):\n    for _ in range(2):\n        p = x.sigmoid()\n        x = x + 1\n    return p.log()"),
    ("NP206", "def loss(x):\n    p = x.sigmoid()\n    for _ in 1, 2:\n        x = p.log()\n    return x"),
    ("NP207", "def loss(x, y):\n    x = x.sigmoid()\n    return F.binary_cross_entropy(x, y)"),
    ("NP208", "def f(x):\n    x = torch.exp(x)\n    return torch.log(x.sum(1))"),
    ("NP209", "def f(x):\n    x = torch.exp(x)\n    return x / x.sum(1, keepdim=True)"),
]


@pytest.mark.parametrize(("code", "text"), GONE, ids=[f"{c}-{i}" for i, (c, _) in enumerate(GONE)])
def test_no_fix_at_all_where_the_logits_are_gone(code: str, text: str) -> None:
    data = f"{HEAD}\n\n{text}\n".encode()
    assert not fix(Linter([], [RULES[code]], Settings(info=True)), Path("example.py"), data, unsafe=True).changed


# --- code that goes round in circles ----------------------------------------------------------------------------------

CIRCLES = """
class Model(nn.Module):
    def __init__(self):
        self.a = self.b + 1
        self.b = self.a * self.a
        self.c = self.d[self.c]
        self.d = self.c.x[0]
        self.m = ~self.m & self.k
        self.k = self.m * self.k

    def forward(self, x):
        y = torch.sqrt(self.a) + torch.log(self.b.sum()) / self.b.sum() + x / (self.a * self.b).norm()
        y = y + torch.exp(self.a) / torch.exp(self.a).sum() + torch.where(self.a > 0, 1 / self.b, torch.acos(self.a))
        y = y + self.c[self.m].mean() + x[self.k].mean() + x / self.d.norm() + (x * self.m).sum() / self.m.sum()
        return y + self.a**0.5 + x.masked_fill(self.k, -1e9).softmax(-1) + self.b / self.b.std()
"""


def test_attributes_made_from_each_other_end() -> None:
    rules = [r for code, r in RULES.items() if code.startswith(("NP2", "NP002"))]
    problems = Linter([], rules, Settings(info=True)).data(Path("example.py"), (HEAD + CIRCLES).encode()).problems
    codes = {p.finding.code for p in problems}
    assert "NP201" in codes
    assert "NP002" not in codes  # no rule has failed

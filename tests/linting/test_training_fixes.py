"""Fixes of the training rules, run: what they promise is seen in the weights.

The safe ones decide as before for every finite value. The unsafe ones are trained with before and after: the old code
does the harm that the rule describes, the new code does not.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nanproof.linting.catalogue import all_rules
from nanproof.linting.engine import Linter
from nanproof.linting.fix import fix
from nanproof.linting.settings import Settings

RULES = {rule.code: rule for rule in all_rules()}
INF, NAN = math.inf, math.nan


def repair(code: str, text: str, *, unsafe: bool = True) -> str:
    """The text after this rule's fixes; nothing may be left for it to find."""
    fixed = fix(Linter([], [RULES[code]], Settings(info=True)), Path("train.py"), text.encode(), unsafe=unsafe)
    assert fixed.changed
    assert fixed.after.problems == ()
    return fixed.new.decode()


def load(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    exec(compile(text, "train.py", "exec"), names)
    return names


def line() -> torch.nn.Linear:
    """A model with weight 1: its loss on x is x."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def sgd(model: torch.nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


# --- safe ------------------------------------------------------------------------------------------------------------

SAFE = {
    "NP104": [
        "def bad(x):\n    return x.item() == float('nan')\n",
        "import math\ndef bad(x):\n    return x == math.nan\n",
        "def bad(x):\n    y = x.item()\n    return not (y != float('nan'))\n",
        "import numpy as np\ndef bad(x):\n    return bool((x == np.nan).any())\n",
    ],
    "NP110": [
        "if torch.isnan(loss):",
        "if loss.isnan():",
        "if torch.isnan(loss).any():",
        "if loss is not None and torch.isnan(loss).any():",
        "import math\n        if math.isnan(loss.item()):",
        "import math\n        if not (not math.isnan(loss.item())):",
    ],
}
LOOP = """
def train(losses, model, optimizer, skipped):
    for loss in losses:
        {test}
            skipped.append(loss)
            continue
        optimizer.zero_grad()
        (model.weight * loss).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("text", SAFE["NP104"])
def test_a_comparison_with_nan_answers_as_before_for_finite_numbers_and_rightly_for_nan(text: str) -> None:
    old, new = load(text)["bad"], load(repair("NP104", text, unsafe=False))["bad"]
    for value in torch.randn(50) * 1e3:
        assert bool(old(value)) is bool(new(value)) is False
    assert bool(old(torch.tensor(NAN))) is False
    assert bool(new(torch.tensor(NAN))) is True


@pytest.mark.parametrize("test", SAFE["NP110"])
def test_a_test_for_nan_answers_as_before_for_finite_losses_and_sees_infinity(test: str) -> None:
    text = LOOP.format(test=test)
    finite = [*(torch.randn(20) * 1e3)]
    old, new = load(text)["train"], load(repair("NP110", text, unsafe=False))["train"]
    weights = []
    for train in (old, new):
        model, skipped = line(), []
        train(finite, model, sgd(model), skipped)
        assert skipped == []
        weights.append(model.weight.detach())
    assert torch.equal(*weights)
    for train, ruined in ((old, True), (new, False)):
        model, skipped = line(), []
        train([torch.tensor(INF), torch.tensor(NAN)], model, sgd(model), skipped)
        assert len(skipped) == (1 if ruined else 2)
        assert bool(torch.isfinite(model.weight).all()) is not ruined


# --- unsafe: the harm, and its end ------------------------------------------------------------------------------------


def weight_after(text: str, inputs: list[float], *, lr: float = 0.1, **more: Any) -> float:
    """The weight of a line after training on these losses; an exception ends the training."""
    model = line()
    with suppress(RuntimeError, AssertionError):
        load(text)["train"](model, [torch.tensor([x]) for x in inputs], sgd(model, lr), **more)
    return model.weight.item()


NP101 = """
def train(model, loader, optimizer):
    for x in loader:
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not torch.isfinite(loss):
            raise RuntimeError("loss is not finite")
"""


def test_np101_the_weights_survive_the_bad_batch() -> None:
    assert math.isnan(weight_after(NP101, [1.0, NAN]))
    assert weight_after(repair("NP101", NP101), [1.0, NAN]) == pytest.approx(0.9)
    assert weight_after(repair("NP101", NP101), [1.0, 2.0]) == weight_after(NP101, [1.0, 2.0])


NP105 = """
def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        {after}
        optimizer.step()
        {before}
"""


@pytest.mark.parametrize("early", [True, False])
def test_np105_the_step_is_as_short_as_was_asked_for(early: bool) -> None:
    clip = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    text = NP105.format(after="pass", before="pass" if early else clip)
    if early:
        text = text.replace("optimizer.zero_grad()\n", f"optimizer.zero_grad()\n        {clip}\n")
    assert weight_after(text, [1000.0]) == pytest.approx(1 - 0.1 * 1000)
    assert weight_after(repair("NP105", text), [1000.0]) == pytest.approx(1 - 0.1 * 1)


SCALED = """
def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    for x in loader:
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        {step}
"""
NP301 = SCALED.format(
    step="nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        scaler.step(optimizer)\n        scaler.update()"
)
NP303 = SCALED.format(step="optimizer.step()\n        scaler.update()")


def test_np301_a_gradient_below_the_limit_is_left_alone() -> None:
    assert 1 - weight_after(NP301, [0.5]) == pytest.approx(0.1 / 65536, rel=0.05)
    assert 1 - weight_after(repair("NP301", NP301), [0.5]) == pytest.approx(0.1 * 0.5)
    assert 1 - weight_after(repair("NP301", NP301), [50.0, 50.0]) == pytest.approx(0.2)


def test_np301_is_not_repaired_where_a_second_unscale_would_raise() -> None:
    text = """
def train(model, loader, optimizer, scaler):
    for i, x in enumerate(loader):
        scaler.scale(model(x)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if i % 4 == 3:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""
    linter = Linter([], [RULES["NP301"]], Settings(info=True))
    assert [p.finding.edits for p in linter.data(Path("train.py"), text.encode()).problems] == [()]


def test_np303_the_scale_does_not_reach_the_weights_and_an_overflow_is_left_out() -> None:
    assert weight_after(NP303, [0.01]) == pytest.approx(1 - 0.1 * 0.01 * 65536, rel=1e-3)
    assert weight_after(repair("NP303", NP303), [0.01]) == pytest.approx(1 - 0.1 * 0.01)
    assert not math.isfinite(weight_after(NP303, [1e35]))
    assert weight_after(repair("NP303", NP303), [1e35]) == 1.0


NP304 = """
def train(model, loader, optimizer):
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x in loader:
        optimizer.zero_grad()
        scaler.scale(model(x.to(model.weight.dtype)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def test_np304_the_scaler_takes_float32_weights() -> None:
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        weight_after(NP304, [1.0])
    assert weight_after(repair("NP304", NP304), [1.0]) == pytest.approx(0.9)


NP306 = """
def train(model, loader, optimizer):
    model = model.half()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        model(x.half()).sum().backward()
        optimizer.step()
"""


def test_np306_a_zero_gradient_is_no_nan() -> None:
    assert math.isnan(weight_after(NP306, [0.0]))
    repaired = repair("NP306", NP306)
    assert weight_after(repaired, [0.0]) == 1.0
    step = 1.0 - weight_after(repaired, [5e-3])  # of a gradient whose square is 0 in float16
    assert 0.0 < step <= 0.1
    assert 1.0 - weight_after(repaired.replace("1e-2", "1e-4"), [5e-3]) > 4.0


@pytest.mark.parametrize(
    ("code", "text", "given"),
    [
        ("NP307", "def f(x):\n    h = x.half()\n    return h / (h.sum() + 1e-8)\n", torch.zeros(3)),
        ("NP307", "def f(p):\n    p = p.clamp(1e-8, 1 - 1e-8)\n    return torch.log(1 - p)\n", torch.ones(3)),
        (
            "NP601",
            "class T:\n    def __call__(self, x):\n        return (x - x.min()) / (x.max() - x.min())\nf = T()\n",
            torch.full((3,), 2.0),
        ),
    ],
)
def test_a_value_that_was_not_finite_is(code: str, text: str, given: torch.Tensor) -> None:
    text = f"import torch\n{text}"
    assert not torch.isfinite(load(text)["f"](given)).all()
    assert torch.isfinite(load(repair(code, text))["f"](given)).all()

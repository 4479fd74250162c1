"""The smoke test: passes healthy trainings, and fails each kind of faulty one for its own reason."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as xml

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanproof.errors import UsageError
from nanproof.run.smoke import SmokeReport, smoke
from nanproof.run.smoke.chance import watch_chance
from nanproof.run.smoke.junit import junit
from nanproof.run.smoke.setting import from_factory, from_model
from run.launch import nanproof


def results(report: SmokeReport) -> dict[str, str]:
    return {c.name: c.result for c in report.checks}


def task(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
    return model, torch.randn(64, 8), torch.randint(0, 5, (64,))


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_training_passes_every_check(seed: int) -> None:
    model, x, y = task(seed)
    report = smoke(model, lambda: F.cross_entropy(model(x), y), watch=["0.weight"])
    assert report.ok
    assert set(results(report).values()) == {"PASS"}
    assert set(report.trial.watched) == {"0.weight"}


def nothing(model: nn.Module) -> None: ...


def poison(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[1, 2] = torch.nan


def enlarge(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e3)


@pytest.mark.parametrize(
    ("change", "loss", "name", "words"),
    [
        (poison, None, "parameters", "1 NaN of 256"),
        (enlarge, None, "chance level", "worse than guessing"),
        (nothing, lambda z, y: (z * 0).log().mean(), "loss finite", "-inf in step 1"),
        (nothing, lambda z, y: (z - z.detach()).norm(dim=-1).sqrt().mean(), "gradients finite", "NaN"),
        (nothing, lambda z, y: F.cross_entropy(z * 0, y), "parameters move", "no parameter changed"),
        (nothing, lambda z, y: F.cross_entropy(z, y) * 1e8, "gradient norms", "outside"),
        (nothing, lambda z, y: -F.cross_entropy(z, y).detach() + z.sum() * 1e-30, "gradient norms", "outside"),
    ],
)
def test_each_sickness_fails_its_own_check(
    change: Callable[[nn.Module], None], loss: Callable[[Tensor, Tensor], Tensor] | None, name: str, words: str
) -> None:
    model, x, y = task()
    change(model)
    function = loss or F.cross_entropy
    # no weight decay: it moves parameters that get no gradient
    optimizer = torch.optim.Adam(model.parameters())
    report = smoke(model, lambda: function(model(x), y), optimizer=optimizer)
    found = next(c for c in report.checks if c.name == name)
    assert found.result == "FAIL", found
    assert words in found.reason


def test_a_loss_that_rises_is_noticed() -> None:
    model, x, y = task()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, maximize=True)
    assert results(smoke(model, lambda: F.cross_entropy(model(x), y), optimizer=optimizer))["loss falls"] == "FAIL"


def test_half_weights_with_adam_fail_in_the_first_step_and_say_why() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 5).half()
    x, y = torch.randn(16, 8).half(), torch.randint(0, 5, (16,))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    report = smoke(model, lambda: F.cross_entropy(model(x).float(), y), optimizer=optimizer)
    precision = next(c for c in report.checks if c.name == "precision")
    assert precision.result == "FAIL"
    assert "rounds to 0" in precision.reason
    assert not math.isfinite(report.trial.losses[1])


def test_the_dtype_is_measured_not_read_from_a_flag() -> None:
    model, x, y = task()

    def step() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    report = smoke(model, step)
    assert {layer.output for layer in report.trial.layers} == {"bfloat16"}
    assert {layer.weight for layer in report.trial.layers if layer.weight} == {"float32"}


def test_little_headroom_is_found_before_it_overflows() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1e4)
    x = torch.ones(2, 4)

    def step() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).float().mean()

    head = next(c for c in smoke(model, step, steps=0).checks if c.name == "headroom")
    assert head.result == "FAIL"
    assert "float16" in head.reason


@pytest.mark.parametrize(
    ("loss", "level"),
    [
        (lambda z: F.cross_entropy(z, torch.zeros(4, dtype=torch.long)), math.log(6)),
        (lambda z: F.nll_loss(z.log_softmax(-1), torch.zeros(4, dtype=torch.long)), math.log(6)),
        (lambda z: F.binary_cross_entropy_with_logits(z, torch.zeros(4, 6)), math.log(2)),
        (lambda z: nn.CrossEntropyLoss()(z, torch.zeros(4, dtype=torch.long)), math.log(6)),
        (lambda z: F.mse_loss(z, torch.arange(24.0).reshape(4, 6)), float(torch.arange(24.0).var(correction=0))),
        (lambda z: z.abs().mean(), None),
        (lambda z: F.cross_entropy(z, torch.zeros(4, dtype=torch.long), reduction="sum"), math.log(6)),
        (lambda z: F.cross_entropy(z, torch.zeros(4, dtype=torch.long), reduction="none"), None),
        (
            lambda z: (
                F.cross_entropy(z, torch.zeros(4, dtype=torch.long))
                + F.binary_cross_entropy_with_logits(z, torch.zeros(4, 6))
            ),
            None,
        ),
    ],
)
def test_chance_is_read_off_the_loss_function(loss: Callable[[Tensor], Tensor], level: float | None) -> None:
    with watch_chance() as seen:
        loss(torch.randn(4, 6))
    assert seen.chance.level == (pytest.approx(level) if level is not None else None)


@pytest.mark.parametrize(("divide", "result"), [(64, "PASS"), (1, "NOTE")])
def test_of_a_sum_chance_is_known_only_if_it_is_divided(divide: int, result: str) -> None:
    model, x, y = task()
    report = smoke(model, lambda: F.cross_entropy(model(x), y, reduction="sum") / divide, steps=1)
    assert results(report)["chance level"] == result


def test_a_step_that_would_destroy_the_weights_is_not_taken() -> None:
    model, x, y = task()
    before = [p.detach().clone() for p in model.parameters()]
    report = smoke(model, lambda: F.cross_entropy(model(x), y) * torch.inf)
    assert not report.ok
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda: torch.tensor(1.0), "does not depend on the model"),
        (lambda: "loss", "returned str"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_wrong_steps_get_one_clear_sentence(step: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        smoke(nn.Linear(2, 2), step)
    with pytest.raises(UsageError, match="no parameter that trains"):
        smoke(nn.ReLU(), step)


SCRIPT = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    return model, lambda: nn.functional.cross_entropy(model(x), y), torch.optim.SGD(model.parameters(), lr=0.1)

def model():
    return nn.Linear(4, 3)

def batch():
    return torch.randn(8, 4)

def wrong():
    return 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "smoked.py"
    path.write_text(SCRIPT)
    return path


def test_the_verb(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "smoke.xml"
    done = nanproof("smoke", f"{script}:make", "--json", "--junit", out, fresh=False)
    told = json.loads(done.stdout)
    assert told["ok"]
    assert len(told["trial"]["losses"]) == 11
    suite = xml.parse(out).getroot()
    assert suite.get("tests") == str(len(told["checks"]))
    assert suite.get("failures") == "0"


def test_junit_holds_the_reason_of_a_failure() -> None:
    report = smoke(nn.Linear(2, 2), (lambda m: lambda: (m(torch.zeros(1, 2)) * 0).log().sum())(nn.Linear(2, 2)))
    suite = xml.fromstring(junit(report, "a <b> & c"))
    assert suite.get("name") == "a <b> & c"
    assert any("-inf" in f.get("message", "") for f in suite.iter("failure"))


def test_a_model_and_a_batch_are_enough(script: Path) -> None:
    model, step, optimizer = from_model(f"{script}:model", f"{script}:batch")
    assert optimizer is None
    assert smoke(model, step, steps=3).ok


@pytest.mark.parametrize(
    ("spec", "words"),
    [("nothing.py:make", "no file"), ("no.such.module:f", "cannot be imported"), ("make", "names no function")],
)
def test_a_wrong_factory_is_named(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_factory(spec)


def test_a_factory_that_returns_something_else(script: Path) -> None:
    with pytest.raises(UsageError, match="returned int"):
        from_factory(f"{script}:wrong")
    with pytest.raises(UsageError, match="has no function"):
        from_factory(f"{script}:missing")

"""Wrong use: a typed error with the fix in the message, before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nanproof import Guard
from nanproof.errors import NonFiniteError, UsageError
from support.runs import guarded

MODEL = nn.Linear(2, 2)


def sgd(model: nn.Module = MODEL) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "relaxed"}, r"policy is 'relaxed'\. Next: use one of default, strict, observe"),
        ({"max_norm": -1.0}, r"max_norm is -1\.0\. Next: give a positive number, or None"),
        ({"max_norm": float("nan")}, r"max_norm is nan"),
        ({"accumulate": 0}, r"accumulate is 0\. Next: give a positive number"),
        ({"snapshot_every": 0}, r"snapshot_every is 0\. Next: give a positive number, or None"),
        ({"spike_window": -5}, r"policy\.spike_window is -5"),
        ({"timing": "fast"}, r"timing is 'fast'\. Next: use one of exact, deferred"),
        ({"on_bad_microbatch": "drop"}, r"on_bad_microbatch is 'drop'\. Next: use one of window, microbatch"),
        ({"share": "all"}, r"share is 'all'\. Next: use one of flags, gradients, nothing"),
        ({"ema": 3}, r"int has no update_parameters\(model\) or update\(model\)"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        guarded(MODEL, sgd(), **options)


def test_an_optimizer_of_other_parameters() -> None:
    with pytest.raises(
        UsageError, match=r"the optimizer holds 2 parameters that are not the model's.*after wrapping it"
    ):
        Guard(MODEL, sgd(nn.Linear(2, 2)))


def test_something_that_is_no_optimizer() -> None:
    with pytest.raises(UsageError, match="int is not a torch optimizer"):
        Guard(MODEL, [3])  # type: ignore[list-item]


def test_a_model_that_is_bad_already() -> None:
    model = nn.BatchNorm1d(3)
    model.running_var[1] = float("nan")
    with pytest.raises(
        NonFiniteError,
        match=r"cannot guard a model that already holds NaN or Inf: buffer running_var \[3\] float32: 1 NaN of 3",
    ):
        Guard(model, sgd(model))


def test_bad_moments_are_found_too() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"][0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"optimizer state weight\.exp_avg_sq"):
        Guard(model, optimizer)


def test_step_without_a_loss() -> None:
    guard = Guard(MODEL, sgd())
    with pytest.raises(UsageError, match=r"guard\.step\(\) was called without a loss\. Next: pass a closure"):
        guard.step()


def test_a_disabled_scaler_is_no_scaler() -> None:
    guard = Guard(MODEL, sgd(), scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert guard.step(lambda: MODEL(torch.ones(1, 2)).sum()).ok


def test_an_average_may_be_any_function_of_the_model() -> None:
    seen = []
    guard = Guard(MODEL, sgd(), ema=seen.append)
    guard.step(lambda: MODEL(torch.ones(1, 2)).sum())
    guard.step(lambda: MODEL(torch.ones(1, 2)).sum() * float("nan"))
    assert seen == [MODEL]


def test_evaluation_between_steps_is_left_alone() -> None:
    """A forward pass in eval mode is not the beginning of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    guard = Guard(model, sgd(model))
    model.eval()
    model(torch.ones(1, 2))
    assert not guard._engine.before.taken
    model.train()
    guard.backward(model(torch.ones(1, 2)).sum())
    assert guard._engine.before.taken
    guard.step()

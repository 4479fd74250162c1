"""Averages that a script computes itself are not held when a step is skipped, so they are named."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path

import pytest
from torch import nn

from nanproof.run.handover import hand_over
from nanproof.run.module_lookup import find_owners
from run.launch import guarded

KINDS = {
    "module": (
        "copy.deepcopy(model)",
        "[a.data.lerp_(p, 0.1) for a, p in zip(average.parameters(), model.parameters())]",
    ),
    "list": (
        "[p.detach().clone() for p in model.parameters()]",
        "[a.mul_(0.9).add_(p.detach(), alpha=0.1) for a, p in zip(average, model.parameters())]",
    ),
    "shadow": (
        "{k: p.detach().clone() for k, p in model.named_parameters()}",
        "average.update({k: 0.9 * average[k] + 0.1 * p.detach() for k, p in model.named_parameters()})",
    ),
    "state": (
        "{k: v.clone() for k, v in model.state_dict().items()}",
        "average = {k: torch.lerp(average[k], v, 0.1) if"
        " v.is_floating_point() else v for k, v in model.state_dict().items()}",
    ),
}
LOOP = """
import copy
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
average = {make}
target = copy.deepcopy(model)
for i in range(8):
    x = torch.randn(8, 4)
    if i == {bad}:
        x[3, 2] = float("nan")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    {update}
    target.load_state_dict(model.state_dict())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_of_the_scripts_own_is_named(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, update = KINDS[kind]
    ran = guarded(tmp_path, LOOP.format(make=make, update=update, bad=4))
    assert ran.outcome.guarded[0]["actions"]["skip"] == 1
    assert ran.outcome.not_held == {"average, an average of the weights": "the script computes it itself"}
    assert "moved on in a skipped step: average, an average of the weights" in caplog.text
    assert "moved on in skipped steps: average" in "\n".join(hand_over(ran.outcome))


def test_what_is_no_average_or_needs_none_is_not_named(tmp_path: Path) -> None:
    """A copy that is synchronized, an average held by its type, and a run without a skipped step."""
    held = "average = torch.optim.swa_utils.AveragedModel(model)"
    source = LOOP.format(make="None", update="average.update_parameters(model)", bad=4).replace("average = None", held)
    assert guarded(tmp_path, source, name="held").outcome.not_held == {}
    make, update = KINDS["module"]
    good = guarded(tmp_path, LOOP.format(make=make, update=update, bad=99), name="good")
    assert good.outcome.not_held == {}
    assert "nothing went wrong" in textwrap.dedent(good.outcome.guarded[0]["summary"])


class EMA(nn.Module):
    """As in ema-pytorch: an average that holds the model which it averages."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.online_model, self.ema_model = model, copy.deepcopy(model)


def test_an_average_that_holds_the_model_is_not_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    average = EMA(model)
    assert find_owners(list(model.parameters())) == [model]
    wrapped = nn.DataParallel(model)
    assert find_owners(list(model.parameters())) == [wrapped]
    assert find_owners(list(average.parameters())) == [average]

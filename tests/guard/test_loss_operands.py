"""Loops without a closure: targets, weights and factors of the loss that came in non-finite are named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanproof import Guard, Incident
from nanproof.locating import Location

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="this torch does not show what autograd saved"
)
LABELS = torch.tensor([1, 2, 3, 2])
TARGETS = torch.zeros(4, 5)
TARGETS[1, 2] = math.nan
WEIGHTS = torch.ones(5)
WEIGHTS[2] = math.inf

LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mse target": (lambda x: F.mse_loss(x, TARGETS), "the target of mse_loss"),
    "huber target": (lambda x: F.huber_loss(x, TARGETS), "the target of huber_loss"),
    "bce target": (lambda x: F.binary_cross_entropy_with_logits(x, TARGETS), "the target of binary_cross_entropy"),
    "l1 target": (lambda x: F.l1_loss(x, TARGETS), "the output minus a target"),
    "squares of one's own": (lambda x: (x - TARGETS).pow(2).mean(), "the output minus a target"),
    "class weight": (lambda x: F.cross_entropy(x, LABELS, weight=WEIGHTS), "the class weight of cross_entropy"),
    "pos_weight": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(4, 5), pos_weight=WEIGHTS),
        "the pos_weight of binary_cross_entropy_with_logits",
    ),
    "tensor factor": (lambda x: F.cross_entropy(x, LABELS) * torch.tensor(math.nan), "factor of mul"),
    "plain factor": (lambda x: math.nan * F.cross_entropy(x, LABELS), "factor of mul"),
    "divisor": (lambda x: F.cross_entropy(x, LABELS) / torch.tensor(math.nan), "the divisor of div"),
    "soft labels": (lambda x: F.cross_entropy(x, TARGETS.softmax(-1)), "factor of mul"),
    "a plain 0": (lambda x: F.cross_entropy(x, LABELS) / 0.0, "division by 0"),
}


def train(run: Path, bad: Callable[[Tensor], Tensor], model: nn.Module) -> Location:
    """A loop without a closure whose fourth loss is bad."""
    with Guard(model, torch.optim.AdamW(model.parameters()), run_dir=run) as guard:
        for i in range(6):
            logits = model(torch.randn(4, 8))
            guard.backward(bad(logits) if i == 3 else F.cross_entropy(logits, LABELS))
            assert guard.step().ok == (i != 3)
    (record,) = (run / "incidents").glob("*/incident.json")
    found = Incident.from_json(json.loads(record.read_text())).location
    assert found is not None
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_what_came_into_the_loss_non_finite_is_named(tmp_path: Path, name: str) -> None:
    bad, words = LOSSES[name]
    found = train(tmp_path / "run", bad, nn.Linear(8, 5))
    assert words in found.why
    assert (found.mechanism, found.leaf_kind) == (("pole", "") if name == "a plain 0" else ("bad-leaf", "input"))
    assert Path(found.file) == Path(__file__)
    assert found.verified is None


class Breaks(nn.Module):
    """Its fourth batch breaks it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.batches: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not any(x is seen for seen in self.batches):
            self.batches = [*self.batches, x]
        h: Tensor = self.linear(x)
        return torch.log(h * 0 - 1) if any(x is b for b in self.batches[3:4]) else h


def test_a_target_is_not_blamed_for_an_output_of_the_model(tmp_path: Path) -> None:
    found = train(tmp_path / "run", lambda x: F.l1_loss(x, torch.zeros(4, 5)), Breaks())
    assert found.op == "log"

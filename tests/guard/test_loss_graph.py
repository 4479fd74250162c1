"""The loss of a loop without a closure: what autograd has saved of it names the operation that broke it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanproof import Guard, Incident
from nanproof.guard.loss_graph import MAX_BYTES, LossGraph

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="this torch does not show what autograd has saved"
)
Loss = Callable[[Tensor], Tensor]
FRAMES = torch.tensor([12, 12, 3, 12])

FORWARD: dict[str, tuple[Loss, str, str]] = {
    "cross_entropy": (
        lambda x: F.cross_entropy(x, torch.full((4,), -100)),
        "empty-reduction",
        "all 4 targets are ignored (-100)",
    ),
    "class weights": (
        lambda x: F.cross_entropy(x, torch.ones(4, dtype=torch.long), weight=torch.zeros(5)),
        "empty-reduction",
        "class weights",
    ),
    "segmentation": (
        lambda x: F.cross_entropy(x[:, :, None, None], torch.full((4, 1, 1), 255), ignore_index=255),
        "empty-reduction",
        "all 4 targets are ignored (255)",
    ),
    "ctc_loss": (
        lambda x: F.ctc_loss(
            x.expand(12, 4, 5).log_softmax(-1), torch.ones(4, 5, dtype=torch.long), FRAMES, FRAMES * 0 + 5
        ),
        "invalid",
        "sample 2 of the batch",
    ),
    "mean of nothing": (lambda x: x[:0].mean(), "empty-reduction", "empty tensor"),
    "log": (lambda x: (x - x.detach()).log().mean(), "pole", "log of 0: 20 of 20"),
    "count of 0": (lambda x: x.sum() / torch.zeros(4).sum(), "pole", "division by 0"),
    "acos": (lambda x: (x * 9).acos().sum(), "invalid", "beyond ±1"),
    "root": (lambda x: (-x.square() - 1).sqrt().sum(), "invalid", "sqrt of a negative"),
}
BACKWARD: dict[str, tuple[Loss, str]] = {
    "sqrt": (lambda x: (x - x.detach()).sqrt().sum(), "pole"),
    "pow": (lambda x: ((x - x.detach()) ** 0.5).sum(), "pole"),
    "acos": (lambda x: torch.acos(x - x.detach() + 1).sum(), "pole"),
    "where": (lambda x: torch.where(x > 9, (x - x.detach()).log(), x).sum(), "where-gradient"),
}


def outputs() -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("name", FORWARD)
def test_a_bad_loss(name: str) -> None:
    compute, mechanism, why = FORWARD[name]
    x = outputs()
    loss = compute(x)
    assert not loss.isfinite()
    found = LossGraph(loss, 0).find(backward=False)
    assert found is not None
    assert (found.mechanism, why in found.why) == (mechanism, True)


@pytest.mark.parametrize("name", BACKWARD)
def test_a_bad_gradient_behind_a_good_loss(name: str) -> None:
    compute, mechanism = BACKWARD[name]
    x = outputs()
    loss = compute(x)
    graph = LossGraph(loss, 0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()
    assert x.grad is not None
    assert not x.grad.isfinite().all()
    found = graph.find(backward=True)
    assert found is not None
    assert found.mechanism == mechanism


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: F.cross_entropy(x, torch.tensor([-100, 1, 2, 3])),
        lambda x: torch.where(x > 9, (x - x.detach()).log(), x).sum(),
        lambda x: (x.square() + 1).sqrt().log().mean() / 3,
        lambda x: F.mse_loss(x, torch.zeros(4, 5)),
    ],
)
def test_good_losses_have_no_origin(compute: Loss) -> None:
    loss = compute(outputs())
    assert loss.isfinite()
    assert LossGraph(loss, 0).find(backward=False) is None


def test_what_the_model_computed_is_not_read() -> None:
    x = (outputs() * 0).log()
    since = torch._C._autograd._get_sequence_nr()
    assert LossGraph(x.sum(), since).find(backward=False) is None
    assert LossGraph(x.sum(), 0).find(backward=False) is not None


def test_operands_behind_hooks_are_not_unpacked_and_large_ones_not_kept() -> None:
    def never(_: Any) -> Tensor:
        raise AssertionError("unpacked")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, never):
        hooked = (outputs() * 0).log().sum()
    assert LossGraph(hooked, 0).find(backward=False) is None
    large = torch.zeros(MAX_BYTES // 4 + 1, requires_grad=True)
    assert LossGraph((large * 1).log().sum(), 0).find(backward=False) is None


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loop_without_a_closure_names_it(tmp_path: Path, parts: int) -> None:
    """Also where several modules are called, which cannot be replayed as one."""
    torch.manual_seed(0)
    modules = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 5)])
    optimizer = torch.optim.AdamW(modules.parameters())
    model = nn.Sequential(*modules)
    found = []
    guards = Guard(model if parts == 1 else modules, optimizer, run_dir=tmp_path / "run")
    with guards as guard:
        for i in range(6):
            x, y = torch.randn(4, 8), torch.full((4,), -100 if i == 3 else 1)
            logits = model(x) if parts == 1 else modules[1](modules[0](x))
            guard.backward(F.cross_entropy(logits, y))
            found.append(guard.step())
    assert [v.ok for v in found] == [True, True, True, False, True, True]
    (record,) = (tmp_path / "run" / "incidents").glob("*/incident.json")
    incident = Incident.from_json(json.loads(record.read_text()))
    assert incident.location is not None
    assert (incident.location.op, incident.location.mechanism) == ("cross_entropy", "empty-reduction")
    assert Path(incident.location.file) == Path(__file__)
    assert incident.location.verified is None

"""What a guard needs where it does not own the loop: models that are copied, masks, several models, its own mark."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanproof import Guard
from nanproof.errors import NonFiniteError
from nanproof.guard import forward_capture
from nanproof.guard.external import attach
from nanproof.guard.guard import guard_of
from nanproof.guard.policy import Policy
from support.runs import Net, digest, guarded, loss_of, make_batches, seed_everything, with_faults

INF = float("inf")


class Masked(nn.Module):
    """A buffer full of infinities on purpose, as causal masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.mask).softmax(-1)


def test_a_mask_of_infinities_is_no_damage(tmp_path: Path) -> None:
    model = Masked()
    guard = guarded(model, torch.optim.SGD(model.parameters(), lr=0.1), snapshot_every=1)
    for _ in range(3):
        assert guard.step(lambda: model(torch.randn(4, 4)).square().mean()).ok
    assert guard.epoch().ok
    guard.save(tmp_path / "a.pt")
    guard.resume(tmp_path / "a.pt")
    model.linear.weight.data[0, 0] = INF  # what is not a buffer of that kind is looked at as before
    with pytest.raises(NonFiniteError, match=r"parameter linear\.weight"):
        guard.save(tmp_path / "b.pt")


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_are_never_infinite_on_purpose(kind: type[nn.Module]) -> None:
    module = kind(4, affine=True, track_running_stats=True)
    module.running_var[1] = INF
    with pytest.raises(NonFiniteError, match="buffer running_var"):
        Guard(module, torch.optim.SGD(module.parameters(), lr=0.1))


def test_a_mask_with_nan_is_damage() -> None:
    model = Masked()
    model.mask[0, 1] = float("nan")
    with pytest.raises(NonFiniteError, match="buffer mask"):
        Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_copies_of_a_guarded_model_are_not_guarded() -> None:
    model = Net()
    guard = guarded(model, torch.optim.SGD(model.parameters(), lr=0.1), modules=["first"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.randn(6, 8))
        assert not guard._engine.before.taken
    model(torch.randn(6, 8))
    assert guard._engine.before.taken


def test_several_models_without_a_closure_are_undone_too() -> None:
    clean = make_batches(12)

    def run(batches: list) -> str:  # type: ignore[type-arg]
        seed_everything()
        models = [Net(), nn.Linear(4, 4)]
        optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-2)
        guard = guarded(models, optimizer, spike_window=16)
        for b in batches:
            guard.backward(loss_of(nn.Sequential(*models), b), batch=b)
            guard.step()
        return digest(nn.ModuleList(models), [optimizer])

    assert run(with_faults(clean, {9: "nan"})) == run(clean)


def test_an_optimizer_knows_its_open_guard() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert guard_of(optimizer) is None
    guard = Guard(model, optimizer)
    assert guard_of(optimizer) is guard
    guard.close()
    assert guard_of(optimizer) is None


def test_large_gradients_of_outputs_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of an LLM's logits would otherwise live until the step."""
    monkeypatch.setattr(forward_capture, "KEPT_BYTES", 100)
    model = nn.Linear(4, 4)
    loop = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for rows, kept in ((2, 1), (50, 0)):
        loss = model(torch.randn(rows, 4)).square().mean()
        loop.passes.before_backward(loss)
        loss.backward()
        loop.passes.after_backward()
        assert loop.passes.step is not None
        assert len(loop.passes.step.passes[-1].capture._gradients) == kept
        optimizer = loop.guard.training.optimizers[0]
        loop.step(optimizer, optimizer.step)


class Sink(torch.autograd.Function):
    """Like DDP's with find_unused_parameters: outputs that the loss leaves out get no gradient at all."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(o.clone() for o in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def test_an_output_that_the_loss_leaves_out_may_get_no_gradient() -> None:
    class Heads(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return Sink.apply(super().forward(x), x.sum() * self.bias)

    model = Heads(4, 4)
    loop = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.randn(2, 4))[0].square().mean()
    loop.passes.before_backward(loss)
    loss.backward()
    loop.passes.after_backward()
    assert loop.passes.step is not None
    assert set(loop.passes.step.passes[-1].capture._gradients) == {0}


def test_a_bad_state_that_is_only_observed_does_not_hold_a_guarded_loop_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    guard = guarded(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="observe", snapshot_every=1)
    model[1].running_var[0] = INF
    for _ in range(4):
        guard.step(lambda: model(torch.randn(8, 4)).square().mean())
    assert guard.tally.updates == 4


def test_a_bad_state_that_is_only_observed_does_not_hold_steps_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = attach(model, optimizer, policy=Policy.observe(snapshot_every=1))
    model[1].running_var[0] = INF
    for _ in range(4):
        loss = model(torch.randn(8, 4)).square().mean()
        loop.passes.before_backward(loss)
        loss.backward()
        loop.passes.after_backward()
        loop.step(optimizer, optimizer.step)
        assert loop.carried_out
    assert loop.guard.tally.updates == 4


def test_autocast_around_the_model_is_part_of_what_is_played_again() -> None:
    model = nn.Linear(4, 4, bias=False)
    loop = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="observe")
    with torch.no_grad():
        model.weight.fill_(1e4)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.full((2, 4), 10.0)).mean()
    assert loss.isinf()
    loop.passes.before_backward(loss)
    loss.backward()
    loop.passes.after_backward()
    assert loop.passes.step is not None
    play = loop.passes.step.passes[-1].capture.step()
    assert play is not None
    assert play().isinf()  # in float32 it would be 4e5

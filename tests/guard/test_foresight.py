"""Early warnings in a guarded run: each signal against a plain computation, and a warning never changes the run."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanproof import Guard, Policy
from nanproof.errors import GuardStop, UsageError
from nanproof.guard.foresight import Outputs
from nanproof.guard.options import Watch
from nanproof.guard.precursors import SAMPLE, Precursors
from support.runs import seed_everything


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def climb(guard: Guard, model: nn.Module, steps: int) -> None:
    """A learning rate that doubles every forty steps: it ends badly, and slowly."""
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        for group in guard.training.optimizers[0].param_groups:
            group["lr"] = 0.01 * 2 ** (step / 40)
        x = torch.randn(16, 4, generator=draw)
        guard.step(lambda x=x: (model(x)[:, 0] - x.sin().sum(1)).square().mean() + 0 * torch.rand(()))


def dying(run_dir: Path | None = None, steps: int = 185, **options: Any) -> tuple[nn.Module, Guard]:
    seed_everything()
    model = small()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), run_dir=run_dir, **options)
    climb(guard, model, steps)
    return model, guard


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "sgd", "rmsprop"])
def test_each_signal_is_what_a_plain_computation_gives(kind: str) -> None:
    seed_everything()
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[kind]
    optimizer = make(model.parameters(), lr=0.01)
    precursors = Precursors(list(model.named_parameters()), [optimizer])
    before: dict[str, Tensor] = {}
    for update in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        names, values = precursors.read() or ([], torch.empty(0))
        found = dict(zip(names, values.tolist(), strict=True))
        for name, p in model.named_parameters():
            if p.dim() < 2:
                assert not any(k.endswith(f"/{name}") for k in found), "biases are left out"
                continue
            assert p.grad is not None
            assert found[f"grad_norm/{name}"] == pytest.approx(p.grad.norm().item(), rel=1e-5)
            if update:
                change = (p - before[name]).norm() / before[name].norm()
                assert found[f"update_ratio/{name}"] == pytest.approx(change.item(), rel=1e-4)
            if update and kind != "sgd":
                state = optimizer.state[p]
                v = state["exp_avg_sq"] / (1 - 0.999**update) if kind == "adamw" else state["square_avg"]
                assert found[f"g2_over_v/{name}"] == pytest.approx((p.grad**2 / v).mean().item(), rel=1e-3)
        if update:
            still = torch.cat([(p == before[n]).flatten() for n, p in model.named_parameters() if p.dim() == 2])
            assert found["unmoved"] == pytest.approx(still.float().mean().item())
        assert any(k.startswith("g2_over_v/") for k in found) == (kind != "sgd" and update > 0)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()


def test_a_large_matrix_is_sampled_evenly() -> None:
    w = nn.Parameter(torch.arange(10.0 * SAMPLE).reshape(10, SAMPLE))
    precursors = Precursors([("w", w)], [])
    w.grad = torch.ones_like(w)
    precursors.read()
    with torch.no_grad():
        w.view(-1)[1::10] += 1.0  # between the samples: not seen
        w.view(-1)[::10] *= 2.0
    names, values = precursors.read() or ([], torch.empty(0))
    found = dict(zip(names, values.tolist(), strict=True))
    assert found["update_ratio/w"] == pytest.approx(1.0)
    assert found["grad_norm/w"] == pytest.approx(w.grad.norm().item())


def test_the_share_of_elements_that_do_not_move() -> None:
    w = nn.Parameter(torch.ones(8, 8))
    precursors = Precursors([("w", w)], [])
    precursors.read(gradients=False)
    with torch.no_grad():
        w[:2] += 1
    names, values = precursors.read(gradients=False) or ([], torch.empty(0))
    assert dict(zip(names, values.tolist(), strict=True))["unmoved"] == 0.75


class Mixed(nn.Module):
    """One output in float16 that is large, others in float32 that are larger."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.tiny = nn.Linear(4, 4), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.tiny(self.narrow((self.wide(x * 1e6) / 1e3).half()).float() * 1e-6)


def test_the_outputs_that_could_overflow_first_are_chosen(tmp_path: Path) -> None:
    seed_everything()
    model = Mixed()
    watch = Watch(automatic=1)
    with Guard(model, torch.optim.SGD(model.parameters(), lr=1e-9), run_dir=tmp_path, watch=watch) as guard:
        for _ in range(3):
            guard.step(lambda: model(torch.ones(2, 4)).mean())
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    assert [[k for k in line if k.startswith("absmax/")] for line in lines] == [["absmax/narrow"]] * 3
    plain = model.narrow((model.wide(torch.ones(2, 4) * 1e6) / 1e3).half()).abs().max().item()
    assert lines[-1]["absmax/narrow"] == pytest.approx(plain, rel=1e-3)
    assert not any(m._forward_hooks for m in model.modules()), "closed: no hook is left"


def test_a_module_called_twice_counts_with_its_largest_output() -> None:
    model = nn.ModuleDict({"same": nn.Identity()})
    outputs = Outputs(model, ["same"], 0)
    outputs.listen(True)
    for value in (3.0, -7.0, 2.0):
        model["same"](torch.tensor([value]))
    assert outputs.seen["same"].item() == 7.0


# --- the run ----------------------------------------------------------------------------------------------------------


def test_a_warning_comes_first_and_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanproof"):
        _, guard = dying(tmp_path)
        guard.close()
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    events = [line for line in lines if line.get("event") == "warning"]
    assert events
    assert {t["name"].partition("/")[0] for e in events for t in e["trends"]} >= {"update_ratio"}
    risks = [line["risk"] for line in lines if "loss" in line]
    assert len(risks) == 185
    assert all(0 <= r <= 1 for r in risks)
    assert caplog.text.count("early warning") == sum(e["severity"] == "warning" for e in events)
    assert guard.tally.warnings["forecast"] == len(events)
    assert "forecast" in guard.summary()


def test_a_warning_never_changes_the_run() -> None:
    """Bit for bit the same weights, moments and random states, warned or not."""
    states = []
    for automatic, how in ((8, "snapshot"), (8, "nothing"), (0, "nothing")):
        model, guard = dying(policy=Policy(on_warning=how), watch=Watch(automatic=automatic))  # type: ignore[arg-type]
        assert bool(guard.tally.warnings) == bool(automatic) or not automatic
        moments = [s["momentum_buffer"] for s in guard.training.optimizers[0].state.values()]
        states.append([*(p.detach().clone() for p in model.parameters()), *moments, torch.get_rng_state()])
        guard.close()
    for other in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))


class Reads(TorchDispatchMode):
    """Counts the reads of device values by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_host_read_of_its_own() -> None:
    counts = []
    for automatic in (8, 0):
        with Reads() as reads:
            _, guard = dying(steps=45, watch=Watch(automatic=automatic))
        counts.append(reads.count)
        guard.close()
    assert counts[0] == counts[1] > 0


def test_a_snapshot_is_taken_and_the_next_checkpoint_is_kept(tmp_path: Path) -> None:
    seed_everything()
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    guard = Guard(model, optimizer, policy=Policy(snapshot_every=10_000))
    taken = guard._engine.snapshots.count
    climb(guard, model, 175)
    assert guard.tally.warnings
    assert guard._engine.snapshots.count > taken
    for i in range(6):
        guard.save(tmp_path / f"{i}.pt")
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["0.pt", "3.pt", "4.pt", "5.pt"]
    guard.close()


def test_the_policy_may_stop_at_a_warning() -> None:
    with pytest.raises(GuardStop, match="the policy stops at a warning: the update of"):
        dying(policy=Policy(on_warning="stop"))


def test_the_policy_may_let_islands_open() -> None:
    _, guard = dying(policy=Policy(on_warning="heal"))
    assert guard._engine.healer.mode == "open"
    guard.close()


def test_an_unknown_answer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"on_warning is 'panic'\. Next: use one of snapshot, heal, stop, nothing"):
        Policy(on_warning="panic")  # type: ignore[arg-type]


def test_a_number_of_the_loop_is_logged_and_forecast(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seed_everything()
    model = small()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-4), run_dir=tmp_path)
    for step in range(60):
        guard.observe("entropy", torch.tensor(0.7 * 0.9 ** max(0, step - 30)), limit=0.005)
        guard.step(lambda: model(torch.ones(2, 4)).square().mean())
    with pytest.raises(UsageError, match=r"guard.observe\('entropy'\) got 2 values\. Next: give a single number"):
        guard.observe("entropy", torch.ones(2))
    guard.close()
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    logged = [line["entropy"] for line in lines if "entropy" in line]
    assert logged[35] == pytest.approx(0.7 * 0.9**5)
    assert len(logged) == 60
    assert "the entropy falls to 0.9 × per step and reaches 0.005 in about" in caplog.text
    assert math.isfinite(guard.tally.updates)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func itself
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # torch 2.15, of its own code
def test_a_step_with_forward_mode_derivatives_is_guarded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    guard = Guard(model, torch.optim.Adam(model.parameters()))

    def loss(target: Tensor) -> Tensor:
        x = torch.ones(4, 2)
        return (torch.func.jvp(model, (x,), (x,))[1] - target).square().mean()

    targets = [torch.ones(4, 1) * (float("nan") if i == 3 else 1) for i in range(6)]
    assert [guard.step(lambda t=t: loss(t)).ok for t in targets] == [True, True, True, False, True, True]

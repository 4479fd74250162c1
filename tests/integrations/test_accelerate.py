"""Accelerate loops with the adapter: the loop stays as it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nanproof import Policy
from nanproof.errors import UsageError
from nanproof.files import read_jsonl
from nanproof.integrations.accelerate import guard_accelerator
from run.launch import different, incidents, is_finite

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Run:
    """A prepared loop over 128 samples, of which number 61 is bad."""

    def __init__(self, *, accumulate: int = 1, drop: int = 0, scaler: bool = False, folder: Path | None = None) -> None:
        torch.manual_seed(0)
        x = torch.randn(128, 8)
        y = x.sum(1, keepdim=True)
        x[61, 3] = float("nan")
        rows = [i for i in range(128) if not drop or i // drop != 61 // drop]
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, project_dir=folder)
        if scaler:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = DataLoader(TensorDataset(x[rows], y[rows]), batch_size=8)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            net, optimizer, loader, scheduler
        )
        self.losses: list[float] = []

    def guard(self, **options: Any) -> Any:
        return guard_accelerator(self.accelerator, self.model, self.optimizer, scheduler=self.scheduler, **options)

    def train(self) -> None:
        torch.manual_seed(2)
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(x), y)
                self.losses.append(float(loss.detach()))
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def state(self) -> list[Any]:
        scale = self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None
        states = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        return [*states, scale, torch.get_rng_state()]


@pytest.mark.parametrize("scaler", [False, True], ids=["fp32", "scaler"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_bad_step_never_happened(accumulate: int, scaler: bool, tmp_path: Path) -> None:
    never = Run(accumulate=accumulate, drop=8 * accumulate, scaler=scaler)
    never.train()
    run = Run(accumulate=accumulate, scaler=scaler)
    guard = run.guard(run_dir=tmp_path)
    run.train()
    guard.close()
    assert different(run.state(), never.state()) == []
    (incident,) = incidents(tmp_path)
    assert incident["verdict"]["level"] == "input"
    assert [t["first_bad"] for t in incident["tensors"] if t["name"].startswith("batch")] == [[5, 3]]
    assert incident["notes"] == ["DataLoader batch 7 (dataset indices 56–63)"]
    # a window's loss is the mean of its losses, as they were handed over
    logged = next(read_jsonl(tmp_path / "training_log.jsonl"))["loss"]
    assert logged == pytest.approx(sum(run.losses[:accumulate]) / accumulate)


def test_bare_it_dies() -> None:
    run = Run()
    run.train()
    assert not is_finite(run.model.state_dict())


def test_a_poisoned_state_is_not_saved_and_is_healed(tmp_path: Path) -> None:
    run = Run()
    guard = run.guard()
    run.accelerator.save_state(str(tmp_path / "good"))
    run.model[1].running_mean[0] = float("nan")
    run.accelerator.save_state(str(tmp_path / "bad"))
    run.accelerator.save_model(run.model, str(tmp_path / "worse"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good"]
    assert len(guard.guard.tally.blocked) == 2
    run.train()
    assert is_finite(run.model.state_dict())
    guard.close()


def test_the_guards_memory_travels_with_the_state(tmp_path: Path) -> None:
    run = Run()
    first = run.guard(policy=Policy(spike_window=8))
    run.train()
    run.accelerator.save_state(str(tmp_path / "a"))
    memory = first.state_dict()
    first.close()
    fresh_run = Run()
    second = fresh_run.guard(policy=Policy(spike_window=8))
    fresh_run.accelerator.load_state(str(tmp_path / "a"))
    assert second.state_dict() == memory
    assert (second.guard.tally.steps, second.guard.tally.updates) == (16, 15)
    second.close()


def test_everything_is_given_back(tmp_path: Path) -> None:
    run = Run()
    run.guard().close()
    names = ("backward", "clip_grad_norm_", "clip_grad_value_", "save_state", "save_model")
    assert not set(names) & set(vars(run.accelerator))
    assert "step" not in vars(run.optimizer)
    assert not run.model._forward_hooks
    assert "_get_iterator" not in vars(run.loader.base_dataloader)


def test_an_optimizer_that_was_not_prepared() -> None:
    run = Run()
    with pytest.raises(UsageError, match=r"AdamW was not prepared\. Next: pass what accelerator\.prepare returned"):
        guard_accelerator(run.accelerator, run.model, [run.optimizer.optimizer])

"""Hugging Face Trainer with the callback: the story of the NaN sample, accumulation, saves, resuming."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, SequentialSampler

from nanproof import Policy, scan
from nanproof.errors import UsageError
from nanproof.files import read_jsonl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from nanproof.integrations.transformers import GuardCallback

from run.launch import different, incidents, is_finite

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
BAD = 97


class Samples(Dataset):  # type: ignore[type-arg]
    """128 samples in order; the one at BAD has a NaN. Without it, its whole part of ``drop`` samples is missing."""

    def __init__(self, drop: int = 0) -> None:
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(128, 4, generator=g)
        self.x[BAD, 2] = float("nan")
        self.rows = [i for i in range(128) if not drop or i // drop != BAD // drop]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = self.x[self.rows[i]]
        return {"x": x, "labels": x.nan_to_num().sum()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.body(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def make(folder: Path, data: Samples, *callbacks: Any, eval_dataset: Any = None, **options: Any) -> InOrder:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    given = {"max_steps": 16, "save_strategy": "no", "logging_steps": 1, **options}
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=8,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **given,
    )
    return InOrder(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
        optimizers=(optimizer, schedule),
    )


def train(trainer: Trainer, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(**options)


def state(trainer: Trainer) -> list[Any]:
    return [trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()]


def checkpoints(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "out").glob("checkpoint-*"))


SAVING = {"save_strategy": "steps", "save_steps": 6, "save_total_limit": 1, "max_steps": 13}


def test_before(tmp_path: Path) -> None:
    """Without us: the loss is logged as 0.0, every weight is NaN, the good checkpoint is deleted for the bad one."""
    trainer = make(tmp_path, Samples(), **{**SAVING, "max_steps": 16, "save_steps": 8})
    train(trainer)
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged[12:] == [0.0] * 4
    assert all(not torch.isfinite(p).any() for n, p in trainer.model.named_parameters())
    assert checkpoints(tmp_path) == ["checkpoint-16"]
    assert scan(tmp_path / "out" / "checkpoint-16").health == "corrupt"


def test_after(tmp_path: Path) -> None:
    """With the callback: finite weights, a good checkpoint, the batch and the value named, the raw loss recorded."""
    trainer = make(
        tmp_path, Samples(), GuardCallback(run_dir=tmp_path / "run"), **{**SAVING, "max_steps": 16, "save_steps": 8}
    )
    train(trainer)
    assert is_finite(state(trainer))
    assert checkpoints(tmp_path) == ["checkpoint-16"]
    assert scan(tmp_path / "out" / "checkpoint-16" / "model.safetensors").health == "healthy"
    (incident,) = incidents(tmp_path / "run")
    assert incident["verdict"]["level"] == "input"
    batch = next(t for t in incident["tensors"] if t["name"] == "batch x")
    assert (batch["nan"], batch["first_bad"]) == (1, [BAD % 8, 2])
    assert incident["location"]["why"].startswith("batch x was already non-finite: 1 NaN of 32 values")
    log = list(read_jsonl(tmp_path / "run" / "training_log.jsonl"))
    assert (log[12]["loss"], log[12]["action"]) == ("NaN", "skip")
    assert (trainer.state.global_step, log[-1]["step"], log[-1]["update"]) == (16, 16, 15)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_bad_step_never_happened(accumulate: int, tmp_path: Path) -> None:
    steps = 128 // 8 // accumulate
    options = {"gradient_accumulation_steps": accumulate, "num_train_epochs": 1, "max_steps": -1}
    guarded = make(tmp_path, Samples(), GuardCallback(run_dir=tmp_path / "run"), **options)
    train(guarded)
    never = make(tmp_path, Samples(drop=8 * accumulate), **options)
    train(never)
    assert (guarded.state.global_step, never.state.global_step) == (steps, steps - 1)
    assert different(state(guarded), state(never)) == []
    log = list(read_jsonl(tmp_path / "run" / "training_log.jsonl"))
    said = [line["loss"] for line in guarded.state.log_history if "loss" in line]
    assert [line["loss"] for line in log][:5] == pytest.approx(said[:5])


class Poison(TrainerCallback):
    """Damages the weights behind everybody's back after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step:
            model.body[1].running_var[3] = float("inf")


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_a_poisoned_checkpoint_is_not_written_and_the_good_one_is_kept(strategy: str, tmp_path: Path) -> None:
    when = {
        "steps": {"save_steps": 4},
        "best": {"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "runtime"},
    }[strategy]
    guard = GuardCallback(run_dir=tmp_path / "run")
    options = {"save_strategy": strategy, "save_total_limit": 1, "max_steps": 8, **when}
    trainer = make(tmp_path, Samples(), Poison(7), guard, eval_dataset=Samples(drop=8), **options)
    trainer._determine_best_metric = lambda **_: True  # type: ignore[method-assign]
    train(trainer)
    assert checkpoints(tmp_path) == ["checkpoint-4"]
    assert scan(tmp_path / "out" / "checkpoint-4").health == "healthy"
    assert guard.loop is not None
    assert all("buffer body.1.running_var [8] float32: 1 +Inf of 8" in b for b in guard.loop.guard.tally.blocked)
    assert guard.loop.guard.tally.blocked


def test_resuming_goes_on_counting_and_remembers_what_is_normal(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 14, "max_steps": 14}
    first = make(tmp_path, Samples(), GuardCallback(run_dir=tmp_path / "one", policy=Policy(spike_window=8)), **options)
    train(first)
    saved = json.loads((tmp_path / "out" / "checkpoint-14" / "trainer_state.json").read_text())
    memory = saved["stateful_callbacks"]["GuardCallback"]["attributes"]["memory"]
    assert (memory["tally"]["steps"], memory["tally"]["updates"]) == (14, 13)
    callback = GuardCallback(run_dir=tmp_path / "two", policy=Policy(spike_window=8))
    second = make(tmp_path, Samples(), callback, **{**options, "max_steps": 16})
    train(second, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-14"))
    assert callback.loop is not None
    tally = callback.loop.guard.tally
    assert (tally.steps, tally.updates, tally.actions["skip"]) == (16, 15, 1)
    log = list(read_jsonl(tmp_path / "two" / "training_log.jsonl"))
    assert [line["step"] for line in log] == [15, 16]
    whole = make(
        tmp_path, Samples(), GuardCallback(run_dir=tmp_path / "three", policy=Policy(spike_window=8)), max_steps=16
    )
    train(whole)
    assert different(state(second), state(whole)) == []


def test_callbacks_that_the_trainer_restores_keep_their_options(tmp_path: Path) -> None:
    policy = Policy(max_consecutive=2)
    again = GuardCallback(**GuardCallback(run_dir=tmp_path, policy=policy).state()["args"])
    assert again._options == {"run_dir": str(tmp_path), "policy": policy}
    json.dumps(GuardCallback(run_dir=tmp_path, policy=policy).state())


def test_a_stop_ends_training(tmp_path: Path) -> None:
    trainer = make(tmp_path, Samples(), GuardCallback(policy="strict"))
    with pytest.raises(SystemExit) as stop:
        train(trainer)
    assert stop.value.code == 66
    assert is_finite(trainer.model.state_dict())
    assert trainer.state.global_step == 12


def test_the_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    trainer = make(tmp_path, Samples(), GuardCallback(run_dir=tmp_path / "run"), max_steps=2)
    train(trainer)
    for owner, name in (
        (trainer, "save_model"),
        (trainer, "_save_checkpoint"),
        (trainer.accelerator, "backward"),
        (trainer.accelerator, "clip_grad_norm_"),
        (trainer.optimizer, "step"),
    ):
        assert name not in vars(owner)


def test_a_callback_without_its_trainer() -> None:
    with pytest.raises(UsageError, match=r"no Trainer runs this callback.*callbacks=\[GuardCallback\(\)\]"):
        GuardCallback().on_train_begin(None, None, None)  # type: ignore[arg-type]

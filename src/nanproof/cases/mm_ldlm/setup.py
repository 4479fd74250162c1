"""What both loops begin with: optimizer, schedule, records, and the checkpoint to go on from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..program import Job
from ..recording import Recorder, load_checkpoint
from ..settings import Settings
from .data import Batch, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that a loop needs, at the step where it begins."""

    model: nn.Module
    shared: Any
    """The model as the loop calls it: with several processes, with gradients averaged."""
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    recorder: Recorder
    loader: DataLoader[Batch]
    done: int
    """Steps that the checkpoint had done."""

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        return float(self.optimizer.param_groups[0]["lr"])

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        states = [part.state_dict() for part in (self.model, self.optimizer, self.scheduler)]
        self.recorder.save(step, dict(zip(("model", "optimizer", "scheduler"), states, strict=True)))


def set_up(job: Job, model: nn.Module, *, standardise: bool = False) -> Setup:
    """Begin, or go on from the checkpoint that the job names."""
    cfg = job.cfg
    optimizer = make_optimizer(model, cfg)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: learning_rate(done + 1, cfg))
    recorder = Recorder(job)
    state = load_checkpoint(job)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    done = state["step"] if state is not None else 0
    steps = Steps(
        cfg.training.batch_size, cfg.training.mode, seed=job.seed, rank=job.ranks.rank, standardise=standardise
    )
    return Setup(
        model=model,
        shared=job.ranks.share(model, unused=True),
        optimizer=optimizer,
        scheduler=scheduler,
        recorder=recorder,
        loader=steps.load(range(done + 1, job.steps + 1)),
        done=done,
    )


def learning_rate(step: int, cfg: Settings) -> float:
    """Up over the warm-up, level, and down over the last steps; as a share of the learning rate."""
    left = cfg.training.steps + 1 - step
    return float(min(1.0, step / cfg.optimizer.warmup_steps, left / max(1, cfg.optimizer.decay_steps)))


def make_optimizer(model: nn.Module, cfg: Settings) -> torch.optim.Optimizer:
    """AdamW; the gates of the hyper-connections are not decayed and learn faster, as few numbers steer many."""
    gates = [p for name, p in model.named_parameters() if "connections" in name]
    others = [p for name, p in model.named_parameters() if "connections" not in name]
    groups = [
        {"params": others, "lr": cfg.optimizer.lr, "weight_decay": cfg.optimizer.weight_decay},
        {"params": gates, "lr": cfg.optimizer.lr * cfg.optimizer.gate_lr_scale, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99))

"""What both loops begin with: model, optimizer, OneCycleLR, GradScaler, records and data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ..program import Job
from ..recording import Recorder
from ..settings import Settings
from . import advice, model_stable
from .data import LETTERS, draw_plates
from .model import ResTran


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that a loop needs."""

    model: ResTran
    shared: Any
    """The model as the loop calls it: with several processes, with gradients averaged."""
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.OneCycleLR
    scaler: torch.amp.GradScaler
    recorder: Recorder

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        return float(self.optimizer.param_groups[0]["lr"])

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        self.recorder.save(
            step,
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
            },
        )


def set_up(job: Job) -> Setup:
    cfg = job.cfg
    model = make_model(cfg).to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optimizer.lr, weight_decay=cfg.optimizer.weight_decay)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=cfg.optimizer.lr, total_steps=cfg.training.steps)
    return Setup(
        model=model,
        shared=job.ranks.share(model, unused=True),
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=torch.amp.GradScaler(job.device.type, init_scale=cfg.training.init_scale),
        recorder=Recorder(job),
    )


def make_model(cfg: Settings) -> ResTran:
    """The network of a config: original, with the clamps of the post-mortem, or stable."""
    kind = model_stable.ResTran if cfg.model.code == "stable" else advice.ResTran if cfg.advice else ResTran
    size = cfg.model
    model = kind(channels=size.channels, blocks=size.blocks, n=size.mhc_n, width=size.width, eps=size.rms_eps)
    for stage in model.stages:
        if isinstance(stage, advice.HyperConnection):
            stage.advice = cfg.advice
    return model


def load_plates(job: Job, done: int) -> DataLoader[tuple[Tensor, ...]]:
    """The batches of the steps that are left; those of a step are the same however the run came to it."""
    size = job.cfg.training.batch_size
    first = 10_000 * (100 * job.seed + job.ranks.rank)
    drawn = [draw_plates(size, torch.Generator().manual_seed(first + s)) for s in range(done + 1, job.steps + 1)]
    return DataLoader(TensorDataset(*(torch.cat(part) for part in zip(*drawn, strict=True))), batch_size=size)


def plate_loss(log_probs: Tensor, letters: Tensor) -> Tensor:
    """CTC: the letters in their order, wherever they stand."""
    size, places = log_probs.shape[:2]
    lengths = torch.full((size,), places), torch.full((size,), LETTERS)
    return F.ctc_loss(log_probs.transpose(0, 1), letters, *lengths, zero_infinity=True)

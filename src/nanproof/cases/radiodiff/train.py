"""Train the miniature of RadioDiff.

python -m nanproof.cases.radiodiff.train --config-name original --seed 0
python -m nanproof.cases.radiodiff.train --config-name stable --out runs/b --resume runs/a/checkpoints/step_000050.pt
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ... import files
from ...errors import UsageError
from ..program import Job, run_program
from ..recording import Recorder, Score, keep_code, load_checkpoint
from ..settings import Settings, load
from . import model, model_stable
from .advice import NAMES
from .diffusion import LatentDiffusion
from .maps import Maps, draw_maps

FOLDER = Path(__file__).parent
ATTENTION = {"original": model.ConditionalAttention, "stable": model_stable.ConditionalAttention}
CLOSE = 0.1
"""A cell of a map is right when its gain, from 0 to 1, is this near to the true one."""


def make_accelerator(job: Job) -> Any:
    """accelerate, told by its own config file as `accelerate launch --config_file` would be."""
    try:
        from accelerate import Accelerator
        from accelerate.commands.config.config_args import load_config_from_file
    except ImportError:
        raise UsageError("radiodiff trains with accelerate", hint="pip install 'nanproof[hf]'") from None
    if job.cfg.training.fp16 and job.device.type == "cpu":
        raise UsageError("accelerate has no fp16 on a CPU", hint="leave training.fp16 as it is, or give --device cuda")
    told = load_config_from_file(str(FOLDER / job.cfg.training.accelerate_config))
    return Accelerator(
        mixed_precision="fp16" if job.cfg.training.fp16 else str(told.mixed_precision), cpu=job.device.type == "cpu"
    )


def make_model(cfg: Settings) -> LatentDiffusion:
    if cfg.model.code not in ATTENTION:
        raise UsageError(f"there is no code {cfg.model.code!r}", hint=f"model.code is one of {', '.join(ATTENTION)}")
    if unknown := set(cfg.advice) - set(NAMES):
        raise UsageError(f"there is no advice {unknown.pop()!r}", hint=f"choose from {', '.join(NAMES)}")
    denoiser = model.Denoiser(cfg.model.dim, cfg.model.heads, cfg.model.layers, ATTENTION[cfg.model.code])
    return LatentDiffusion(denoiser, scale=cfg.model.scale_factor, amp=cfg.training.amp, advice=cfg.advice)


def make_loader(job: Job, done: int) -> DataLoader[tuple[Tensor, ...]]:
    """The batches of the steps that are left; those of a step are the same however the run came to it."""
    size, steps = job.cfg.training.batch_size, range(done + 1, job.steps + 1)
    drawn = [draw_maps(size * job.ranks.size, torch.Generator().manual_seed(10_000 * job.seed + s)) for s in steps]
    return DataLoader(TensorDataset(*(torch.cat(part) for part in zip(*drawn, strict=True))), batch_size=size)


def learning_rate(step: int, cfg: Settings) -> float:
    """Up over the warm-up, then along a cosine to ``min_lr``, as a share of the learning rate."""
    if step <= cfg.optimizer.warmup_steps:
        return step / float(cfg.optimizer.warmup_steps)
    least: float = cfg.optimizer.min_lr / cfg.optimizer.lr
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * step / cfg.training.steps))


def train(job: Job) -> None:
    """From the beginning or a checkpoint; or, as the post-mortem had it, from a milestone that the original left."""
    milestone = job.cfg.training.from_milestone
    if milestone and job.resume is None:
        cfg = load(FOLDER / "configs", "original")
        before = dataclasses.replace(job, config="original", cfg=cfg, steps=milestone, out=job.out / "original")
        run_loop(before)
        job = dataclasses.replace(job, resume=before.out / "checkpoints")
    run_loop(job)


def run_loop(job: Job) -> None:
    """The loop of the original."""
    cfg = job.cfg
    accelerator = make_accelerator(job)
    diffusion = make_model(cfg)
    trained = diffusion.denoiser
    optimizer = torch.optim.AdamW(trained.parameters(), lr=cfg.optimizer.lr, weight_decay=cfg.optimizer.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: learning_rate(done + 1, cfg))
    recorder = Recorder(job)
    keep_code(job, FOLDER)
    if job.ranks.first:
        told = FOLDER / cfg.training.accelerate_config
        files.write_atomic(job.out / told.name, told.read_bytes())
    state = load_checkpoint(job)
    if state is not None:
        trained.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    done = state["step"] if state is not None else 0
    shared, optimizer, loader = accelerator.prepare(diffusion, optimizer, make_loader(job, done))

    for step, batch in enumerate(loader, start=done + 1):
        losses = shared(Maps(*batch))
        loss = losses["loss_simple"] + losses["loss_vlb"]
        optimizer.zero_grad()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(trained.parameters(), cfg.training.grad_clip_norm)
        lr = float(optimizer.param_groups[0]["lr"])  # the one in force, whatever the config says
        optimizer.step()
        scheduler.step()
        recorder.step(
            step,
            loss=loss.item(),
            grad_norm=float(norm),
            lr=lr,
            activation=trained.largest_score,
            **{name: value.item() for name, value in losses.items()},
        )
        if step % cfg.training.save_every == 0 or step == job.steps:
            recorder.save(step, parts(trained, optimizer, scheduler))
    recorder.finish(trained, evaluate(diffusion, job))


def parts(trained: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """What a milestone holds."""
    return {"model": trained.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


def make_step(batch: Any) -> tuple[LatentDiffusion, Any]:
    """For ``nanproof locate INCIDENT --step nanproof.cases.radiodiff.train:make_step``: the original's step again."""

    def step(diffusion: LatentDiffusion, batch: Any) -> Tensor:
        losses: dict[str, Tensor] = diffusion(Maps(*batch))
        return losses["loss_simple"] + losses["loss_vlb"]

    return make_model(load(FOLDER / "configs", "original")), step


@torch.no_grad()
def evaluate(diffusion: LatentDiffusion, job: Job) -> Score:
    """Maps drawn for towns that were never seen: how many cells are right, and the mean error of a cell."""
    count = 64
    maps = draw_maps(count, torch.Generator().manual_seed(7))
    drawn = diffusion.sample(maps.known.to(job.device), torch.Generator().manual_seed(8)).cpu()
    guess = draw_maps(1024, torch.Generator().manual_seed(9)).gain.median(0).values
    error, blind = (drawn - maps.gain).abs(), (guess - maps.gain).abs()
    if job.ranks.first:
        print(
            f"map error {error.mean().item():.4f}, of the same map for every town {blind.mean().item():.4f}", flush=True
        )
    right, chance = ((e < CLOSE).float().mean().item() for e in (error, blind))
    return Score(metric="map cells right", value=right, chance=chance, target=0.55, questions=count * model.TOKENS)


if __name__ == "__main__":
    run_program("radiodiff", FOLDER, train)

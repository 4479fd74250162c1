"""Train the miniature of ResTran with mHC on made licence plates.

python -m nanproof.cases.restran_mhc.train --config-name original --seed 0 --mhc-n 4
python -m nanproof.cases.restran_mhc.train --config-name safe --out runs/a
python -m nanproof.cases.restran_mhc.train --lr 5e-3 --resume runs/a --out runs/b

Convolutions and matrix products run in float16 by autocast, on a CPU as on a GPU. The GPU has not been tried.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..program import Job, run_program
from ..recording import load_checkpoint
from ..settings import load
from . import advice
from .data import draw_plates
from .evaluate import evaluate
from .model import ResTran
from .setup import load_plates, make_model, plate_loss, set_up

FOLDER = Path(__file__).parent
FLAGS = {"--mhc-n": "model.mhc_n", "--lr": "optimizer.lr", "--batch-size": "training.batch_size"}


def train(job: Job) -> None:
    """The original's loop, from the beginning, a checkpoint, or a step of the original; or the stable one's."""
    advice.check(job.cfg.advice)
    if job.cfg.model.code == "stable":
        from .train_stable import train as train_stable

        train_stable(job)
        return
    if job.cfg.training.from_step and job.resume is None:
        cfg = load(FOLDER / "configs", "original")
        out = job.out.with_name(f"{job.out.name}-before")  # beside it: a run of its own, with its own config
        before = dataclasses.replace(job, config="original", cfg=cfg, steps=job.cfg.training.from_step, out=out)
        run_loop(before)
        job = dataclasses.replace(job, resume=before.out / "checkpoints")
    run_loop(job)


def run_loop(job: Job) -> None:
    """The loop of the original."""
    cfg, setup = job.cfg, set_up(job)
    model, optimizer, scheduler, scaler = setup.model, setup.optimizer, setup.scheduler, setup.scaler
    state = load_checkpoint(job)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
    done = state["step"] if state is not None else 0
    step = done

    for step, batch in enumerate(load_plates(job, done), start=done + 1):
        images, letters = (part.to(job.device) for part in batch)
        with torch.autocast(job.device.type, dtype=getattr(torch, cfg.training.amp_dtype)):
            log_probs, largest = setup.shared(images)
        loss = plate_loss(log_probs, letters)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.training.grad_clip_norm)
        lr, scale = setup.lr, scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        setup.recorder.step(
            step,
            loss=loss.item(),
            grad_norm=norm.item(),
            lr=lr,
            activation=largest.item(),
            scale=scale,
            skipped=scaler.get_scale() < scale,
            **model.alphas(),
        )
        if step % cfg.training.save_every == 0:
            setup.save(step)
        if setup.recorder.bad_in_a_row == cfg.training.dead_steps:
            break
    if step % cfg.training.save_every:
        setup.save(step)
    setup.recorder.finish(model, evaluate(model))


def make_step(batch: Any) -> tuple[ResTran, Any]:
    """For ``nanproof locate INCIDENT --step nanproof.cases.restran_mhc.train:make_step``: the original's step again."""

    def step(model: ResTran, batch: Any) -> Tensor:
        images, letters = batch
        with torch.autocast(images.device.type, dtype=torch.float16):
            log_probs, _ = model(images)
        return plate_loss(log_probs, letters)

    return make_model(load(FOLDER / "configs", "original")), step


def fresh_model() -> ResTran:
    """For ``nanproof diagnose --model``: the original before its first step."""
    return make_model(load(FOLDER / "configs", "original"))


def fresh_batch() -> Tensor:
    """For ``nanproof diagnose --batch``: plates to run it on."""
    images, _ = draw_plates(16, torch.Generator().manual_seed(0))
    return images


if __name__ == "__main__":
    run_program("restran-mhc", FOLDER, train, FLAGS)

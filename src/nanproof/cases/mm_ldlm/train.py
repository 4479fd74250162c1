"""Train the miniature of MM-LDLM.

python -m nanproof.cases.mm_ldlm.train --config-name original --seed 0
torchrun --nproc-per-node 2 -m nanproof.cases.mm_ldlm.train --config-name stable optimizer.lr=5e-3
NPROC_PER_NODE=2 OPTIMIZER_LR=2e-3 python -m nanproof.cases.mm_ldlm.train training.mode=t2l
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ..program import Job, run_program
from ..settings import Settings, load
from . import advice
from .data import Batch
from .evaluate import evaluate
from .losses import losses
from .model import MMDiT
from .setup import set_up

FOLDER = Path(__file__).parent


def make_model(cfg: Settings) -> MMDiT:
    """Weights, and with them everything else, in the dtype of the config."""
    size = cfg.model
    model = MMDiT(width=size.width, heads=size.heads, depth=size.depth, streams=size.streams)
    return model.to(getattr(torch, cfg.training.dtype))


def find_losses(model: Any, batch: Batch, cfg: Settings) -> tuple[dict[str, Tensor], Tensor]:
    """The losses of a batch by name, and the largest value in the residual streams."""
    dtype = getattr(torch, cfg.training.dtype)
    seen = batch.seen_latents
    if "normalize_latents" in cfg.advice:
        seen = advice.normalize_latents(seen)
    logits, prediction, largest = model(batch.seen_text, seen.to(dtype), batch.times.to(dtype))
    if "eps_in_masked_mean" in cfg.advice and cfg.training.mode == "l2t":
        return {"text_loss": advice.eps_in_masked_mean(logits, batch)}, largest
    return losses(logits, prediction, batch, cfg.training.mode, cfg.loss.latent_weight), largest


def train(job: Job) -> None:
    """The original's loop, or the stable one's."""
    advice.check(job.cfg.advice)
    if job.cfg.training.mode not in ("l2t", "t2l"):
        raise UsageError(f"there is no mode {job.cfg.training.mode!r}", hint="choose l2t or t2l")
    if job.cfg.model.code == "stable":
        from .train_stable import train as train_stable

        train_stable(job)
    else:
        run_loop(job)


def run_loop(job: Job) -> None:
    """The loop of the original, with the checks that the post-mortem added where the config asks for them."""
    cfg = job.cfg
    setup = set_up(job, make_model(cfg).to(job.device))
    model, optimizer, recorder = setup.model, setup.optimizer, setup.recorder
    for step, batch in enumerate(setup.loader, start=setup.done + 1):
        if recorder.bad_in_a_row == cfg.training.dead_steps:
            break  # the real one went on like this for 98,000 steps
        batch = Batch(*(part.to(job.device) for part in batch))
        parts, largest = find_losses(setup.shared, batch, cfg)
        loss = torch.stack(list(parts.values())).sum()
        seen: dict[str, Any] = {"loss": loss.item(), "lr": setup.lr, "activation": largest.item()}
        seen |= {name: part.item() for name, part in parts.items()}
        if "clamp_loss" in cfg.advice:
            loss = advice.clamp_loss(loss)
        optimizer.zero_grad()
        if "skip_nonfinite" in cfg.advice and advice.skip_nonfinite(loss):
            recorder.step(step, **seen, grad_norm=math.nan, skipped=True)
            continue
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.training.grad_clip_norm)
        if torch.isnan(norm):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
        if not ("skip_nonfinite" in cfg.advice and advice.skip_nonfinite(norm)):
            optimizer.step()
            setup.scheduler.step()
        recorder.step(step, **seen, grad_norm=norm.item(), skipped=bool(torch.isnan(norm)))
        if step % cfg.training.save_every == 0 or step == job.steps:
            setup.save(step)
    recorder.finish(model, evaluate(model, job))


def make_step(batch: Any) -> tuple[MMDiT, Any]:
    """For ``nanproof locate INCIDENT --step nanproof.cases.mm_ldlm.train:make_step``: the original's step again."""
    cfg = load(FOLDER / "configs", "original")

    def step(model: MMDiT, batch: Any) -> Tensor:
        parts, _ = find_losses(model, Batch(**vars(batch)), cfg)
        return parts["text_loss"]

    return make_model(cfg), step


if __name__ == "__main__":
    run_program("mm-ldlm", FOLDER, train)

"""The loop of the stable variant. What differs from the original's, and why:

- On resume the moments and the place in the schedule come from the checkpoint, the learning rate and the shape of the
  schedule from the config: what the log says is what the config says.
- The schedule moves only when the optimizer does: a step that the scaler leaves out is no step.
- A loss that is not finite ends the run before anything is saved: BatchNorm's statistics are bad from that moment on.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ...errors import NonFiniteError
from ..program import Job
from ..recording import load_checkpoint
from .evaluate import evaluate
from .setup import Setup, load_plates, plate_loss, set_up


def train(job: Job) -> None:
    cfg, setup = job.cfg, set_up(job)
    model, optimizer, scaler = setup.model, setup.optimizer, setup.scaler
    done = resume(job, setup)

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
        fine = job.ranks.all_agree(math.isfinite(loss.item()))
        setup.recorder.step(
            step,
            loss=loss.item(),
            grad_norm=norm.item(),
            lr=lr,
            activation=largest.item(),
            scale=scale,
            skipped=not math.isfinite(norm.item()),
            **model.alphas(),
        )
        if not fine:
            raise NonFiniteError(
                f"the loss of step {step} is not finite",
                hint=f"nanproof scan {job.out}/checkpoints; start from the last",
            )
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            setup.scheduler.step()
        if step % cfg.training.save_every == 0 or step == job.steps:
            setup.save(step)
    setup.recorder.finish(model, evaluate(model))


def resume(job: Job, setup: Setup) -> int:
    """Go on from the checkpoint that the job names, under this config's learning rate; gives the steps done."""
    state = load_checkpoint(job)
    if state is None:
        return 0
    setup.model.load_state_dict(state["model"])
    setup.optimizer.load_state_dict({**setup.optimizer.state_dict(), "state": state["optimizer"]["state"]})
    updates = state["scheduler"]["last_epoch"]
    # one before, and a step: OneCycleLR then sets the rate and the momentum of that place itself
    setup.scheduler.load_state_dict({**setup.scheduler.state_dict(), "last_epoch": updates - 1, "_step_count": updates})
    setup.scheduler.step()
    setup.scaler.load_state_dict(state["scaler"])
    return int(state["step"])

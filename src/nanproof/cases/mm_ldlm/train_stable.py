"""The loop of the stable variant. What differs from the original's, and why:

- Weights are float32 and autocast computes in bfloat16: small updates are kept.
- Latents are standardised with the statistics of the data: their scale still means something, and is near 1.
- The masked loss selects instead of multiplying, and nothing hidden is 0 and not 0/0.
- A step is judged by the norm before clipping, for Inf as for NaN, on all ranks together; a bad one is left out whole
  (no optimizer, no schedule), and after a few in a row the run ends: bad weights do not heal by skipping batches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import NonFiniteError
from ..program import Job
from .data import Batch, Mode
from .evaluate import evaluate
from .losses import latent_loss
from .model_stable import MMDiT
from .setup import set_up

ALLOWED = 5  # bad steps in a row before the run ends


def find_losses(
    logits: Tensor, prediction: Tensor, batch: Batch, mode: Mode, latent_weight: float
) -> dict[str, Tensor]:
    """What the mode trains, by name, in float32."""
    if mode == "l2t":
        hidden = torch.where(batch.mask, batch.text, -100)
        return {"text_loss": ops.masked_cross_entropy(logits.float(), hidden)}
    return {"latent_loss": latent_weight * latent_loss(prediction.float(), batch)}


def train(job: Job) -> None:
    cfg, bad_in_a_row = job.cfg, 0
    size = cfg.model
    model = MMDiT(width=size.width, heads=size.heads, depth=size.depth, streams=size.streams).to(job.device)
    setup = set_up(job, model, standardise=True)
    for step, batch in enumerate(setup.loader, start=setup.done + 1):
        batch = Batch(*(part.to(job.device) for part in batch))
        with torch.autocast(job.device.type, getattr(torch, cfg.training.dtype)):
            logits, prediction, largest = setup.shared(batch.seen_text, batch.seen_latents, batch.times)
        parts = find_losses(logits, prediction, batch, cfg.training.mode, cfg.loss.latent_weight)
        loss = torch.stack(list(parts.values())).sum()
        setup.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
        found = {"loss": loss.item(), "grad_norm": norm.item()} | {name: part.item() for name, part in parts.items()}
        bad = [name for name, value in found.items() if not math.isfinite(value)]
        fine = job.ranks.all_agree(not bad)
        setup.recorder.step(step, **found, lr=setup.lr, activation=largest.item(), skipped=not fine)
        bad_in_a_row = 0 if fine else bad_in_a_row + 1
        if bad_in_a_row > ALLOWED:
            raise NonFiniteError(
                f"{bad_in_a_row} steps in a row were not finite, the last at step {step} ({', '.join(bad)})",
                hint=f"nanproof scan {job.out}/checkpoints names the last healthy one",
            )
        if fine:
            nn.utils.clip_grads_with_norm_(model.parameters(), cfg.training.grad_clip_norm, norm)
            setup.optimizer.step()
            setup.scheduler.step()
        if fine and (step % cfg.training.save_every == 0 or step == job.steps):
            setup.save(step)
    setup.recorder.finish(model, evaluate(model, job, standardise=True))

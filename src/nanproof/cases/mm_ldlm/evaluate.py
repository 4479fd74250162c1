"""What a trained model can do on data that it has not seen."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..program import Job
from ..recording import Score
from . import advice
from .data import MASK, draw_batch

PAIRS = 256


@torch.no_grad()
def evaluate(model: nn.Module, job: Job, *, standardise: bool = False) -> Score:
    """``l2t``: tokens read out of latents. ``t2l``: how much of the latents' variance the text explains."""
    mode, dtype = job.cfg.training.mode, next(model.parameters()).dtype
    batch = draw_batch(PAIRS, mode, torch.Generator().manual_seed(7), standardise=standardise)
    seen = advice.normalize_latents(batch.seen_latents) if "normalize_latents" in job.cfg.advice else batch.seen_latents
    text, times = batch.seen_text, batch.times
    if mode == "l2t":  # the whole text at once, from nothing but the latents
        text, times = torch.full_like(batch.text, MASK), torch.tensor([[1.0, 0.0]]).expand(PAIRS, -1)
    shown = (text, seen.to(dtype), times.to(dtype))
    logits, prediction, _ = (out.cpu() for out in model(*(part.to(job.device) for part in shown)))
    if mode == "l2t":
        answered = logits.isfinite().all(-1)
        right = ((logits.argmax(-1) == batch.text) & answered).float().mean().item()
        return Score(metric="token accuracy", value=right, chance=0.25, target=0.9, questions=batch.text.numel())
    error = (prediction.float() - batch.latents).square().mean() / batch.latents.var(0).mean()
    explained = 1 - error.item()
    return Score(
        metric="latent variance explained",
        value=explained if math.isfinite(explained) else -math.inf,
        chance=0.0,
        target=0.5,
        questions=batch.latents.numel(),
    )

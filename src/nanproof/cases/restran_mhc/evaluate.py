"""How many plates are read without a mistake."""

from __future__ import annotations

import torch
from torch import nn

from ..recording import Score
from .data import GLYPHS, LETTERS, draw_plates, read_plates


@torch.no_grad()
def evaluate(model: nn.Module) -> Score:
    """256 plates that were never seen, in float32, with the statistics that BatchNorm has kept."""
    device = next(model.parameters()).device
    images, letters = draw_plates(256, torch.Generator().manual_seed(7))
    model.eval()
    log_probs, _ = model(images.to(device))
    model.train()
    answered = log_probs.isfinite().all(-1).all(-1).tolist()
    read = read_plates(log_probs)
    right = sum(a and r == t for a, r, t in zip(answered, read, letters.tolist(), strict=True))
    return Score(
        metric="plate accuracy", value=right / len(read), chance=GLYPHS**-LETTERS, target=0.9, questions=len(read)
    )


@torch.no_grad()
def settle_statistics(model: nn.Module, batches: int = 50) -> None:
    """Collect BatchNorm's running statistics again, in float32, from plates of the kind that it was trained with."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    source = torch.Generator().manual_seed(8)
    model.train()
    for _ in range(batches):
        model(draw_plates(16, source)[0])

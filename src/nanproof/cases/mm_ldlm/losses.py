"""The losses of the original."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .data import Batch, Mode


def text_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Masked diffusion: cross-entropy of the hidden tokens."""
    each = F.cross_entropy(logits.flatten(0, 1), batch.text.flatten(), reduction="none").view_as(batch.mask)
    return (each * batch.mask).sum() / batch.mask.sum()


def latent_loss(prediction: Tensor, batch: Batch) -> Tensor:
    """Squared error of the clean latents."""
    return F.mse_loss(prediction, batch.latents.to(prediction.dtype))


def losses(logits: Tensor, prediction: Tensor, batch: Batch, mode: Mode, latent_weight: float) -> dict[str, Tensor]:
    """What the mode trains, by name: hidden text from latents, or noised latents from text."""
    if mode == "l2t":
        return {"text_loss": text_loss(logits, batch)}
    return {"latent_loss": latent_weight * latent_loss(prediction, batch)}

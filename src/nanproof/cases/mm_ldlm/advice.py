"""What the post-mortem prescribed, one function each, switched on by ``advice:`` in the config.

They stand here as they were written down, so that a run can show what each of them does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UsageError
from .data import Batch

NAMES = ("normalize_latents", "eps_in_masked_mean", "clamp_loss", "skip_nonfinite")


def check(names: Sequence[str]) -> None:
    """A word that is no advice is a mistake of the one who typed it."""
    for name in names:
        if name not in NAMES:
            raise UsageError(f"there is no advice {name!r}", hint=f"choose from {', '.join(NAMES)}")


def normalize_latents(latents: Tensor) -> Tensor:
    """Bring every latent vector to length 1."""
    return F.normalize(latents, dim=-1)


def eps_in_masked_mean(logits: Tensor, batch: Batch) -> Tensor:
    """Never divide by zero."""
    each = F.cross_entropy(logits.flatten(0, 1), batch.text.flatten(), reduction="none").view_as(batch.mask)
    return (each * batch.mask).sum() / (batch.mask.sum().clamp(min=1) + 1e-8)


def clamp_loss(loss: Tensor) -> Tensor:
    """Never let the loss explode."""
    return loss.clamp(0, 100)


def skip_nonfinite(value: Tensor) -> bool:
    """Skip the batch when loss or gradient norm is not finite: each rank for itself."""
    return not bool(torch.isfinite(value))

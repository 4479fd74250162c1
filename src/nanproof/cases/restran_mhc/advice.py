"""What the post-mortem prescribed for the code of the mHC, switched on by ``advice:`` in the config.

It stands here as it was written down, so that a run can show what each of it does.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ...errors import UsageError
from . import model

NAMES = ("clamp_gate_logits", "clamp_sinkhorn")


def check(names: Collection[str]) -> None:
    """A word that is no advice is a mistake of the one who typed it."""
    for name in names:
        if name not in NAMES:
            raise UsageError(f"there is no advice {name!r}", hint=f"choose from {', '.join(NAMES)}")


class HyperConnection(model.HyperConnection):
    """mHC with the clamps."""

    advice: Collection[str] = ()

    def logits(self, pooled: Tensor) -> Tensor:
        found = super().logits(pooled)
        return found.clamp(-5, 5) if "clamp_gate_logits" in self.advice else found

    def sinkhorn(self, logits: Tensor) -> Tensor:
        return clamped_sinkhorn(logits) if "clamp_sinkhorn" in self.advice else super().sinkhorn(logits)


def clamped_sinkhorn(logits: Tensor) -> Tensor:
    """Never let exp overflow, never divide by zero, and where it still went wrong mix evenly."""
    matrix = torch.exp(logits.clamp(-10, 10))
    for _ in range(5):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + 1e-8)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + 1e-8)
    return torch.where(torch.isfinite(matrix), matrix, torch.full_like(matrix, 1 / matrix.shape[-1]))


class ResTran(model.ResTran):
    def connect(self, channels: int, n: int, eps: float) -> nn.Module:
        return HyperConnection(model.BasicBlock(channels), channels, n, eps)

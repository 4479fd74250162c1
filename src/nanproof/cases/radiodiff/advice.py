"""What the post-mortem prescribed, one function each, switched on by ``advice:`` in the config.

They stand here as they were written down, so that a run can show what each of them does.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = ("replace_bad_predictions", "clamp_weights", "replace_bad_loss")


def replace_bad_predictions(prediction: Tensor) -> Tensor:
    """Never let a NaN prediction reach the loss."""
    return torch.nan_to_num(prediction, nan=0.0).clamp(-1e6, 1e6)


def clamp_weights(weight: Tensor) -> Tensor:
    """Never let the weight of a time explode."""
    return weight.clamp(max=100.0)


def replace_bad_loss(loss: Tensor) -> Tensor:
    """Never let a NaN loss reach the optimizer."""
    return torch.nan_to_num(loss, nan=0.0)

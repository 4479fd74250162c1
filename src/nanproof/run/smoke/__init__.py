"""A quick test of a training before it costs anything: one forward and backward, then some steps, under full checks.

>>> import torch
>>> from torch import nn
>>> _ = torch.manual_seed(0)
>>> model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.arange(8) % 3
>>> report = smoke(model, lambda: nn.functional.cross_entropy(model(x), y), steps=5)
>>> report.ok, report.trial.chance.words
(True, 'chance is 1.099 = ln 3')
"""

from .checks import Check, SmokeReport
from .train import smoke
from .trial import Trial

__all__ = ["Check", "SmokeReport", "Trial", "smoke"]

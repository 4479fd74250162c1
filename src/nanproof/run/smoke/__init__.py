"""A quick test of a training before it costs anything: one forward and backward, then some steps, under full checks.

>>> import torch
>>> from torch import nn
>>> from nanproof.run.smoke import smoke
>>> _ = torch.manual_seed(0)
>>> model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.arange(8) % 3
>>> report = smoke(model, lambda: nn.functional.cross_entropy(model(x), y), steps=5)
>>> report.ok, report.trial.chance.words
(True, 'chance is 1.099 = ln 3')

`smoke_program` does the same to a script's own training. Names are resolved when they are first used: a script must
be the one to import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checks import Check as Check
    from .checks import SmokeReport as SmokeReport
    from .script import smoke_program as smoke_program
    from .train import smoke as smoke
    from .trial import Trial as Trial

_HOMES = {"Check": "checks", "SmokeReport": "checks", "Trial": "trial", "smoke": "train", "smoke_program": "script"}

__all__ = ["Check", "SmokeReport", "Trial", "smoke", "smoke_program"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'nanproof.run.smoke' has no attribute {name!r}")

"""nanproof keeps PyTorch training finite.

    from nanproof import Guard

    guard = Guard(model, optimizer, scheduler=scheduler, max_norm=1.0, run_dir="runs/a")
    for batch in guard.batches(loader):
        guard.step(lambda: loss_fn(model(batch.x), batch.y))

Names are resolved when they are first used, so ``import nanproof`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import scan as scan
    from .config import harden as harden
    from .diagnosing import diagnose as diagnose
    from .errors import NanproofError as NanproofError
    from .guard import Guard as Guard
    from .guard import Policy as Policy
    from .guard import tap as tap
    from .linting import lint as lint
    from .locating import locate as locate
    from .records import Finding as Finding
    from .records import Incident as Incident
    from .records import Verdict as Verdict

__version__ = "0.1.0"

_HOMES = {
    "Guard": "guard",
    "Policy": "guard",
    "tap": "guard",
    "locate": "locating",
    "scan": "checkpoint",
    "diagnose": "diagnosing",
    "lint": "linting",
    "harden": "config",
    "Verdict": "records",
    "Incident": "records",
    "Finding": "records",
    "NanproofError": "errors",
}

__all__ = [
    "Finding", "Guard", "Incident", "NanproofError", "Policy", "Verdict", "diagnose", "harden", "lint", "locate",
    "scan", "tap",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'nanproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

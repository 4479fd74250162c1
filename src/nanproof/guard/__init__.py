"""Guarding a training run: a bad step never happened.

Names are resolved when they are first used: the policy can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .guard import Guard as Guard
    from .options import Records as Records
    from .options import Watch as Watch
    from .policy import Policy as Policy
    from .taps import tap as tap

_HOMES = {"Guard": "guard", "Policy": "policy", "Records": "options", "Watch": "options", "tap": "taps"}

__all__ = ["Guard", "Policy", "Records", "Watch", "tap"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'nanproof.guard' has no attribute {name!r}")

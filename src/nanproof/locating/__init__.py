"""Finding the operation that broke a step, by replaying it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..records import Location

if TYPE_CHECKING:
    from .collectives import CollectiveRefused, no_collectives
    from .find import locate

__all__ = ["CollectiveRefused", "Location", "locate", "no_collectives"]


def __getattr__(name: str) -> Any:
    # a stored location is shown without torch
    if name in ("CollectiveRefused", "no_collectives"):
        return getattr(importlib.import_module(".collectives", __name__), name)
    if name == "locate":
        return importlib.import_module(".find", __name__).locate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

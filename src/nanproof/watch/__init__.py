"""Looking at runs while they train: in the terminal, in the browser, in a notebook. It reads; it never writes to a run.

The package itself can be called: ``nanproof.watch(guard)`` shows a live chart in a notebook.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """A module that is the function of its own name."""

    def __call__(self, guard: Any) -> Any:
        from .notebook import watch_guard

        return watch_guard(guard)


sys.modules[__name__].__class__ = _Callable

"""Doing something to a module the moment it has been imported, without importing it for the script.

>>> seen = []
>>> arrivals = Arrivals(); arrivals.await_module("colorsys", lambda m: seen.append(m.__name__))
>>> import sys; _ = sys.modules.pop("colorsys", None)
>>> import colorsys
>>> seen
['colorsys']
>>> arrivals.end()
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class Arrivals(importlib.abc.MetaPathFinder):
    """Stands first among the finders and lets the others find; only what is awaited gets a loader that tells."""

    def __init__(self) -> None:
        self._awaited: dict[str, Action] = {}
        sys.meta_path.insert(0, self)

    def await_module(self, name: str, action: Action) -> None:
        """Call ``action`` with a module: now if it is there, else once it has been imported."""
        if name in sys.modules:
            action(sys.modules[name])
        else:
            self._awaited[name] = action

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self._awaited.pop(name, None)  # so that the search below does not come back here
        if action is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            self._awaited[name] = action
            return None
        spec.loader = _Telling(spec.loader, action)
        return spec

    def end(self) -> None:
        """Await nothing any more."""
        self._awaited.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Telling(importlib.abc.Loader):
    """The module's own loader, which after the import is in its place again."""

    def __init__(self, loader: Any, action: Action) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)

"""Doing something to a module the moment it has been imported, without importing it for the script.

>>> seen = []
>>> hooks = ImportHooks(); hooks.await_module("colorsys", lambda m: seen.append(m.__name__))
>>> import sys; _ = sys.modules.pop("colorsys", None)
>>> import colorsys
>>> seen
['colorsys']
>>> hooks.end()
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .signals import heeding_ctrl_c

Action = Callable[[ModuleType], None]
_OURS = __name__.partition(".")[0] + "."


class ImportHooks(importlib.abc.MetaPathFinder):
    """Stands first among the finders and lets the others find; only what is awaited gets a loader that tells.

    Looking for a module is not importing it: libraries ask ``find_spec("torch")`` long before anybody imports it. So
    a module stays awaited until it has been executed, by whichever finder it was found. One that arrives because the
    script imports a part of nanproof waits until that part is complete: an action may need it.
    """

    def __init__(self) -> None:
        self._awaited: dict[str, Action] = {}
        self._our_depth = 0
        """How many modules of nanproof are being executed, one inside the other."""
        sys.meta_path.insert(0, self)

    def await_module(self, name: str, action: Action) -> None:
        """Call ``action`` with a module: now if it is there, else once it has been imported."""
        self._awaited[name] = action
        self._notice()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        self._notice()
        if name not in self._awaited and not (self._awaited and name.startswith(_OURS)):
            return None
        for finder in sys.meta_path:
            found = finder.find_spec(name, path, target) if finder is not self else None
            if found is not None:
                if found.loader is not None and not isinstance(found.loader, _Telling):
                    found.loader = _Telling(found.loader, self)
                return found
        return None

    def _notice(self) -> None:
        """Modules that came in past this finder, through one that stands before it."""
        for name in [n for n in self._awaited if n in sys.modules]:
            module = sys.modules[name]
            if not getattr(getattr(module, "__spec__", None), "_initializing", False):
                self._arrived(module, name)

    def _arrived(self, module: ModuleType, name: str | None = None) -> None:
        action = self._awaited.pop(name or module.__name__, None) if not self._our_depth else None
        if action is not None:
            action(module)

    def execute(self, module: ModuleType, loader: Any) -> None:
        """Execute a module by its own loader, and call what awaits it, or awaits something that it imported."""
        ours = module.__name__.startswith(_OURS)
        self._our_depth += ours
        try:
            with heeding_ctrl_c():
                loader.exec_module(module)
        finally:
            self._our_depth -= ours
        if ours:
            self._notice()
        else:
            self._arrived(module)

    def end(self) -> None:
        """Await nothing any more."""
        self._awaited.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Telling(importlib.abc.Loader):
    """The module's own loader, which after the import is in its place again."""

    def __init__(self, loader: Any, hooks: ImportHooks) -> None:
        self._loader, self._hooks = loader, hooks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._hooks.execute(module, self._loader)

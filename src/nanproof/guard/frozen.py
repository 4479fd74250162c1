"""A closure as it was when it was called: replays see the batch it saw, not the one the loop has moved on to.

>>> calls = []
>>> for batch in "ab":
...     calls.append(FrozenClosure(lambda: batch)); _ = calls[-1]()
>>> [call.again() for call in calls]
['a', 'b']

A lambda in a training loop looks its variables up when it runs. To run the micro-batches of a window again, each
needs the variables of its own turn: free variables, the globals that it names, and the batches that it fetched.
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from types import CodeType
from typing import Any

from torch import Tensor

from ..tensors import children

_UNSET = object()
_HELD = 16
"""Of each variable so many tensors are followed …"""
_LOOKED_AT = 256
"""… among so many of its parts: this is done in every step."""


class FrozenClosure:
    """Runs a closure, and runs it again later with the variables that it had."""

    def __init__(
        self,
        closure: Callable[[], Any],
        replaying: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        alone: bool = False,
    ) -> None:
        """``replaying`` makes loaders serve the same batches again. ``alone``: it is the step's only pass, so the
        loop has not moved on when it is run again, and nothing needs to be remembered."""
        self._closure, self._replaying, self._alone = closure, replaying, alone
        self._globals: dict[str, Any] = getattr(closure, "__globals__", {})
        self._cells: list[tuple[Any, Any]] = []
        self._named: dict[str, Any] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._remembered = True
        self._holds_graph = False
        """Whether a variable is part of an autograd graph, whose memory would be held with it."""

    def __call__(self) -> Any:
        returned = self._closure()
        if not self._alone:
            self.remember()
        return returned

    def remember(self) -> bool:
        """Keep the variables as they are now, so that it can be run again after the loop has moved on."""
        try:
            self._remember()
        except Exception:  # variables that cannot even be looked at: it is not run again
            self._remembered = False
        return self._remembered and not self._holds_graph

    def _remember(self) -> None:
        code = getattr(self._closure, "__code__", None)
        cells = (
            zip(code.co_freevars, getattr(self._closure, "__closure__", None) or (), strict=True)
            if code is not None
            else ()
        )
        # what the closure itself assigns (nonlocal n; n += 1) is its own, and goes on from where it is
        own = _assigned(code) if code is not None else frozenset()
        self._cells = [(c, _content(c)) for name, c in cells if name not in own]
        names = code.co_names if code is not None else ()
        self._named = {n: self._globals[n] for n in names if n in self._globals and n not in own}
        values = [v for _, v in self._cells] + list(self._named.values())
        values += getattr(self._closure, "__defaults__", None) or ()
        held = [t for v in values if _is_data(v) for t in _few_tensors(v)]
        self._holds_graph = any(t.grad_fn is not None for t in held)
        self._versions = [(t, t._version) for t in held if not t.requires_grad]

    @property
    def faithful(self) -> bool:
        """Whether the tensors that it saw still hold what they held."""
        return self._remembered and all(t._version == version for t, version in self._versions)

    @property
    def written(self) -> tuple[str, int, str]:
        """The file, first line and name of its function."""
        code = getattr(self._closure, "__code__", None)
        return (code.co_filename, code.co_firstlineno, code.co_name) if code is not None else ("", 0, "")

    def again(self) -> Any:
        """Run it with the variables and batches of its own turn; the loop's current ones come back after it."""
        now_cells = [(c, _content(c)) for c, _ in self._cells]
        now_named = {n: self._globals.get(n, _UNSET) for n in self._named}
        try:
            for cell, value in self._cells:
                _fill(cell, value)
            self._globals.update(self._named)
            with self._replaying():
                return self._closure()
        finally:
            for cell, value in now_cells:
                _fill(cell, value)
            for name, value in now_named.items():
                if value is _UNSET:
                    self._globals.pop(name, None)
                else:
                    self._globals[name] = value


@functools.cache
def _assigned(code: CodeType) -> frozenset[str]:
    stores = ("STORE_DEREF", "STORE_GLOBAL", "STORE_NAME")
    return frozenset(str(i.argval) for i in dis.get_instructions(code) if i.opname in stores)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return _UNSET


def _fill(cell: Any, value: Any) -> None:
    if value is _UNSET:
        return
    cell.cell_contents = value


def _few_tensors(value: Any) -> list[Tensor]:
    """The first tensors in a variable; a closure may name a list of all batches, or a data set of a million numbers."""
    found: list[Tensor] = []
    waiting = [value]
    for _ in range(_LOOKED_AT):
        if not waiting or len(found) == _HELD:
            break
        part = waiting.pop()
        if isinstance(part, Tensor):
            found.append(part)
        else:
            waiting += reversed([item for _, item in itertools.islice(children(part), _LOOKED_AT)])
    return found


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor | list | tuple | Mapping) or (is_dataclass(value) and not isinstance(value, type))

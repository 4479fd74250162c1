"""Which function of the same file a call runs, and in which functions anything of a training loop can happen."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from .names import called_last, last_name
from .training import calls_in, is_clip, limits_gradients

if TYPE_CHECKING:
    from .source import Module

Function = ast.FunctionDef | ast.AsyncFunctionDef

_DOES = {"backward", "manual_backward", "step", "unscale_", "unscale_gradients", "zero_grad", "update"}
_TESTS = {"isnan", "isinf", "isfinite"}


class Callees:
    """The functions and methods of one file, as they are called."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._functions: dict[tuple[ast.AST | None, str], Function] = {}
        functions: list[Function] = [*module.nodes(ast.FunctionDef), *module.nodes(ast.AsyncFunctionDef)]
        for function in functions:
            owner = module.parent(function)
            self._functions.setdefault((owner if isinstance(owner, ast.ClassDef) else None, function.name), function)
        self.eventful = self._find_eventful()
        """The functions, and the module, in which something happens: themselves or in one that they call."""

    def _find_eventful(self) -> set[ast.AST]:
        found: set[ast.AST] = set()
        callers: dict[str, set[ast.AST]] = {}
        for call in self._module.nodes(ast.Call):
            scope = self._module.function(call)
            name = called_last(call, self._module)
            if name in _DOES or name in _TESTS or is_clip(self._module, call) or limits_gradients(call):
                found.add(scope)
            callers.setdefault(name, set()).add(scope)
        queue = [s for s in found if isinstance(s, Function)]
        while queue:
            for caller in callers.get(queue.pop().name, ()):
                if caller not in found:
                    found.add(caller)
                    if isinstance(caller, Function):
                        queue.append(caller)
        return found

    def of(self, call: ast.Call) -> Function | None:
        """The function that a call runs, if it is one of this file and something happens in it."""
        func = call.func
        found: Function | None = None
        if isinstance(func, ast.Name):
            found = self._functions.get((None, func.id))
        elif isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id in ("self", "cls"):
            found = self._method(self._module.klass(call), func.attr)
        if found is not None and is_clip(self._module, call) and not _does_more(found):
            return None  # its name says it all: the call itself is what happens
        return found if found in self.eventful else None

    def named(self, name: str) -> Function | None:
        """The function with this name that is not a method."""
        found = self._functions.get((None, name))
        return found if found in self.eventful else None

    def _method(self, klass: ast.ClassDef | None, name: str) -> Function | None:
        seen: set[ast.AST] = set()
        while klass is not None and klass not in seen:
            if found := self._functions.get((klass, name)):
                return found
            seen.add(klass)
            above = {b.id for b in klass.bases if isinstance(b, ast.Name)} - {klass.name}
            klass = next((k for k in self._module.nodes(ast.ClassDef) if k.name in above), None)
        return None


def _does_more(function: Function) -> bool:
    """Whether a function for clipping does something else that matters."""
    return any(last_name(c) in ("unscale_", "unscale_gradients", "step", "backward") for c in calls_in(function))

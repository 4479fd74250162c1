"""What one call of a training loop does: differentiates, scales, unscales, clips, steps, lets the ranks agree."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .names import called_last, written
from .nonfinite import NanTest, is_infinity
from .training import (
    is_clip,
    is_collective,
    is_managed,
    is_optimizer,
    is_scaler,
    keyword,
    limits_gradients,
    names_in,
    origins,
)

if TYPE_CHECKING:
    from .source import Module

Kind = Literal[
    "backward",
    "scaled",
    "unscale",
    "clip",
    "step",
    "scaler-step",
    "scaler-update",
    "engine-step",
    "zero",
    "reduce",
    "test",
]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens on a way."""

    kind: Kind
    node: ast.AST
    name: str = ""
    """The optimizer that is stepped or zeroed, the scaler that scales, as written."""
    names: frozenset[str] = frozenset()
    """The values concerned and what they are made of: what is differentiated, reduced, tested."""
    roots: frozenset[str] = frozenset()
    """Of these the ones that the code names at this place."""
    loop: ast.AST | None = None
    """The innermost loop around it, as far as that is a loop over batches."""
    managed: bool = False
    """Done by a library that takes care of scaling: accelerator.backward, fabric.clip_gradients."""
    test: NanTest | None = None
    bad: bool = False
    """Of a test: on this way the value was found to be bad."""
    site: ast.Call | None = None
    """When it happens in a function that is called: the call, in the function that the way goes through."""

    def about(self, other: Event) -> bool:
        """Whether two events concern the same value, or one a part of the other's."""
        return bool(self.roots & other.names or self.names & other.roots)

    @property
    def place(self) -> ast.AST:
        """Where it happens, in the function that the way goes through."""
        return self.site or self.node


def event_of(module: Module, call: ast.Call, loop: ast.AST | None = None) -> Event | None:
    """What a call does, or None when it is nothing that matters here."""
    func = call.func
    name = called_last(call, module)
    if isinstance(func, ast.Attribute):
        on = func.value
        if name in ("backward", "manual_backward"):
            return _backward(module, call, func, loop)
        if name == "step":
            if call.args and is_scaler(module, on):
                return Event("scaler-step", call, written(call.args[0]), loop=loop)
            if is_optimizer(module, on):
                return Event("step", call, written(on), loop=loop, managed=bool(call.args))
            return Event("engine-step", call, written(on), loop=loop) if is_managed(on) else None
        if name in ("unscale_", "unscale_gradients", "unscale_grads"):
            return Event("unscale", call, written(call.args[0]) if call.args else "", loop=loop)
        if name == "update" and is_scaler(module, on):
            return Event("scaler-update", call, written(on), loop=loop)
        if name == "zero_grad":
            return Event("zero", call, written(on), loop=loop)
    if is_clip(module, call) and not _measures(module, call):
        on = func.value if isinstance(func, ast.Attribute) else func
        cared = is_managed(on) or is_optimizer(module, on) or any(is_scaler(module, a) for a in call.args)
        return Event("clip", call, name, loop=loop, managed=cared)
    if limits_gradients(call):
        return Event("clip", call, f"{name} of a gradient", loop=loop)
    if is_collective(call, module):
        reduced = frozenset(n for a in call.args for n in names_in(a))
        return Event("reduce", call, name, reduced, reduced, loop)
    return None


def _measures(module: Module, call: ast.Call) -> bool:
    """A clip at infinity is a way to get the norm."""
    limit = call.args[1] if len(call.args) > 1 else keyword(call, "max_norm")
    return limit is not None and is_infinity(module, limit)


def _backward(module: Module, call: ast.Call, func: ast.Attribute, loop: ast.AST | None) -> Event | None:
    on = func.value
    scaled = on if isinstance(on, ast.Call) else module.value(on)
    if isinstance(scaled, ast.Call) and isinstance(scaled.func, ast.Attribute) and scaled.args:
        by = scaled.func.value
        if scaled.func.attr == "scale" and is_scaler(module, by):
            return _of_value(module, "scaled", call, written(by), scaled.args[0], loop)
    if call.args and (is_managed(on) or func.attr == "manual_backward" or written(on) == "self"):
        return replace(_of_value(module, "backward", call, written(on), call.args[0], loop), managed=True)
    if isinstance(on, ast.Call) and written(on.func) == "super":
        return None
    return _of_value(module, "backward", call, written(on), on, loop)


def _of_value(module: Module, kind: Kind, call: ast.Call, name: str, value: ast.expr, loop: ast.AST | None) -> Event:
    return Event(kind, call, name, origins(module, value), origins(module, value, 0), loop)

"""What an expression in the code comes to, given the config: ``'fp16' if self.fp16 else 'no'`` where ``fp16: true``.

>>> from .overrides import unfold
>>> from .value import Layers, Value
>>> layers = Layers()
>>> for held in unfold("", {"trainer": {"amp": True}}, path="c.yaml", line=2, text="", origin="yaml"):
...     layers.put(held)
>>> asked = Value(key="autocast.enabled", value=None, path="t.py", line=9, text="self.amp", origin="call", known=False)
>>> reached = follow(asked, layers.settings())
>>> reached.value, reached.by.where
(True, 'c.yaml:2')
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ..floats import find_format
from .value import Plain, Settings, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A value, and the setting that decided it; ``by`` is None when the code says it itself."""

    value: Plain
    by: Value | None = None


class _Open(Exception):
    pass


def follow(value: Value | None, settings: Settings) -> Reached | None:
    """The value of an argument in a call; None when neither code nor config tells."""
    if value is None:
        return None
    if value.known:
        return Reached(value=value.value)
    try:
        tree = ast.parse(value.text.strip(), mode="eval")
        return _evaluate(tree.body, settings, 0)
    except (_Open, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr, settings: Settings, depth: int) -> Reached:
    if depth > 20:
        raise _Open
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return Reached(value=value)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            asked = _evaluate(test, settings, depth + 1)
            chosen = _evaluate(body if asked.value else orelse, settings, depth + 1)
            return Reached(value=chosen.value, by=chosen.by or asked.by)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            asked = _evaluate(operand, settings, depth + 1)
            return Reached(value=not asked.value, by=asked.by)
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
            a, b = _evaluate(left, settings, depth + 1), _evaluate(right, settings, depth + 1)
            return Reached(value=(a.value == b.value) == isinstance(op, ast.Eq), by=a.by or b.by)
        case ast.BoolOp(op=op, values=parts):
            reached = [_evaluate(p, settings, depth + 1) for p in parts]
            test_ = all if isinstance(op, ast.And) else any
            return Reached(value=test_(r.value for r in reached), by=next((r.by for r in reached if r.by), None))
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="torch"), inner]):
            return _evaluate(inner, settings, depth + 1)  # the name of a dtype
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *rest]):
            return _named(name, settings, rest, depth)
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *rest]):
            return _named(name, settings, rest, depth)
        case ast.Call(func=ast.Name(id="bool" | "str" | "float" | "int"), args=[inner]):
            return _evaluate(inner, settings, depth + 1)
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return _named(name, settings, [], depth)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            form = find_format(name) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch" else None
            return Reached(value=form.name) if form else _named(name, settings, [], depth)
    raise _Open


def _named(name: str, settings: Settings, default: list[ast.expr], depth: int) -> Reached:
    """The only known setting of this name; it is told apart from code by not being an argument of a call."""
    found = [v for v in settings if v.name == name and v.origin != "call" and v.known]
    if len({str(v.value) for v in found}) == 1:
        return Reached(value=found[0].value, by=found[0])
    if not found and default:
        return _evaluate(default[0], settings, depth + 1)
    raise _Open

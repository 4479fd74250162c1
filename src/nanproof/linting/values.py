"""What an expression holds: names followed, shapes and dtypes left aside, numbers worked out.

Everything here answers from the text of one function and the constructor of its class.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .names import Operation, called_last, dotted, key_of, word_set

if TYPE_CHECKING:
    from .source import Module

# Calls that leave every value what it is: another shape, dtype or place.
SAME = word_set(
    """view reshape squeeze unsqueeze expand expand_as repeat repeat_interleave flatten t unflatten permute
    transpose swapaxes movedim moveaxis contiguous float double half bfloat16 to type type_as view_as clone cuda
    cpu detach long int item rearrange broadcast_to unsqueeze_ squeeze_"""
)
_SAME_ATTRIBUTES = {"T", "mT", "data", "H", "mH"}
_SIZES = re.compile(
    r"(^|_)(dims?|d_?k|d_?model|hidden|width|height|channels?|size|len|length|num|count|steps?|epochs?|heads?|batch|"
    r"bsz|bs|temperature|temp|tau|scale|sigma|factor|ratio|period|base|gain)(_|$|\d)",
    re.I,
)
_SETTINGS = {"opt", "args", "cfg", "config", "hparams", "conf", "hp", "options", "flags", "hps"}
_SIZE_CALLS = {"item", "size", "numel", "dim", "ndimension", "get_world_size", "cpu_count"}
_NUMBERS = {"len", "int", "float", "round", "range", "min", "max", "sum", "abs", "pow"}
_OPERATORS = {ast.Pow: "pow", ast.Mult: "mul", ast.Div: "div", ast.Add: "add", ast.Sub: "sub"}


def trail(node: ast.expr, module: Module) -> list[ast.expr]:
    """The expression, then what it holds without names, shapes and dtypes: ``n``, ``m.sum().float()``, ``m.sum()``."""
    path = [node]
    while len(path) < 32:
        inner = _inner(path[-1], module)
        if inner is None or any(inner is seen for seen in path):
            break
        path.append(inner)
    return path


def core(node: ast.expr, module: Module) -> ast.expr:
    """What an expression holds at the end of its `trail`."""
    return trail(node, module)[-1]


def cores(node: ast.expr, module: Module, depth: int = 0) -> list[ast.expr]:
    """What an expression may hold: its `core`, and behind a name that several branches set, one for each branch."""
    at = core(node, module)
    if key_of(at) and depth < 4:
        held = [found for one in module.origins(at) for found in cores(one, module, depth + 1)]
        return held or [at]
    if isinstance(at, ast.IfExp) and depth < 4:
        return [found for one in (at.body, at.orelse) for found in cores(one, module, depth + 1)]
    return [at]


def _inner(node: ast.expr, module: Module) -> ast.expr | None:
    if isinstance(node, ast.Name) or key_of(node):
        return module.value(node)
    if isinstance(node, ast.Attribute) and node.attr in _SAME_ATTRIBUTES:
        return node.value
    if isinstance(node, ast.Subscript) and _only_shape(node.slice):
        return node.value
    if isinstance(node, ast.Call):
        last = called_last(node, module)
        if last in SAME:
            if isinstance(node.func, ast.Attribute) and not module.called(node):
                return node.func.value
            return node.args[0] if node.args else None
    return None


def _only_shape(index: ast.expr) -> bool:
    """``[:, None]`` and the like: new axes and whole slices."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return all(
        (isinstance(p, ast.Slice) and not (p.lower or p.upper or p.step))
        or (isinstance(p, ast.Constant) and p.value in (None, Ellipsis))
        or dotted(p).endswith("newaxis")
        for p in parts
    )


def made_of(node: ast.AST, module: Module, limit: int = 600, *, indices: bool = True) -> Iterator[ast.AST]:
    """Every node of an expression and of all expressions that its names may hold, nearest first.

    Without ``indices`` what stands in ``x[…]`` is left out: it chooses elements and is no part of their values.
    """
    queue: list[ast.AST] = [node]
    seen: set[ast.AST] = set()
    while queue and limit > 0:
        for child in nodes_of(queue.pop(0), indices):
            limit -= 1
            yield child
            if key_of(child):
                held = module.value(child)
                for one in [held] if held is not None else module.origins(child) or module.values(child):
                    if one not in seen:
                        seen.add(one)
                        queue.append(one)


def nodes_of(node: ast.AST, indices: bool) -> Iterator[ast.AST]:
    """The nodes of an expression, what stands in ``x[…]`` only with ``indices``."""
    if indices:
        yield from ast.walk(node)
        return
    stack = [node]
    while stack:
        at = stack.pop()
        yield at
        stack += [c for c in ast.iter_child_nodes(at) if not (isinstance(at, ast.Subscript) and c is at.slice)]


def short(node: ast.AST, module: Module) -> str:
    """The text of an expression on one line, for a message; "" when it is long."""
    text = " ".join(module.source(node).split())
    return text if len(text) < 40 else ""


def names_of(node: ast.AST, module: Module) -> set[str]:
    """The names that an expression is made of, those behind its names included."""
    return {key_of(n) for n in made_of(node, module)} - {""}


def operation(node: ast.AST, module: Module) -> Operation | None:
    """The operation on tensors that an expression is, ``a ** 2`` as pow, ``a * b`` as mul, ``a / b`` as div."""
    if isinstance(node, ast.BinOp):
        name = _OPERATORS.get(type(node.op))
        return Operation(name, node.left, [node.right], {}) if name else None
    return module.operation(node)


def number(node: ast.AST | None, module: Module, depth: int = 0) -> float | None:
    """The number that an expression is: written out, held by a name, or the default of an argument.

    >>> from nanproof.linting.source import Module
    >>> m = Module.parse("def f(x, eps=1e-8): return x.clamp(eps, 1 - eps)")
    >>> [number(a, m) for a in m.calls("clamp")[0].args]
    [1e-08, 0.99999999]
    """
    if isinstance(node, ast.Constant):
        plain = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        return float(node.value) if plain else None  # type: ignore[arg-type]
    if node is None or depth > 20:  # `self.x = self.x + 1` would go round for ever
        return None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = number(node.operand, module, depth + 1)
        return None if inner is None else -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp):
        return _arithmetic(node, module, depth + 1)
    if isinstance(node, ast.Call) and module.called(node) == "float" and node.args:
        text = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        return _parsed(text) if isinstance(text, str) else number(node.args[0], module, depth + 1)
    if module.called(node) in ("torch.inf", "math.inf", "numpy.inf"):
        return math.inf
    if key_of(node):
        held = module.value(node)
        return number(held, module, depth + 1) if held is not None else _default(node, module)
    return None


def _arithmetic(node: ast.BinOp, module: Module, depth: int) -> float | None:
    left = number(node.left, module, depth)
    right = number(node.right, module, depth) if left is not None else None
    if left is None or right is None:
        return None
    try:
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.Pow():
                return float(left**right)
    except (ArithmeticError, TypeError, ValueError):
        pass
    return None


def _parsed(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _default(node: ast.AST, module: Module) -> float | None:
    """The default of the argument that a name is."""
    scope = module.function(node)
    if isinstance(scope, ast.Module) or module.flow.bindings(scope, key_of(node)):
        return None
    a = scope.args
    positional = [*a.posonlyargs, *a.args]
    pairs = [
        *zip(reversed(positional), reversed(a.defaults), strict=False),
        *zip(a.kwonlyargs, a.kw_defaults, strict=True),
    ]
    held = next((d for arg, d in pairs if arg.arg == key_of(node)), None)
    return number(held, module) if isinstance(held, ast.Constant | ast.UnaryOp | ast.BinOp) else None


def scalar(node: ast.AST, module: Module, depth: int = 0) -> bool:
    """Whether an expression is a plain number and not a tensor, as far as its names tell."""
    if isinstance(node, ast.Constant) or number(node, module) is not None:
        return True
    if depth > 20:
        return False
    if isinstance(node, ast.BinOp):
        return scalar(node.left, module, depth + 1) and scalar(node.right, module, depth + 1)
    if isinstance(node, ast.UnaryOp):
        return scalar(node.operand, module, depth + 1)
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    if isinstance(node, ast.Call):
        name = module.called(node)
        if name in _NUMBERS:
            plain = name in ("len", "int", "float", "round")
            return plain or all(scalar(a, module, depth + 1) for a in node.args)
        return (
            name.partition(".")[0] in ("math", "numpy", "time", "datetime") or called_last(node, module) in _SIZE_CALLS
        )
    if isinstance(node, ast.Attribute | ast.Name):
        if _SETTINGS & set(dotted(node).split(".")[:-1]):
            return True
        held = module.value(node)
        if held is not None and not isinstance(held, ast.Name | ast.Subscript | ast.Attribute):
            return scalar(held, module, depth + 1)
        return bool(_SIZES.search(dotted(node).rpartition(".")[2]))
    return False


def unpacked(name: ast.AST, module: Module) -> list[str]:
    """What is called where a name is one of several results: ``yy, xx = torch.meshgrid(…)``."""
    bindings = module.flow.bindings(module.function(name), key_of(name))
    made = [getattr(b.owner, "value", None) for b in bindings if b.value is None]
    return [called_last(value, module) for value in made if isinstance(value, ast.Call)]

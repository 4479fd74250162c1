"""Is it kept away from zero? An eps, a lower bound, a replacement of zeros, a test before it.

What cannot be told counts as guarded: a rule stays silent rather than guess.
"""

from __future__ import annotations

import ast
import math
import re
from typing import TYPE_CHECKING, TypeGuard

from .flow import start
from .names import called_last, dotted, key_of
from .values import SAME, number, scalar

if TYPE_CHECKING:
    from .source import Module

_EPS = re.compile(
    r"(^|_)(eps|epsilon|tiny|delta|smooth|smoothing|small|tol|stab\w*|jitter|floor|minimum|min)\d*$", re.I
)
_COUNTED = {"item", "numel", "nelement", "size", "shape", "sum", "any"}
_ABOUT_FORM = {"dim", "ndim", "dtype", "shape", "size", "device", "is_cuda", "requires_grad", "type", "get"}


def small_constant(node: ast.AST, module: Module) -> bool:
    """An eps: a positive number, or a name such as ``self.eps``."""
    value = number(node, module)
    if value is not None:
        return value > 0
    if isinstance(node, ast.BinOp):
        return small_constant(node.left, module) and scalar(node.right, module)
    text = dotted(node.func if isinstance(node, ast.Call) else node)
    if not text and isinstance(node, ast.Attribute):
        text = node.attr  # torch.finfo(x.dtype).eps
    return bool(_EPS.search(text.rpartition(".")[2]))


def guarded(node: ast.expr, module: Module, seen: frozenset[ast.AST] = frozenset()) -> bool:
    """Whether an expression is kept away from zero: an eps added, a lower bound, a replacement of zeros."""
    if node in seen or len(seen) > 40:
        return False
    seen |= {node}
    if isinstance(node, ast.BinOp):
        sides = (node.left, node.right)
        if isinstance(node.op, ast.Add):
            return any(small_constant(s, module) or guarded(s, module, seen) for s in sides)
        if isinstance(node.op, ast.Mult | ast.Div):
            return all(scalar(s, module) or guarded(s, module, seen) for s in sides)
        return number(node, module) is not None
    if key_of(node):
        if changed_in_place(node, module):
            return True
        held = module.value(node)
        ways = [held] if held is not None else module.values(node)
        ways = [v for v in ways if not isinstance(v, ast.Constant)] or ways  # `std = 1`, and in a branch `x.std()`
        return any(guarded(v, module, seen) for v in ways)
    if isinstance(node, ast.Call):
        return _guarding_call(node, module, seen)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Compare) or guarded(node.value, module, seen)
    return isinstance(node, ast.Constant | ast.IfExp)


def _guarding_call(call: ast.Call, module: Module, seen: frozenset[ast.AST]) -> bool:
    found = module.operation(call)
    last = called_last(call, module)
    if last.rstrip("_") in ("clamp", "clip", "clamp_min"):
        low = lower_bound(call, module)
        return low is None or low > 0
    if last in ("maximum", "fmax", "max") and _two_sided(call, module):
        return not any(_zero(a, module) for a in call.args)
    if last.rstrip("_") in ("where", "nan_to_num", "masked_fill", "softplus", "exp", "cosh", "add"):
        return True
    if last in ("abs", "sqrt", *SAME):
        inner = found.operand if found else call.func.value if isinstance(call.func, ast.Attribute) else None
        return inner is not None and guarded(inner, module, seen)
    if last in ("sum", "mean", "norm", "vector_norm") and found and isinstance(found.operand, ast.BinOp):
        return isinstance(found.operand.op, ast.Add) and guarded(found.operand, module, seen)
    if any(word in last.lower() for word in ("safe", "clamp", "nonzero", "stable", "eps")):
        return True
    return any(k.arg in ("eps", "epsilon") for k in call.keywords)


def _two_sided(call: ast.Call, module: Module) -> bool:
    """``max(a, b)``, ``torch.max(a, b)``, ``a.max(b)``; not the reduction ``a.max(1)``."""
    method = isinstance(call.func, ast.Attribute) and not module.called(call)
    others = call.args if method else call.args[1:]
    builtin = module.called(call) == "max"
    return bool(others) and (builtin or not isinstance(others[0], ast.Constant | ast.UnaryOp))


def _zero(node: ast.AST, module: Module) -> bool:
    if isinstance(node, ast.Call) and called_last(node, module) in ("zeros", "zeros_like", "new_zeros"):
        return True
    if isinstance(node, ast.Call) and called_last(node, module) in ("tensor", "as_tensor") and node.args:
        return number(node.args[0], module) == 0
    return number(node, module) == 0


def lower_bound(call: ast.Call, module: Module) -> float | None:
    """The lower bound of a clamp; −∞ without one, None when it is not a plain number."""
    method = isinstance(call.func, ast.Attribute) and not module.called(call)
    given = call.args if method else call.args[1:]
    low = next((k.value for k in call.keywords if k.arg == "min"), given[0] if given else None)
    if low is None or (isinstance(low, ast.Constant) and low.value is None):
        return -math.inf
    return number(low, module)


def changed_in_place(name: ast.AST, module: Module, until: ast.AST | None = None) -> bool:
    """Whether something is written into what a name holds before this place: ``n[n == 0] = 1``, ``n.clamp_(1)``."""
    key, here = key_of(name), start(until if until is not None else name)
    for use in module.uses(key, module.function(name)):
        if use is name or start(use) > here:
            continue
        at: ast.AST = use
        parent = module.parent(use)
        while isinstance(parent, ast.Subscript) and parent.value is at:
            if isinstance(parent.ctx, ast.Store):
                return True
            at, parent = parent, module.parent(parent)
        parent = module.parent(use)
        if isinstance(parent, ast.Attribute) and parent.attr.endswith("_") and not parent.attr.endswith("__"):
            return True
    return False


def checked(keys: set[str], node: ast.AST, module: Module) -> bool:
    """Whether a test before or around a place asks about the values behind these names, not only ``is None``."""
    scope = module.function(node)
    here = start(node)
    keys = keys - set(module.aliases)  # `torch.is_tensor(y)` asks nothing about torch.sum(x)
    tests: list[ast.expr] = [outer.test for outer in module.parents(node) if isinstance(outer, ast.IfExp)]
    tests += [outer.args[0] for outer in module.parents(node) if _is_where(outer, module)]
    for kind in (ast.If, ast.Assert, ast.While):
        tests += [s.test for s in module.nodes(kind) if start(s) <= here and module.function(s) is scope]  # type: ignore[attr-defined]
    for outer in module.parents(node):
        if isinstance(outer, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            tests += [test for g in outer.generators for test in g.ifs]
    return any(_asks(test, keys, module) for test in tests)


def _is_where(node: ast.AST, module: Module) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and called_last(node, module) == "where" and len(node.args) == 3


def _asks(test: ast.expr, keys: set[str], module: Module) -> bool:
    for name in ast.walk(test):
        if key_of(name) in keys and not _about_form(name, module):
            return True
        if isinstance(name, ast.Name) and _compared(name, module):
            counted = [n for held in module.origins(name) for n in ast.walk(held) if key_of(n) in keys]
            if counted and any(_zero(c, module) for c in ast.walk(test) if isinstance(c, ast.Constant)):
                return True  # `k = min(n, len(kept))`, then `if k != 0`
        if isinstance(name, ast.Subscript) and module.source(name) in keys:
            return True
    return False


def _compared(name: ast.Name, module: Module) -> bool:
    """Whether a name, its number of elements or ``name.item()`` is compared with something."""
    at: ast.AST = name
    for above in module.parents(name):
        counts = isinstance(above, ast.Attribute) and above.attr in _COUNTED
        called = isinstance(above, ast.Call) and (above.func is at or module.called(above) == "len")
        if not (counts or called or (isinstance(above, ast.Subscript) and above.value is at)):
            return isinstance(above, ast.Compare)
        at = above
    return False


def _about_form(name: ast.AST, module: Module) -> bool:
    """``mask is None``, ``mask.dim() == 2``, ``isinstance(mask, …)``: nothing about what the mask holds."""
    parent = module.parent(name)
    if isinstance(parent, ast.Attribute):
        return parent.attr in _ABOUT_FORM
    if isinstance(parent, ast.Compare):
        sides = [parent.left, *parent.comparators]
        return any(isinstance(s, ast.Constant) and (s.value is None or isinstance(s.value, str)) for s in sides)
    return isinstance(parent, ast.Call) and module.called(parent) in (
        "isinstance",
        "hasattr",
        "torch.is_tensor",
        "callable",
    )

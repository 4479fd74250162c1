"""Which values an expression can take: its bounds, and whether code in sight brings it to exactly zero.

    p = torch.sigmoid(x)            # 0 to 1, both reached: a sigmoid saturates
    pt = p * y + (1 - p) * (1 - y)  # 0 or more, zero reached: log(pt) is -inf
    d = (a - b).pow(2).sum(-1)      # 0 or more, zero reached where a equals b
    n = d + 1e-12                   # above 0

Names are followed through branches, attributes of the class, calls of the file's own functions and, for an argument,
what the file's own calls give. What is not known has no bounds and no reason to be zero.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .flow import has_argument
from .gradients import Function, callers_of
from .guards import changed_in_place, lower_bound, small_constant
from .names import Operation, called_last, key_of, word_set
from .numerics import boolean, named_probability, probability, reduction
from .values import SAME, core, made_of, nodes_of, number, operation, scalar

if TYPE_CHECKING:
    from .source import Module

TINY = 5e-324
"""A lower bound that only says: above zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds, and why zero is among the values."""

    low: float = -math.inf
    high: float = math.inf
    zero: str = ""
    """What makes it exactly zero, in words; "" where nothing in sight does."""
    sure: bool = False
    """Zero comes by itself in training (a ReLU, a mask, saturation), not only where two things happen to be equal."""
    top: bool = False
    """The upper bound is reached: 1 minus a probability is zero."""

    @property
    def positive(self) -> bool:
        return self.low > 0


ANY = Range()
_UNIT = Range(low=0, high=1, zero="a probability that rounds to zero", sure=True, top=True)
_BOOLEAN = Range(low=0, high=1, zero="a mask that keeps nothing", sure=True, top=True)
_POSITIVE = Range(low=TINY)
_KEEPS = word_set(
    """gather index_select take_along_dim masked_select cat stack concat amax amin max min cummax roll flip pad
    dropout sort topk select narrow diag diagonal index broadcast_tensors chunk split unbind interpolate
    avg_pool2d max_pool2d adaptive_avg_pool2d"""
)
_SUMS = {"sum", "mean", "nansum", "nanmean", "cumsum", "logsumexp"}
_DEPTH = 14


def range_of(node: ast.AST, module: Module) -> Range:
    """The range of an expression.

    >>> from nanproof.linting.source import Module
    >>> m = Module.parse("def f(x): return (x.pow(2).sum(1) + 1e-6).sqrt()")
    >>> root = range_of(m.calls("sqrt")[0].func.value, m)
    >>> (root.low, root.zero)
    (1e-06, '')
    """
    kept: dict[ast.AST, Range] = vars(module).setdefault("ranges", {})  # with the module, so that it goes with it
    if node not in kept:
        kept[node] = ANY  # `x = x + 1` in a loop would go round for ever
        kept[node] = _range(node, module, 0)
    return kept[node]


def _range(node: ast.AST | None, module: Module, depth: int) -> Range:
    if node is None or depth > _DEPTH:
        return ANY
    value = number(node, module)
    if value is not None:
        return Range(low=value, high=value, zero="0" if value == 0 else "", sure=True, top=True)
    if isinstance(node, ast.BoolOp):
        return _either([_range(e, module, depth + 1) for e in node.values])  # `given or default`
    if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert)):
        return _BOOLEAN
    if isinstance(node, ast.UnaryOp):
        return _negative(_range(node.operand, module, depth + 1)) if isinstance(node.op, ast.USub) else ANY
    if isinstance(node, ast.IfExp):
        return _either([_range(e, module, depth + 1) for e in (node.body, node.orelse)])
    if isinstance(node, ast.Subscript):
        named = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        return ANY if named or _picked(node, module) else _range(node.value, module, depth + 1)
    if isinstance(node, ast.BinOp):
        if scalar(node, module):
            return ANY  # a size or a setting
        if isinstance(node.op, ast.MatMult):
            return _product(_range(node.left, module, depth + 1), _range(node.right, module, depth + 1), summed=True)
        found = operation(node, module)
        return _arithmetic(found, node, module, depth) if found is not None else ANY
    if isinstance(node, ast.Call):
        return _call(node, module, depth)
    if key_of(node):
        return _name(node, module, depth)
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "data", "values"):
        return _range(node.value, module, depth + 1)
    return _POSITIVE if small_constant(node, module) else ANY


def _name(node: ast.AST, module: Module, depth: int) -> Range:
    key = key_of(node)
    last = key.rpartition(".")[2]
    if changed_in_place(node, module):
        return ANY
    if held := module.origins(node):
        return _either([_range(v, module, depth + 1) for v in held])
    if small_constant(node, module):
        return _POSITIVE
    if _size(node, module):
        return Range(low=1)
    if isinstance(node, ast.expr) and named_probability(node):
        return replace(_UNIT, sure=False)
    scope = module.function(node)
    if not isinstance(scope, ast.Module) and has_argument(scope, key):
        return _given(scope, key, module, depth)
    return _BOOLEAN if _is_mask(last) else ANY


def _is_mask(name: str) -> bool:
    return name.endswith(("mask", "masks", "adj")) and not name.startswith(("sum_", "num_", "n_"))


def _picked(node: ast.Subscript, module: Module) -> bool:
    """``d[d.nonzero()]``, ``d[d > 0]``: what is zero was left out."""
    at = core(node.slice, module)
    asks = isinstance(at, ast.Compare) or (isinstance(at, ast.Call) and called_last(at, module) == "nonzero")
    return asks and bool({key_of(n) for n in ast.walk(node.value)} & {key_of(n) for n in ast.walk(at)} - {"", "self"})


def _size(node: ast.AST, module: Module) -> bool:
    """One of the numbers of a shape: ``b, n = x.shape[:2]``."""
    owners = [b.owner for b in module.flow.bindings(module.function(node), key_of(node)) if b.value is None]
    made = [o.value for o in owners if isinstance(o, ast.Assign)]
    made = [m.value if isinstance(m, ast.Subscript) else m for m in made]
    return any(
        (isinstance(m, ast.Attribute) and m.attr == "shape")
        or (isinstance(m, ast.Call) and called_last(m, module) in ("size", "list", "map"))
        for m in made
    )


def _given(scope: ast.AST, key: str, module: Module, depth: int) -> Range:
    """An argument: what every call of the function in this file gives; a mask by its name."""
    calls = callers_of(scope, module) if isinstance(scope, Function) else []
    names = [a.arg for a in scope.args.args] if isinstance(scope, Function) else []
    if calls and key in names and depth < _DEPTH - 4:
        place = names.index(key) - (names[:1] == ["self"])
        given = [
            next((k.value for k in c.keywords if k.arg == key), c.args[place] if 0 <= place < len(c.args) else None)
            for c in calls
        ]
        found = _either([_range(g, module, depth + 4) for g in given])
        if found != ANY:
            return found
    return _BOOLEAN if _is_mask(key) else ANY


def _either(ways: list[Range]) -> Range:
    """What holds whichever of these it is; zero if one of them reaches it."""
    ways = [w for w in ways if not (w.low == w.high == 0)] or ways  # `total = 0` before a loop adds to it
    if not ways:
        return ANY
    reached = next((w for w in ways if w.zero and w.sure), next((w for w in ways if w.zero), ANY))
    return Range(
        low=min(w.low for w in ways),
        high=max(w.high for w in ways),
        zero=reached.zero,
        sure=reached.sure,
        top=any(w.top and w.high == max(v.high for v in ways) for w in ways),
    )


def _negative(inner: Range) -> Range:
    return Range(low=-inner.high, high=-inner.low, zero=inner.zero, sure=inner.sure)


def _product(left: Range, right: Range, *, summed: bool = False) -> Range:
    zero = max(left, right, key=lambda r: (bool(r.zero), r.sure, r.zero != _UNIT.zero))
    if left.low >= 0 and right.low >= 0:
        low = TINY if left.positive and right.positive else 0.0
        high = math.inf if summed else left.high * right.high if 0 not in (left.high, right.high) else 0.0
        return Range(low=low, high=high, zero=zero.zero, sure=zero.sure, top=not summed and left.top and right.top)
    if summed:
        return ANY
    corners = [0.0 if 0 in (a, b) else a * b for a in (left.low, left.high) for b in (right.low, right.high)]
    top = left.top and right.top
    return Range(low=min(corners), high=max(corners), zero=zero.zero, sure=zero.sure, top=top)


def _arithmetic(found: Operation, node: ast.AST, module: Module, depth: int) -> Range:
    first, second = found.operand, found.args[0] if found.args else None
    if first is None or second is None:
        return ANY
    if found.name == "pow" and (_off_zero(first, module) or _setting(first, module)):
        return _POSITIVE
    if found.name == "pow":
        return _power(_range(first, module, depth + 1), number(second, module))
    left, right = _range(first, module, depth + 1), _range(second, module, depth + 1)
    if found.name == "mul":
        if ast.dump(first) == ast.dump(second):
            return _power(left, 2.0)
        return _product(left, right)
    if found.name == "add":
        if _fills(first, second, module) or _fills(second, first, module):
            return _POSITIVE
        for chosen in _chosen(first, second):
            mixed = _either([_range(e, module, depth + 2) for e in chosen])
            if mixed.low >= 0:
                return mixed
        if left.low >= 0 and right.low >= 0:
            both = bool(left.zero and right.zero)
            return Range(
                low=left.low + right.low,
                high=left.high + right.high,
                zero=left.zero if both else "",
                sure=both and left.sure and right.sure,
            )
        if scalar(first, module) or scalar(second, module):
            return Range(low=left.low + right.low)  # a setting beside it: c1 of a structural similarity
        differs = left if "difference" in left.zero else right if "difference" in right.zero else ANY
        return Range(low=left.low + right.low, zero=differs.zero if _signed(left, right) else "")
    if found.name == "sub":
        return _difference(left, right, first, second, module)
    if found.name == "div" and _length_of(second, first, module):
        return Range(low=-1, high=1, top=True)  # a direction: 1 along an axis, or rounded past it
    if found.name == "div":
        low = TINY if left.positive and right.low >= 0 else 0.0 if left.low >= 0 and right.low >= 0 else -math.inf
        if low < 0 and right.zero == "" and number(second, module) is None and left.low >= 0 and not right.low >= 0:
            return Range(zero=left.zero, sure=left.sure)
        high = left.high if right.low >= 1 and left.low >= 0 else math.inf
        return Range(low=low, high=high, zero=left.zero, sure=left.sure)
    return ANY


def _length_of(norm: ast.expr, vector: ast.expr, module: Module) -> bool:
    """Whether one is the norm of the other."""
    found = operation(core(norm, module), module)
    held = found.operand if found is not None and found.name in ("norm", "vector_norm") else None
    return held is not None and module.source(held) == module.source(vector)


def _setting(base: ast.expr, module: Module) -> bool:
    """``self.sigmas``, given to the constructor or made there: a setting, which nobody sets to zero."""
    parts = [n for n in nodes_of(base, indices=False) if key_of(n)]
    keys = {key_of(n) for n in parts} - {"self"}
    if not keys or not all(k.startswith("self.") for k in keys):
        return False
    return all(isinstance(v, ast.Name | ast.Constant) for n in parts for v in module.values(n))


def _off_zero(base: ast.expr, module: Module) -> bool:
    """``(x + eps) ** 2``: what is 0 by symmetry is not 0 here."""
    at = core(base, module)
    return isinstance(at, ast.BinOp) and isinstance(at.op, ast.Add) and small_constant(at.right, module)


def _fills(flag: ast.expr, value: ast.expr, module: Module) -> bool:
    """``d + (d == 0)``: where one is zero, the other is not."""
    at = core(flag, module)
    names = {key_of(n) for n in ast.walk(value)} - {"", "self"}
    return isinstance(at, ast.Compare) and bool(names & {key_of(n) for n in ast.walk(at)})


def _chosen(first: ast.expr, second: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """``a`` and ``b`` of ``a * t + b * (1 - t)``: one or the other, or a mixture."""
    sides = [(e.left, e.right) for e in (first, second) if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Mult)]
    for one, other in (sides, sides[::-1]) if len(sides) == 2 else ():
        for weight, a in (one, one[::-1]):
            for rest, b in (other, other[::-1]):
                minus = isinstance(rest, ast.BinOp) and isinstance(rest.op, ast.Sub) and rest.right
                if isinstance(minus, ast.expr) and ast.dump(minus) == ast.dump(weight):
                    yield a, b


def _signed(left: Range, right: Range) -> bool:
    """Neither summand keeps the other from zero."""
    return not left.positive and not right.positive


def _difference(left: Range, right: Range, first: ast.expr, second: ast.expr, module: Module) -> Range:
    low, high = left.low - right.high, left.high - right.low
    low = -math.inf if math.isnan(low) else low
    high = math.inf if math.isnan(high) else high
    if right.top and left.low == left.high == right.high:
        return Range(low=0, high=high, zero="1 minus something that rounds to 1", sure=right.sure, top=bool(right.zero))
    if _off_zero(first, module):
        return Range(low=low, high=high)  # 1 + eps - cos²
    for fixed, moving in ((left, right), (right, left)):
        if fixed.low == fixed.high and moving.low >= 0 and moving.zero and moving.low < fixed.low < moving.high:
            return Range(low=low, high=high, zero="a square that passes a number")  # 1 - cos²
    if scalar(first, module) or scalar(second, module) or small_constant(first, module) or _off_zero(first, module):
        return Range(low=low, high=high)
    return Range(low=low, high=high, zero="a difference")


def _power(base: Range, exponent: float | None) -> Range:
    if exponent is None:
        return Range(low=max(base.low, 0.0) if base.low >= 0 else -math.inf, zero=base.zero if base.low >= 0 else "")
    if exponent < 0:
        return _POSITIVE if base.low >= 0 else ANY
    if exponent % 2 == 0:
        edge = max(abs(base.low), abs(base.high))
        low = TINY if base.positive or base.high < 0 else 0.0
        zero = "" if low else base.zero or "a square"
        return Range(
            low=low, high=edge**exponent if edge < 1e100 else math.inf, zero=zero, sure=base.sure, top=base.top
        )
    if base.low >= 0:
        return Range(low=TINY if base.positive else 0.0, high=base.high, zero=base.zero, sure=base.sure, top=base.top)
    return ANY


def _call(node: ast.Call, module: Module, depth: int) -> Range:
    if probability(node, module) is not None:
        return _UNIT
    layer = node.func if isinstance(node.func, ast.Call) else module.value(node.func)
    if isinstance(layer, ast.Call) and module.called(layer) == "torch.nn.MSELoss":
        return Range(low=0, zero="a mean of squares")
    found, last = module.operation(node), called_last(node, module).rstrip("_")
    name = module.called(node)
    inner = found.operand if found else node.func.value if isinstance(node.func, ast.Attribute) and not name else None
    if name in ("float", "int", "abs") and node.args:
        inner = node.args[0]
    if last in ("clamp", "clip", "clamp_min"):
        return _clamped(node, inner, module, depth)
    if name == "len" or last in ("numel", "size"):
        return Range(low=1)
    if last == "exp" and inner is not None and _range(inner, module, depth + 1).high <= 0:
        return Range(low=0, high=1, zero="an exponential that underflows", top=True)  # of minus a square
    if last in ("softplus", "exp", "cosh", "rand", "ones", "ones_like", "full_like", "where", "masked_fill"):
        return _POSITIVE if last in ("softplus", "exp", "cosh", "ones", "ones_like") else ANY
    if boolean(node, module) or last == "one_hot":
        return _BOOLEAN
    if last in ("relu", "relu6", "threshold"):
        return Range(low=0, zero="a ReLU", sure=True)
    if last in ("tanh", "cosine_similarity", "sin", "cos", "normalize"):
        return Range(low=-1, high=1, top=last not in ("sin", "cos", "normalize"), sure=True)
    if last in ("std", "var", "norm", "vector_norm", "cdist", "pdist", "pairwise_distance", "mse_loss"):
        words = {"std": "a deviation", "var": "a variance", "mse_loss": "a mean of squares"}.get(last, "a norm")
        return Range(low=0, zero=words, sure=last in ("cdist", "pdist"))
    if inner is not None and (
        last in SAME or last in _KEEPS or last in _SUMS or last in ("abs", "sqrt", "prod", "neg")
    ):
        return _mapped(last, node, inner, module, depth)
    if found is not None and found.operand is not None and found.args:
        if last in ("square",):
            return _power(_range(found.operand, module, depth + 1), 2.0)
        if last in ("pow", "mul", "add", "sub", "div", "multiply", "divide", "true_divide"):
            short = {"multiply": "mul", "divide": "div", "true_divide": "div"}.get(last, last)
            return _arithmetic(Operation(short, found.operand, found.args, {}), node, module, depth)
        if last in ("matmul", "mm", "bmm"):
            sides = [_range(e, module, depth + 1) for e in (found.operand, found.args[0])]
            return _product(sides[0], sides[1], summed=True)
        if last in ("maximum", "minimum"):
            return _two(last, [_range(e, module, depth + 1) for e in (found.operand, found.args[0])])
        if last in ("scatter_add", "index_add"):
            added = _range(found.args[-1], module, depth + 1)
            return Range(low=0, zero="a group without members", sure=True) if added.low >= 0 else ANY
    if last == "square" and inner is not None:
        return _power(_range(inner, module, depth + 1), 2.0)
    if name in ("max", "min") and len(node.args) == 2:
        return _two(f"{name}imum", [_range(e, module, depth + 1) for e in node.args])
    held = _returned(node, module, depth)
    if held == ANY and found is None and (total := reduction(node, module)) and total.operand is not None:
        return _mapped(total.name, node, total.operand, module, depth)
    return held


def _mapped(last: str, node: ast.Call, inner: ast.expr, module: Module, depth: int) -> Range:
    """Calls whose result has the bounds of what they are given, or those of its sums and absolute values."""
    others = node.args if isinstance(node.func, ast.Attribute) and not module.called(node) else node.args[1:]
    if last in ("max", "min") and others and not scalar(others[0], module):
        return _two(f"{last}imum", [_range(e, module, depth + 1) for e in (inner, others[0])])
    many = inner.elts if isinstance(inner, ast.List | ast.Tuple) else [inner]
    held = _either([_range(e, module, depth + 1) for e in many])
    if last in ("sum", "mean") and _beside_positive(inner, module, depth):
        return _POSITIVE
    if last in ("prod", *_SUMS):
        low = max(held.low, 0.0) if held.low >= 0 else -math.inf
        zero = held.zero if held.low >= 0 else ""
        if zero == _UNIT.zero and last != "prod":  # all of them at once: not those of a softmax, rarely others
            calls = (p for p in made_of(inner, module, limit=60) if isinstance(p, ast.Call))
            softmax = any(called_last(c, module) == "softmax" for c in calls)
            return Range(low=TINY if softmax else 0.0, zero="" if softmax or named_probability(inner) else zero)
        return Range(low=low, high=held.high if "mean" in last else math.inf, zero=zero, sure=held.sure)
    if last == "abs":
        zero = "" if held.positive or held.high < 0 else held.zero or "a magnitude"
        low = TINY if held.positive else 0.0
        return Range(low=low, high=max(abs(held.low), abs(held.high)), zero=zero, sure=held.sure)
    if last == "neg":
        return _negative(held)
    if last == "sqrt":
        return _power(held, 0.5)
    return held


def _beside_positive(summed: ast.expr, module: Module, depth: int) -> bool:
    """``stack([v, ones_like(v)], -1) ** 2``: a part of what is added up, all of it squares, is never zero."""
    at = core(summed, module)
    if (
        isinstance(at, ast.BinOp)
        and isinstance(at.op, ast.Mult | ast.Pow)
        and (isinstance(at.op, ast.Pow) or ast.dump(at.left) == ast.dump(at.right))
    ):
        at = core(at.left, module)
    made = at.args[0] if isinstance(at, ast.Call) and called_last(at, module) in ("stack", "cat") and at.args else None
    parts = made.elts if isinstance(made, ast.List | ast.Tuple) else []
    return any(_range(p, module, depth + 2).positive for p in parts) and (
        at is not core(summed, module) or all(_range(p, module, depth + 2).low >= 0 for p in parts)
    )


def _two(name: str, sides: list[Range]) -> Range:
    """An elementwise maximum or minimum of two things."""
    if name == "minimum":
        return replace(_either(sides), high=min(s.high for s in sides))
    low = max(s.low for s in sides)
    cut = any(s.low == s.high == 0 for s in sides)
    return Range(low=low, high=max(s.high for s in sides), zero="a value cut off at zero" if cut else "", sure=cut)


def _clamped(node: ast.Call, inner: ast.expr | None, module: Module, depth: int) -> Range:
    low = lower_bound(node, module)
    held = _range(inner, module, depth + 1)
    if low is None:
        return _POSITIVE
    if low > 0:
        return Range(low=low)
    if low == 0:
        return Range(low=0, high=held.high, zero="a value clamped to zero", sure=True, top=held.top)
    return replace(held, low=max(held.low, low), top=False)


def _returned(node: ast.Call, module: Module, depth: int) -> Range:
    """What a function of this file gives back, whichever ``return`` it takes."""
    func = node.func
    name = key_of(func).removeprefix("self.")
    if not name or depth > _DEPTH - 5:
        return ANY
    own = [f for f in module.nodes(ast.FunctionDef) if f.name == name]
    if len(own) != 1 or own[0] in module.parents(node):
        return ANY
    given = [r.value for r in module.nodes(ast.Return) if module.function(r) is own[0] and r.value is not None]
    return _either([_range(g, module, depth + 5) for g in given]) if given else ANY

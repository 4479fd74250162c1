"""NP210: torch.where does not keep the gradient of the branch that was not taken from being NaN."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..gradients import constant, enclosing, number_argument
from ..guards import guarded, small_constant
from ..names import called_last, key_of
from ..numerics import boolean, division, summed
from ..purpose import aside, only_logged, trains
from ..ranges import range_of
from ..rule import Change, Found, Rule
from ..values import SAME, core, made_of, nodes_of, number, operation, scalar, short, trail, unpacked

if TYPE_CHECKING:
    from ..source import Module

_RISKS = {
    "log": "log",
    "log2": "log2",
    "log10": "log10",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "acos": "acos",
    "asin": "asin",
    "arccos": "acos",
    "arcsin": "asin",
    "atanh": "atanh",
    "acosh": "acosh",
    "reciprocal": "reciprocal",
    "log1p": "log1p",
    "exp": "exp",
    "expm1": "expm1",
}
_COUNTS = re.compile(
    r"(^|_|\.)(counts?|nums?|n_?elems?|nonzeros?|lens?|lengths?|totals?|steps?|size|degrees?|deg)(_|$|\d)", re.I
)
_CAMERAS = re.compile(r"camera|distort|project|fisheye|intersect|(^|_)rays?(_|$)|pixel|jpeg|image", re.I)
"""Geometry of the input: nothing is learned before it."""
_COORDINATES = re.compile(r"(^|_)(feats|batch|coords?|xyz|positions?|points?|frames?)(_|$)", re.I)
_COMPARES = {"eq", "ne", "gt", "lt", "ge", "le", "isclose", "isinf", "isnan", "isfinite", "greater", "less"}
_KEPT_LOW = {"clamp", "clamp_max", "clip", "where", "minimum", "min", "neg", "masked_fill"}
_AT_ZERO = {"div", "reciprocal", "log", "log2", "log10", "sqrt", "rsqrt", "power"}
_HOLDS: dict[type[ast.cmpop], Callable[[float], bool]] = {
    ast.Lt: lambda x: x < 0,
    ast.LtE: lambda x: x <= 0,
    ast.Gt: lambda x: x > 0,
    ast.GtE: lambda x: x >= 0,
    ast.Eq: lambda x: x == 0,
    ast.NotEq: lambda x: x != 0,
}
"""Whether 0 - bound compares so with 0."""
_PARTS = {"chunk", "split", "unbind", "max", "min", "sort", "topk", "meshgrid", "tensor_split", "svd"}
_CUTS = {"long", "int", "round", "floor", "ceil", "detach", "argmax", "argmin", "bool", "sign", "item", "no_grad"}
_FILLS = {"exp": "0.0", "expm1": "0.0", "log1p": "0.0", "acos": "0.0", "asin": "0.0", "atanh": "0.0"}


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    arguments = _arguments(node, module)
    if arguments is None or aside(node, module):
        return
    condition, branches = arguments
    asked = _asked(condition, module)
    for place, branch in enumerate(branches):
        risk = _risk(branch, asked, module)
        if risk is None or only_logged(node, module):
            continue
        name, operand, risky = risk
        if name in _AT_ZERO and _zero_is_chosen(condition, operand, place == 0, module):
            continue  # it is as bad where it is chosen, which is not for this rule to say
        said = short(operand, module) or "its operand"
        what = f"a division by {said}" if name == "div" else f"{name} of {said}"
        yield Found(
            node=node,
            message=f"{what} is computed everywhere: where it is bad the gradient is NaN, chosen or not",
            help="make the operand harmless first: torch.where(ok, x, 1.0), then compute, then choose (or ops.select)",
            edits=_fix(branch, condition, name, operand, risky, place == 0, module),
            info=not trains(node, module)
            or any(_CAMERAS.search(f.name) for f in enclosing(node, module))
            or _given(operand, module),
            about=core(operand, module) if name == "div" else risky,
        )
        return


def _given(operand: ast.expr, module: Module) -> bool:
    """Coordinates of the input alone, or what a function that is not in sight has made: it may keep off zero."""
    parts = list(made_of(operand, module, limit=60, indices=False))
    calls = [p for p in parts if isinstance(p, ast.Call) and module.operation(p) is None]
    if any(called_last(c, module) not in SAME and isinstance(c.func, ast.Name) for c in calls):
        return True
    open_names = [p for p in parts if key_of(p) and module.value(p) is None and not module.origins(p)]
    if any(set(unpacked(p, module)) - _PARTS for p in open_names):
        return True
    leaves = {key_of(p) for p in open_names}
    leaves -= {"self", *module.aliases}
    return bool(leaves) and all(_COORDINATES.search(name) for name in leaves)


def _zero_is_chosen(condition: ast.expr, operand: ast.expr, first: bool, module: Module) -> bool:
    """``where(x < 1, 1 / x, 0)``: zero, the bad place, is where the branch is taken; or the condition asks about a
    large number, and the operand is something else."""
    test, keys = core(condition, module), {key_of(t) for t in trail(operand, module)} - {""}
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    for side, other, sign in ((test.left, test.comparators[0], 1), (test.comparators[0], test.left, -1)):
        bound = number(other, module)
        holds = _HOLDS.get(type(test.ops[0]))
        if bound is not None and holds is not None:
            return holds(-sign * bound) == first if key_of(side) in keys else abs(bound) > 1
    return False


def _arguments(node: ast.Call, module: Module) -> tuple[ast.expr, list[ast.expr]] | None:
    """The condition and the two branches of ``torch.where(c, a, b)`` and of ``a.where(c, b)``."""
    if module.called(node) == "torch.where":
        given = {k.arg: k.value for k in node.keywords}
        args = [*node.args, *(given[k] for k in ("condition", "input", "other") if k in given)]
        return (args[0], args[1:]) if len(args) == 3 else None
    if isinstance(node.func, ast.Attribute) and module.operation(node) and len(node.args) == 2:
        return node.args[0], [node.func.value, node.args[1]]
    return None


def _asked(condition: ast.expr, module: Module) -> set[str]:
    """The names whose values a condition compares with something; through one name of its own."""
    held = core(condition, module)
    compared: list[ast.AST] = []
    for part in [*ast.walk(condition), *ast.walk(held)]:
        if isinstance(part, ast.Compare):
            sides = [part.left, *part.comparators]
            compared += sides if any(_threshold(s, module) for s in sides) else []
        elif isinstance(part, ast.Call) and called_last(part, module) in _COMPARES:
            compared.append(part)
    return {key_of(n) for c in compared for n in ast.walk(c) if number(n, module) is None} - {""}


def _threshold(node: ast.expr, module: Module) -> bool:
    """A number, an eps, or zeros: what a value is compared with to keep it away from a bad place."""
    if number(node, module) is not None or small_constant(node, module):
        return True
    return isinstance(node, ast.Call) and called_last(node, module) in (
        "zeros_like",
        "zeros",
        "tensor",
        "finfo",
        "float",
    )


def _risk(branch: ast.expr, asked: set[str], module: Module) -> tuple[str, ast.expr, ast.AST] | None:
    """The first operation in a branch that goes wrong for some value of what the condition asks about."""
    for part in [*ast.walk(branch), *ast.walk(core(branch, module))]:
        if isinstance(part, ast.Call) and (called_last(part, module) in _CUTS or _to_integer(part, module)):
            return None
        name, operand = _bad_operation(part, module)
        if not name or operand is None or _picked(operand, module):
            continue
        if name == "div" and _one_number(operand, module):
            continue
        if constant(part if name == "div" else operand, module):
            continue  # a constant divisor of zero still makes the gradient of what it divides NaN
        there = _names(operand, module) if name not in ("exp", "expm1") else {key_of(n) for n in ast.walk(operand)}
        if there & asked and not _tamed(name, operand, module):
            return name, operand, part
    return None


def _one_number(operand: ast.expr, module: Module) -> bool:
    """An argument that is a plain number, and not zero in one element of many."""
    scope = module.function(operand)
    leaves = {key_of(p) for p in made_of(operand, module, limit=40) if key_of(p) and module.value(p) is None}
    leaves -= {"", *module.aliases}
    return bool(leaves) and not isinstance(scope, ast.Module) and all(number_argument(scope, k) for k in leaves)


def _picked(operand: ast.expr, module: Module) -> bool:
    """``x[mask]``: the elements were chosen before."""
    return any(
        isinstance(n, ast.Subscript) and (boolean(n.slice, module) or key_of(n.slice)) for n in ast.walk(operand)
    )


def _bad_operation(part: ast.AST, module: Module) -> tuple[str, ast.expr | None]:
    parts = division(part, module)
    if parts is not None:
        return "div", None if scalar(parts[1], module) else parts[1]
    found = operation(part, module) if isinstance(part, ast.Call | ast.BinOp) else None
    if found is None or found.operand is None or scalar(found.operand, module):
        return "", None
    if found.name == "pow" and found.args:
        exponent = number(found.args[0], module)
        return ("power" if exponent is not None and (exponent < 0 or exponent % 1) else ""), found.operand
    return _RISKS.get(found.name, ""), found.operand


def _names(operand: ast.expr, module: Module) -> set[str]:
    """The names in an operand and in what it holds; those of a count, which has no gradient, are none."""
    counted = summed(operand, module)
    if counted is not None and boolean(counted, module):
        return set()
    found = {key_of(n) for e in (operand, core(operand, module)) for n in nodes_of(e, indices=False)} - {""}
    return {name for name in found if not _COUNTS.search(name)}


def _tamed(name: str, operand: ast.expr, module: Module) -> bool:
    """Whether the operand is harmless already: chosen by a where of its own, clamped, with an eps."""
    at = core(operand, module)
    if name in ("exp", "expm1"):
        if range_of(operand, module).high <= 0:
            return True  # of minus a square
        found = operation(at, module)
        return found is not None and found.name in _KEPT_LOW
    if name.startswith("log") and isinstance(at, ast.BinOp) and isinstance(at.op, ast.Add):
        ones = (number(at.left, module), number(at.right, module))
        if 1.0 in ones:
            # log(x + 1) in the branch for x > 0 is as bad for x < -1 as log(x) is for x < 0
            return _not_negative(at.right if ones[0] == 1.0 else at.left, module)
    return guarded(operand, module)


_POSITIVE = {"abs", "abs_", "exp", "square", "relu", "sigmoid", "softmax", "softplus", "norm", "sqrt", "absolute"}


def _not_negative(node: ast.expr, module: Module) -> bool:
    """A distance, a square, an absolute value, and numbers times it."""
    at = core(node, module)
    if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Mult | ast.Div):
        sides = (at.left, at.right)
        return any(_not_negative(s, module) for s in sides) and all(
            _not_negative(s, module) or scalar(s, module) or isinstance(s, ast.Name) for s in sides
        )
    found = operation(at, module)
    if found is not None and found.name == "pow" and found.args:
        return (number(found.args[0], module) or 1) % 2 == 0
    return found is not None and found.name in _POSITIVE


def _to_integer(call: ast.Call, module: Module) -> bool:
    return called_last(call, module) in ("to", "type") and any(
        module.called(a).rpartition(".")[2] in ("long", "int64", "int32", "int", "bool") for a in call.args
    )


def _fix(
    branch: ast.expr, condition: ast.expr, name: str, operand: ast.expr, risky: ast.AST, first: bool, module: Module
) -> tuple[Change, ...]:
    """The double where: the operand is replaced by a harmless number where the branch is not taken."""
    written_here = any(n is risky for n in ast.walk(branch))
    if not written_here or not short(operand, module) or not short(condition, module):
        return ()
    spelled, needed = module.spell("torch.where")
    fill = _FILLS.get(name, "1.0")
    asked, text = module.source(condition), module.source(operand)
    chosen = f"{asked}, {text}, {fill}" if first else f"{asked}, {fill}, {text}"
    return (module.replace(operand, f"{spelled}({chosen})"), *needed)


RULE = Rule(
    code="NP210",
    name="where-dead-branch",
    what="""
Finds `torch.where(x > 0, torch.log(x), 0)`: a branch that is computed for all elements and is infinite or NaN, or has
an infinite slope, for just those where the condition does not choose it.
""",
    why="""
`torch.where` computes both branches everywhere and then chooses. The value is fine. Backward, the branch that was not
chosen gets a gradient of 0, and the chain rule multiplies it with the slope of the bad operation: 0 · ∞ and 0 · NaN are
NaN. `torch.where(x > 0, x.log(), 0)` at x = 0 has the value 0 and the gradient NaN; so has `sin(x) / x` at 0 behind
`torch.where(x == 0, 1, …)`, and `torch.where(x > 0, x, torch.exp(x))` at x = 100, where the exponential has overflowed.

The way out is a second `where` on the inside, which gives the bad operation a harmless operand.
""",
    bad="""
def entropy_loss(p):
    return -(p * torch.where(p > 0, torch.log(p), torch.zeros_like(p))).sum(-1).mean()
""",
    good="""
def entropy_loss(p):
    log_p = torch.where(p > 0, torch.log(torch.where(p > 0, p, 1.0)), torch.zeros_like(p))
    return -(p * log_p).sum(-1).mean()


def shorter_loss(p):
    return -(p * ops.select(p > 0, torch.log, 0.0, p)).sum(-1).mean()
""",
    miss="""
def log_positive(x):
    y = torch.log(x)
    y[x <= 0] = 0  # the same mistake, by assignment
    return y
""",
    false_alarm="""
No gradient flows through it: the operand is data, not something learned. Integers, `no_grad` and operands that are
clamped or chosen already are left alone.
""",
    fix="unsafe",
    fix_note="""
It writes the double `where`. Values stay the same; gradients change from NaN to 0 where the branch is not taken.
""",
    nodes=(ast.Call,),
    calls=frozenset({"where"}),
    check=check,
)

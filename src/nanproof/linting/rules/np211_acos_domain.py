"""NP211: acos of a cosine that has rounded past 1 is NaN."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..gradients import constant
from ..guards import checked, guarded, lower_bound
from ..numerics import boolean, division
from ..purpose import aside, in_loss, only_logged
from ..rule import Change, Found, Rule
from ..values import called_last, core, made_of, number, short, trail
from ..vanishing import squared

if TYPE_CHECKING:
    from ..source import Module

_INVERSE = {"acos", "arccos", "asin", "arcsin", "acos_", "asin_", "atanh", "arctanh", "atanh_"}
_INSIDE = {"tanh", "sin", "cos", "sigmoid", "rand", "hardtanh", "softsign"}


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    operand = _operand(node, module)
    if operand is None or aside(node, module) or only_logged(node, module):
        return
    bound = _bound(operand, module)
    if bound is not None and (bound < 1 or not in_loss(node, module)):
        return
    if bound is None and _inside(node, operand, module):
        return
    name = called_last(node, module).rstrip("_")
    if bound is None:
        message = f"{name} is NaN when {short(operand, module) or 'its operand'} has rounded past 1 or -1"
    else:
        message = f"{name} has an infinite slope at 1 and -1, and this clamp lets both through"
    yield Found(
        node=node,
        message=message,
        help="clamp a little inside: torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6)), or use atan2",
        edits=_fix(operand, module) if bound is None else (),
        about=node,
    )


def _operand(node: ast.Call, module: Module) -> ast.expr | None:
    found = module.operation(node)
    if found is not None:
        return found.operand
    if isinstance(node.func, ast.Attribute) and not module.called(node) and not node.args:
        root = module.receiver(node).partition(".")[0]
        return None if root in module.aliases or root in ("np", "math") else node.func.value
    return None


def _bound(operand: ast.expr, module: Module) -> float | None:
    """How far from zero a clamp lets the operand go; infinity if that is not a plain number; None without a clamp."""
    for part in trail(operand, module):
        if isinstance(part, ast.Call):
            last = called_last(part, module)
            if last.rstrip("_") in ("clamp", "clip"):
                low = lower_bound(part, module)
                return 0.0 if low is None or math.isinf(low) else abs(low)
            if last in ("min", "max") and len(part.args) > 1:
                return 0.0
            if any(
                word in last.lower() for word in ("clamp", "clip", "safe", "minimum", "maximum", "where", "nan_to_num")
            ):
                return 0.0
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult) and _shrinks(part, module):
            return 0.0
    return None


def _shrinks(node: ast.BinOp, module: Module) -> bool:
    """``x * (1 - 1e-6)``, ``0.9999 * x``."""
    factors = (number(node.left, module), number(node.right, module))
    return any(f is not None and 0 < abs(f) < 1 for f in factors)


def _inside(node: ast.Call, operand: ast.expr, module: Module) -> bool:
    """Whether the operand cannot leave the interval, is a constant, or was checked before."""
    if number(operand, module) is not None or constant(operand, module):
        return True
    held = core(operand, module)
    for part in made_of(held, module, limit=150):
        if isinstance(part, ast.Call):
            if called_last(part, module) in _INSIDE and part in ast.walk(held):
                return True
            if module.called(part).partition(".")[0] in ("numpy", "math"):
                return True
            if called_last(part, module) in ("clamp", "clip", "clamp_", "linspace", "arange"):
                return True
    parts = division(held, module)
    if parts is not None and isinstance(core(parts[1], module), ast.BinOp) and guarded(parts[1], module):
        return True  # a quotient by a length with an eps added stays below 1
    if isinstance(held, ast.Subscript) and boolean(held.slice, module):
        return True
    keys = {key_of(t) for t in trail(operand, module)} - {""}
    return checked(keys, node, module) or squared(held, module)


def _fix(operand: ast.expr, module: Module) -> tuple[Change, ...]:
    text = module.source(operand)
    if isinstance(operand, ast.BinOp | ast.UnaryOp | ast.IfExp | ast.Compare):
        text = f"({text})"
    return (module.replace(operand, f"{text}.clamp(-1 + 1e-6, 1 - 1e-6)"),)


RULE = Rule(
    code="NP211",
    name="acos-domain",
    what="""
Finds `torch.acos`, `torch.asin` and `torch.atanh` of something that nothing keeps inside [-1, 1], in a loss or a
forward pass; and, in a loss, of something that is clamped to exactly [-1, 1].
""",
    why="""
A cosine computed in floating point is not always at most 1. Of 10,000 random unit vectors in float32, the product with
themselves is above 1 for about 19 %; acos(1.0000001) is NaN.

The slope of acos is -1 / √(1 - x²), infinite at ±1. `x.clamp(-1, 1)` mends the value, but its gradient passes at
exactly 1, so two equal directions still have an infinite slope, and NaN one step further back. `1 - 1e-8` is 1 in
float32: an eps has to be at least 6e-8. `atan2(sin, cos)` has no such place.
""",
    bad="""
def angle_loss(a, b):
    cosine = (a * b).sum(dim=-1)
    return torch.acos(cosine).mean()
""",
    good="""
def angle_loss(a, b):
    cosine = (a * b).sum(dim=-1)
    return torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6)).mean()


def angle_loss_by_atan2(a, b):
    return torch.atan2(torch.linalg.cross(a, b).norm(dim=-1), (a * b).sum(dim=-1)).mean()
""",
    miss="""
class Head(nn.Module):
    def forward(self, cosine):
        return cosine.clamp(-1, 1).acos()  # outside a loss a clamp to exactly 1 is taken for meant
""",
    false_alarm="""
The operand is data that lies inside for certain, or nothing learned is behind it.
""",
    fix="unsafe",
    fix_note="It clamps to ±(1 - 1e-6): angles below 0.0014 radians become 0.0014, with a gradient of 0.",
    nodes=(ast.Call,),
    calls=frozenset(_INVERSE),
    check=check,
)

"""NP213: a fractional power is NaN below zero and has an infinite slope at zero."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..gradients import constant
from ..guards import checked, guarded
from ..purpose import only_logged, trains
from ..rule import Found, Rule
from ..values import called_last, core, made_of, number, operation, scalar, short, trail
from ..vanishing import is_constant, vanishes

if TYPE_CHECKING:
    from ..source import Module

_POSITIVE = {"exp", "softplus", "sigmoid", "softmax", "cosh", "relu", "norm", "shape", "size", "numel", "tensor"}


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    found = operation(node, module)
    if found is None or found.name != "pow" or found.operand is None or not found.args:
        return
    base, exponent = found.operand, number(found.args[0], module)
    if exponent is None or exponent % 1 == 0 or exponent < 0 or scalar(base, module):
        return
    why = _why(base, exponent, module)
    if not why or not trains(node, module) or only_logged(node, module) or _safe(node, base, module):
        return
    yield Found(
        node=node,
        message=f"{short(base, module) or 'this base'} {why}",
        help="keep the base away from zero first: x.clamp(min=1e-6) ** p",
        about=node,
    )


def _why(base: ast.expr, exponent: float, module: Module) -> str:
    """What is wrong with a base: it can be negative, or reach zero where the slope of the power is infinite."""
    at = core(base, module)
    found = operation(at, module)
    if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Sub) and not _by_number(at, module):
        return "can be negative, and a fractional power of a negative number is NaN"
    if exponent < 1 and found is not None and found.name == "abs":
        return "can be zero, where a power below 1 has an infinite slope"
    if exponent < 1 and exponent != 0.5 and vanishes(base, module) not in ("", "a difference"):
        return "can be zero, where a power below 1 has an infinite slope"
    return ""


def _by_number(node: ast.BinOp, module: Module) -> bool:
    """``1 - p``, ``x - 21``: which numbers these are is not said here."""
    return number(node.left, module) is not None or number(node.right, module) is not None


def _safe(node: ast.AST, base: ast.expr, module: Module) -> bool:
    if guarded(base, module) or is_constant(base, module) or constant(base, module):
        return True
    made = {called_last(p, module) for p in made_of(base, module, limit=80) if isinstance(p, ast.Call)}
    keys = {key_of(t) for t in trail(base, module)} - {""}
    return bool(made & _POSITIVE) or checked(keys, node, module)


RULE = Rule(
    code="NP213",
    name="fractional-pow",
    what="""
Finds, in a loss or a forward pass, a power with a fixed fractional exponent of something that can be negative, such as
a difference, or, for exponents below 1, of something that reaches zero, such as an absolute value. Powers of 0.5 of
squares and sums of squares are reported as roots, by NP205.
""",
    why="""
A fractional power of a negative number is NaN, in the value and in the gradient: `(-1.0) ** 0.75`. At zero the value is
0, but the slope of x^p is p · x^(p-1): infinite for p < 1. Behind `abs`, whose slope at 0 is 0, that is ∞ · 0 = NaN:
`x.abs().pow(0.75)` and `x.sign() * x.abs().pow(0.5)` have the gradient NaN at 0.
""",
    bad="""
def robust_loss(pred, target):
    return ((pred - target).abs() ** 0.75).mean()
""",
    good="""
def robust_loss(pred, target):
    return (((pred - target).abs() + 1e-6) ** 0.75).mean()
""",
    miss="""
class ToneMap(nn.Module):
    def forward(self, image):
        return image ** (1 / 2.2)  # what the image may hold is not said here
""",
    false_alarm="""
The base is positive for a reason that the code does not show. A lower bound costs nothing and says so.
""",
    nodes=(ast.BinOp, ast.Call),
    calls=frozenset({"pow", "pow_"}),
    check=check,
)

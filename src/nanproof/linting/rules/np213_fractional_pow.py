"""NP213: a fractional power is NaN below zero and has an infinite slope at zero."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..matching import Hit, Match, asked, constant, guarded, held, outside_loss, reported, training
from ..names import called_last, key_of
from ..ranges import range_of
from ..rule import Rule
from ..values import core, made_of, number, operation, scalar

if TYPE_CHECKING:
    from ..source import Module

_POSITIVE = {"exp", "softplus", "sigmoid", "softmax", "cosh", "relu", "norm", "shape", "size", "numel", "tensor"}
_ZERO = "can be zero, where a power below 1 has an infinite slope"
_LEARNED = "has a learned exponent, and a fractional power of a negative number is NaN"


def _negative(hit: Hit) -> bool:
    """A difference; not ``1 - p`` or ``x - 21``: which numbers these are is not said here."""
    at = core(hit.operand, hit.module)
    if not isinstance(at, ast.BinOp) or not isinstance(at.op, ast.Sub):
        return False
    return number(at.left, hit.module) is None and number(at.right, hit.module) is None


def _why(hit: Hit) -> str:
    if _negative(hit):
        return "can be negative, and a fractional power of a negative number is NaN"
    if _learned_exponent(hit) is not None:
        return "" if range_of(hit.operand, hit.module).low >= 0 else _LEARNED
    exponent = _exponent(hit)
    found = held(hit)
    if exponent < 1 and found is not None and found.name == "abs":
        return _ZERO
    reached = range_of(hit.operand, hit.module)
    return _ZERO if exponent < 1 and exponent != 0.5 and reached.zero and reached.low >= 0 else ""


def _learned_exponent(hit: Hit) -> ast.expr | None:
    """The exponent, if it is a parameter that training moves."""
    found = operation(hit.node, hit.module)
    given = found.args[0] if found is not None and found.args else None
    made = hit.module.values(given) if given is not None and key_of(given).startswith("self.") else []
    learned = any(isinstance(v, ast.Call) and called_last(v, hit.module) == "Parameter" for v in made)
    return given if learned else None


def _powers(node: ast.AST, module: Module) -> Iterator[Hit]:
    """A power with a fractional exponent, or one that is learned."""
    found = operation(node, module)
    if found is None or found.operand is None or found.name not in ("pow", "pow_") or not found.args:
        return
    hit = Hit(node, found.operand, module)
    exponent = number(found.args[0], module)
    fraction = exponent is not None and exponent > 0 and exponent % 1 != 0 and not scalar(found.operand, module)
    if fraction or _learned_exponent(hit) is not None:
        yield hit


def _exponent(hit: Hit) -> float:
    found = operation(hit.node, hit.module)
    return (number(found.args[0], hit.module) if found is not None and found.args else None) or 0.0


def _positive(hit: Hit) -> bool:
    if hit.why == _LEARNED:
        return False
    parts = made_of(hit.operand, hit.module, limit=80)
    return any(isinstance(p, ast.Call) and called_last(p, hit.module) in _POSITIVE for p in parts)


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
    default=False,
    match=Match(_powers, (ast.Call, ast.BinOp), frozenset({"pow", "pow_"})).of(_why),
    where=training,
    unless=(reported, guarded, constant, _positive, asked),
    doubt=(lambda h: h.why not in (_ZERO, _LEARNED) and outside_loss(h),),
    message=lambda h: f"{h.said('this base')} {h.why}",
    help="keep the base away from zero first: x.clamp(min=1e-6) ** p",
    about=lambda h: h.node,
)

"""NP213: a fractional power is NaN below zero and has an infinite slope at zero."""

from __future__ import annotations

import ast

from ..matching import Hit, asked, constant, guarded, held, power, reported, training
from ..names import called_last
from ..rule import Rule
from ..values import core, made_of, number, operation
from ..vanishing import is_constant, vanishes

_POSITIVE = {"exp", "softplus", "sigmoid", "softmax", "cosh", "relu", "norm", "shape", "size", "numel", "tensor"}
_ZERO = "can be zero, where a power below 1 has an infinite slope"


def _negative(hit: Hit) -> bool:
    """A difference; not ``1 - p`` or ``x - 21``: which numbers these are is not said here."""
    at = core(hit.operand, hit.module)
    if not isinstance(at, ast.BinOp) or not isinstance(at.op, ast.Sub):
        return False
    return number(at.left, hit.module) is None and number(at.right, hit.module) is None


def _why(hit: Hit) -> str:
    if _negative(hit):
        return "can be negative, and a fractional power of a negative number is NaN"
    exponent = _exponent(hit)
    found = held(hit)
    if exponent < 1 and found is not None and found.name == "abs":
        return _ZERO
    zero = exponent < 1 and exponent != 0.5 and vanishes(hit.operand, hit.module) not in ("", "a difference")
    return _ZERO if zero else ""


def _exponent(hit: Hit) -> float:
    found = operation(hit.node, hit.module)
    return (number(found.args[0], hit.module) if found is not None and found.args else None) or 0.0


def _positive(hit: Hit) -> bool:
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
    match=power(lambda e: e > 0 and e % 1 != 0).of(_why),
    where=training,
    unless=(reported, guarded, lambda h: is_constant(h.operand, h.module), constant, _positive, asked),
    doubt=(lambda h: h.why != _ZERO,),
    message=lambda h: f"{h.said('this base')} {h.why}",
    help="keep the base away from zero first: x.clamp(min=1e-6) ** p",
    about=lambda h: h.node,
)

"""NP215: the norm of a difference, as a loss; off by default."""

from __future__ import annotations

import ast

from ..matching import Hit, call, guarded, in_loss, reported
from ..rule import Rule
from ..values import core


def _difference(hit: Hit) -> ast.expr | None:
    at = core(hit.operand, hit.module)
    return at if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Sub) else None


RULE = Rule(
    code="NP215",
    name="norm-of-difference",
    what="""
Finds the norm of a difference as a loss, `(a - b).norm(dim=-1)`. Off by default: in most code it is a metric, or meant.
""",
    why="""
The gradient of ‖a - b‖ is a unit vector however near a is to b, and 0 at a = b (PyTorch puts 0 there: it is not NaN).
So near the goal a step of fixed size goes back and forth over it, and in half precision, where a - b is mostly
rounding error by then, in a direction that means nothing. A squared distance has a gradient that fades out, and a
smooth norm √(‖a - b‖² + ε²) is a norm far away and a square nearby.
""",
    bad="""
def point_loss(pred, target):
    return (pred - target).norm(dim=-1).mean()
""",
    good="""
def point_loss(pred, target):
    return ((pred - target).square().sum(dim=-1) + 1e-6).sqrt().mean()
""",
    false_alarm="""
The unit gradient is wanted: an L2 loss that is robust to outliers, with a learning rate that decays.
""",
    default=False,
    match=call("norm", "vector_norm").of(_difference),
    where=in_loss,
    unless=(guarded, reported),
    message=lambda h: (
        f"the norm of {h.said('a difference')} has a gradient of length 1 down to the very last digit, then none"
    ),
    help="use the squared distance, or a smooth norm: ((a - b).square().sum(-1) + eps**2).sqrt()",
)

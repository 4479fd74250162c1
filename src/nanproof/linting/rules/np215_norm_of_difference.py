"""NP215: the norm of a difference, as a loss; off by default."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..guards import guarded
from ..purpose import in_loss, only_logged
from ..rule import Found, Rule
from ..values import core, short

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    found = module.operation(node)
    if found is None or found.name not in ("norm", "vector_norm") or found.operand is None:
        return
    at = core(found.operand, module)
    if not isinstance(at, ast.BinOp) or not isinstance(at.op, ast.Sub) or guarded(at, module):
        return
    if in_loss(node, module) and not only_logged(node, module):
        yield Found(
            node=node,
            message=f"the norm of {short(at, module) or 'a difference'} has a gradient of length 1 down to the very "
            "last digit, then none",
            help="use the squared distance, or a smooth norm: ((a - b).square().sum(-1) + eps**2).sqrt()",
        )


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
    nodes=(ast.Call,),
    calls=frozenset({"norm", "vector_norm"}),
    check=check,
)

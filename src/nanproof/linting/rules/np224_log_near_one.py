"""NP224: the eps in log(1 - p + 1e-8) is lost beside the 1."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..gradients import constant
from ..purpose import only_logged, trains
from ..rule import Found, Rule
from ..values import core, number, short

if TYPE_CHECKING:
    from ..source import Module

_LOST = 2.0**-24
"""What is smaller than this changes nothing when it is added to 1 in float32."""


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    found = module.operation(node)
    if found is None or found.name not in ("log", "log2", "log10", "log_") or found.operand is None:
        return
    at = core(found.operand, module)
    if not isinstance(at, ast.BinOp) or not isinstance(at.op, ast.Sub):
        return
    one, probability = number(at.left, module), at.right
    if one is None or not 1 < one < 1 + _LOST:
        return
    if not trains(node, module) or only_logged(node, module) or constant(probability, module):
        return
    said = short(probability, module) or "p"
    yield Found(
        node=node,
        message=f"{module.source(at.left)} is 1 in float32, so this is log(0) = -inf once {said} rounds to 1",
        help=f"use logits (logsigmoid(-x)), or torch.log1p(-{said}.clamp(max=1 - 1e-6))",
    )


RULE = Rule(
    code="NP224",
    name="log-near-one",
    what="Finds `log(1 + eps - p)` with an eps below 6e-8, which is added to the 1 before anything is subtracted.",
    why="""
The float32 numbers next to 1 are 6e-8 below and 1.2e-7 above it, so `1e-8 + 1` is 1 and the eps is gone before `p` is
subtracted: where `p` has rounded to 1 this is log(0), -inf with an infinite gradient. `(1 - p) + 1e-8` keeps its eps in
float32; in float16 1e-8 is 0 itself.
""",
    bad="""
def negative_loss(p):
    return -torch.log(1e-8 + 1 - p).mean()
""",
    good="""
def negative_loss(logits):
    return -F.logsigmoid(-logits).mean()
""",
    false_alarm="`p` is bounded away from 1, such as by label smoothing of the model's own output.",
    nodes=(ast.Call,),
    calls=frozenset({"log", "log2", "log10", "log_"}),
    words=("e-",),
    check=check,
)

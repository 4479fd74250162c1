"""NP224: the eps in log(1 - p + 1e-8) is lost beside the 1."""

from __future__ import annotations

import ast

from ..matching import Hit, call, constant, reported, training
from ..names import called_last
from ..rule import Rule
from ..values import core, made_of, number
from ..vanishing import squared

_LOST = 2.0**-24
"""What is smaller than this changes nothing when it is added to 1 in float32."""


def _from_one(hit: Hit) -> ast.expr | None:
    """``p`` of ``1 + eps - p``, where the eps is lost beside the 1, and of ``1 - tanh(x) ** 2`` without one."""
    at = core(hit.operand, hit.module)
    if not isinstance(at, ast.BinOp) or not isinstance(at.op, ast.Sub):
        return None
    one = number(at.left, hit.module)
    saturates = one == 1 and squared(at.right, hit.module) and _tanh(at.right, hit)
    return at.right if saturates or (one is not None and 1 < one < 1 + _LOST) else None


def _tanh(square: ast.expr, hit: Hit) -> bool:
    parts = made_of(square, hit.module, limit=40)
    return any(isinstance(p, ast.Call) and called_last(p, hit.module) in ("tanh", "tanh_") for p in parts)


RULE = Rule(
    code="NP224",
    name="log-near-one",
    what="""
Finds `log(1 + eps - p)` with an eps below 6e-8, which is added to the 1 before anything is subtracted, and
`log(1 - tanh(x) ** 2)` without an eps.
""",
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
    words=("e-", "tanh"),
    match=call("log", "log2", "log10", "log_").of(_from_one),
    where=training,
    unless=(reported, constant),
    message=lambda h: f"nothing is left beside the 1 in float32: this is log(0) = -inf once {h.said('p')} rounds to 1",
    help="use logits: logsigmoid(-x), and 2 * (log(2) - x - softplus(-2 * x)) for tanh; or clamp p to 1 - 1e-6",
    about=lambda h: h.node,
)

"""NP212: log(1 + exp(x)) overflows where softplus does not."""

from __future__ import annotations

import ast

from ..gradients import constant, enclosing
from ..matching import Hit, call, exponent, not_aside, outside_loss
from ..names import called_last
from ..numerics import shifted
from ..rule import Change, Rule
from ..values import core, made_of, number, scalar


def beside_one(hit: Hit) -> ast.expr | None:
    """``x`` of ``log1p(x)``, ``log(1 + x)`` and ``log(x + 1)``."""
    node = core(hit.operand, hit.module)
    if isinstance(hit.node, ast.Call) and called_last(hit.node, hit.module) == "log1p":
        return hit.operand
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(one, ast.Constant) and number(one, hit.module) == 1:
                return other
    return None


def _varies(hit: Hit) -> bool:
    given = any(isinstance(p, ast.Lambda) for p in hit.module.parents(hit.node))  # by somebody who may have masked it
    return not (given or scalar(hit.operand, hit.module) or constant(hit.operand, hit.module))


def _at_most_one(hit: Hit) -> bool:
    """exp(-|x|), of the safe formula."""
    if any(isinstance(p, ast.Call) and called_last(p, hit.module) == "abs" for p in ast.walk(hit.operand)):
        return True
    at = core(hit.operand, hit.module)
    inner = core(at.operand, hit.module) if isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.USub) else None
    return isinstance(inner, ast.Call) and called_last(inner, hit.module) == "abs"


def _log_odds(hit: Hit) -> bool:
    """The logit of a probability, which an eps keeps within ±20 or so."""
    return any(
        isinstance(p, ast.Call) and called_last(p, hit.module) == "logit" for p in made_of(hit.operand, hit.module)
    )


def _caught(hit: Hit) -> bool:
    """The function puts x in the place of an infinite result."""
    scope = hit.module.function(hit.node)
    wheres = [c for c in hit.module.calls("where") if hit.module.function(c) is scope]
    return any("inf" in hit.module.source(c) for c in wheres)


def _parameter(hit: Hit) -> bool:
    """A parameter of its own moves slowly and starts small."""
    return isinstance(hit.operand, ast.Attribute)


def _aside(hit: Hit) -> bool:
    """Neither in a loss nor in a forward pass: times are drawn so, for instance."""
    return outside_loss(hit) and all(f.name != "forward" for f in enclosing(hit.node, hit.module))


def _shrinks(hit: Hit) -> bool:
    """``-k * pi``: the product of a positive quantity and a negative number, which only gets smaller."""
    at = core(hit.operand, hit.module)
    scaled = isinstance(at, ast.BinOp) and isinstance(at.op, ast.Mult)
    return scaled and any(isinstance(n, ast.USub) for n in ast.walk(at))


def _softplus(hit: Hit) -> tuple[Change, ...]:
    name, needed = hit.module.spell("torch.nn.functional.softplus")
    inside = any(n is hit.operand for n in ast.walk(hit.node))
    return (hit.module.replace(hit.node, f"{name}({hit.module.source(hit.operand)})"), *needed) if inside else ()


RULE = Rule(
    code="NP212",
    name="softplus-overflow",
    what="Finds `torch.log(1 + torch.exp(x))`, in function and method form: a softplus written by hand.",
    why="""
exp overflows at x = 88.73 in float32 and bfloat16, at 11.09 in float16: the value is inf and the gradient NaN, although
the right answer is x itself with a gradient of 1. `F.softplus(89.0)` is 89.
""",
    bad="""
def ranking_loss(positive, negative):
    return torch.log(1 + torch.exp(negative - positive)).mean()
""",
    good="""
def ranking_loss(positive, negative):
    return F.softplus(negative - positive).mean()
""",
    false_alarm="x is bounded, such as a difference of two cosines. softplus is as good there, and no slower.",
    fix="unsafe",
    fix_note="Above 20 `F.softplus` gives x itself, 2e-9 less in float64; float32 does not see the difference.",
    words=("exp",),
    match=call("log", "log1p").of(beside_one, _varies, exponent),
    where=not_aside,
    unless=(lambda h: shifted(h.operand, h.module), _caught, _at_most_one, _log_odds),
    doubt=(_parameter, _aside, _shrinks),
    message="log(1 + exp(x)) is inf from x = 88.7 on (float16: 11.09), and its gradient NaN",
    help="use torch.nn.functional.softplus(x)",
    edit=_softplus,
)

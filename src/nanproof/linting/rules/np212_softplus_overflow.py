"""NP212: log(1 + exp(x)) overflows where softplus does not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..gradients import constant
from ..numerics import shifted
from ..purpose import aside
from ..rule import Change, Found, Rule
from ..values import called_last, core, number, operation, scalar

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    found = module.operation(node)
    if found is None or found.operand is None or found.name not in ("log", "log1p") or aside(node, module):
        return
    rest = found.operand if found.name == "log1p" else beside_one(core(found.operand, module), module)
    if rest is None or scalar(rest, module) or constant(rest, module):
        return
    exponential = operation(core(rest, module), module)
    if exponential is not None and exponential.name == "exp" and exponential.operand is not None:
        yield from _softplus(node, rest, exponential.operand, module)


def _softplus(node: ast.AST, rest: ast.expr, exponent: ast.expr, module: Module) -> Iterator[Found]:
    if shifted(exponent, module) or _caught(node, module):
        return
    at = exponent
    if any(isinstance(p, ast.Call) and called_last(p, module) == "abs" for p in ast.walk(at)):
        return  # exp(-|x|) is at most 1: this is the safe formula
    if isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.USub):
        inner = operation(core(at.operand, module), module)
        if inner is not None and inner.name == "abs":
            return  # exp(-|x|) is at most 1: this is the safe formula
    name, needed = module.spell("torch.nn.functional.softplus")
    yield Found(
        node=node,
        message="log(1 + exp(x)) is inf from x = 88.7 on (float16: 11.09), and its gradient NaN",
        help="use torch.nn.functional.softplus(x)",
        edits=_written(node, rest, f"{name}({module.source(exponent)})", needed, module),
    )


def _caught(node: ast.AST, module: Module) -> bool:
    """Whether the function puts x in the place of an infinite result."""
    scope = module.function(node)
    wheres = [c for c in module.calls("where") if module.function(c) is scope]
    return any("inf" in module.source(c) for c in wheres)


def beside_one(node: ast.expr, module: Module) -> ast.expr | None:
    """``x`` for ``1 + x`` and ``x + 1``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(one, ast.Constant) and number(one, module) == 1:
                return other
    return None


def _written(
    node: ast.AST, rest: ast.expr, text: str, needed: tuple[Change, ...], module: Module
) -> tuple[Change, ...]:
    """The edit, if what is rewritten stands in the node itself and not behind a name."""
    inside = any(n is rest for n in ast.walk(node)) and isinstance(rest, ast.expr)
    held = core(rest, module)
    return (module.replace(node, text), *needed) if inside and ("exp" not in text or held is rest) else ()


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
    nodes=(ast.Call,),
    calls=frozenset({"log", "log1p"}),
    words=("exp",),
    check=check,
)

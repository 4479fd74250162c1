"""NP212: log(1 + x) and exp(x) - 1 lose small x; log(1 + exp(x)) overflows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..numerics import shifted
from ..purpose import trains
from ..rule import Change, Found, Rule
from ..values import called_last, core, number, operation, scalar, short

_COUNTS = re.compile(r"position|(^|_)(ids?|counts?|freqs?|num|lens?|lengths?|degrees?|deg|idx|index|steps?)(_|$)", re.I)

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    if isinstance(node, ast.BinOp):
        yield from _minus_one(node, module)
        return
    found = module.operation(node)
    if found is None or found[1] is None or found[0] not in ("log", "log1p") or module.is_test:
        return
    rest = found[1] if found[0] == "log1p" else _beside_one(found[1], module)
    if rest is None or scalar(rest, module):
        return
    exponential = operation(core(rest, module), module)
    if exponential is not None and exponential[0] == "exp" and exponential[1] is not None:
        yield from _softplus(node, rest, exponential[1], module)
    elif found[0] == "log" and trains(node, module) and not _counted(rest, module):
        name, needed = module.spell("torch.log1p")
        text = short(rest, module) or "x"
        yield Found(
            node=node,
            message=f"1 + {text} has lost every {text} below 6e-8 (float16: 5e-4) before the logarithm is taken",
            help="use torch.log1p(x)",
            edits=_written(node, rest, f"{name}({module.source(rest)})", needed, module),
            safe=True,
        )


def _counted(rest: ast.expr, module: Module) -> bool:
    """Counts and positions, which are whole numbers."""
    if any(isinstance(p, ast.Call) and called_last(p, module) in ("floor", "round", "ceil") for p in ast.walk(rest)):
        return True
    return any(_COUNTS.search(key_of(n)) for n in ast.walk(rest) if key_of(n))


def _softplus(node: ast.AST, rest: ast.expr, exponent: ast.expr, module: Module) -> Iterator[Found]:
    if shifted(exponent, module) or module.under_no_grad(node):
        return
    at = exponent
    if isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.USub):
        inner = operation(core(at.operand, module), module)
        if inner is not None and inner[0] == "abs":
            return  # exp(-|x|) is at most 1: this is the safe formula
    name, needed = module.spell("torch.nn.functional.softplus")
    yield Found(
        node=node,
        message="log(1 + exp(x)) is inf from x = 88.7 on (float16: 11.09), and its gradient NaN",
        help="use torch.nn.functional.softplus(x)",
        edits=_written(node, rest, f"{name}({module.source(exponent)})", needed, module),
        safe=True,
    )


def _minus_one(node: ast.BinOp, module: Module) -> Iterator[Found]:
    """``torch.exp(x) - 1``."""
    if not isinstance(node.op, ast.Sub) or not (isinstance(node.right, ast.Constant) and node.right.value == 1):
        return
    found = module.operation(node.left)
    if found is None or found[0] != "exp" or found[1] is None or scalar(found[1], module):
        return
    if module.is_test or not trains(node, module):
        return
    name, needed = module.spell("torch.expm1")
    yield Found(
        node=node,
        message="exp(x) - 1 has lost every x below 6e-8 (float16: 5e-4) before the 1 is subtracted",
        help="use torch.expm1(x)",
        edits=(module.replace(node, f"{name}({module.source(found[1])})"), *needed),
        safe=True,
    )


def _beside_one(node: ast.expr, module: Module) -> ast.expr | None:
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
    name="log1p-expm1",
    what="""
Finds `torch.log(1 + x)` and `torch.exp(x) - 1`, in function and method form, and `torch.log(1 + torch.exp(x))`, which
is a softplus written by hand.
""",
    why="""
1 + x is rounded to the neighbours of 1, which are 1.2e-7 apart in float32, 9.8e-4 in float16 and 7.8e-3 in bfloat16. Of
x = 1e-8 nothing is left: `log(1 + x)` is 0 and so is `exp(x) - 1`, where log1p and expm1 give 1e-8. A loss that gets
small stops moving there.

log(1 + exp(x)) is worse: exp overflows at x = 88.73 (float16: 11.09), the value is inf and the gradient NaN, although
the right answer is x itself with a gradient of 1. `F.softplus(89.0)` is 89.
""",
    bad="""
import torch


def ranking_loss(positive, negative):
    return torch.log(1 + torch.exp(negative - positive)).mean()
""",
    good="""
import torch
import torch.nn.functional as F


def ranking_loss(positive, negative):
    return F.softplus(negative - positive).mean()
""",
    miss="""
import torch


def ranking_loss(positive, negative):
    odds = 1 + torch.exp(negative - positive)
    return torch.log(odds).mean()  # the sum has a name of its own
""",
    false_alarm="""
x is never small, such as a count. log1p is as good there, and no slower.
""",
    fix="safe",
    fix_note="The value and the gradient stay the same to the rounding of float32, and get better where x is small.",
    nodes=(ast.Call, ast.BinOp),
    calls=frozenset({"log", "log1p"}),
    words=("log", "exp"),
    check=check,
)

"""NP222: log(1 + x) and exp(x) - 1 lose small x; off by default."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..matching import Hit, Match, call, exponent, training
from ..rule import Moved, Rule
from ..values import called_last, scalar
from .np212_softplus_overflow import beside_one

if TYPE_CHECKING:
    from ..source import Module

_COUNTS = re.compile(r"position|(^|_)(ids?|counts?|freqs?|num|lens?|lengths?|degrees?|deg|idx|index|steps?)(_|$)", re.I)
_LOGS = call("log").of(beside_one, lambda h: not scalar(h.operand, h.module), lambda h: exponent(h) is None)


def _find(node: ast.AST, module: Module) -> Iterator[Hit]:
    """``torch.log(1 + x)``, and ``torch.exp(x) - 1``."""
    if not isinstance(node, ast.BinOp):
        yield from _LOGS.find(node, module)
    elif isinstance(node.op, ast.Sub) and isinstance(node.right, ast.Constant) and node.right.value == 1:
        found = module.operation(node.left)
        if found is not None and found.name == "exp" and found.operand is not None:
            yield from () if scalar(found.operand, module) else (Hit(node, found.operand, module),)


def _counted(hit: Hit) -> bool:
    """Counts and positions, which are whole numbers."""
    parts = list(ast.walk(hit.operand)) if isinstance(hit.node, ast.Call) else []
    whole = any(isinstance(p, ast.Call) and called_last(p, hit.module) in ("floor", "round", "ceil") for p in parts)
    return whole or any(_COUNTS.search(key_of(n)) for n in parts if key_of(n))


def _better(hit: Hit) -> Moved:
    name, needed = hit.module.spell("torch.log1p" if isinstance(hit.node, ast.Call) else "torch.expm1")
    return Moved((hit.module.replace(hit.node, f"{name}({hit.module.source(hit.operand)})"), *needed), safe=True)


def _message(hit: Hit) -> str:
    x = hit.said("x")
    what = (
        (f"1 + {x}", "the logarithm is taken")
        if isinstance(hit.node, ast.Call)
        else ("exp(x) - 1", "the 1 is subtracted")
    )
    return f"{what[0]} has lost every {x} below 6e-8 (float16: 5e-4) before {what[1]}"


RULE = Rule(
    code="NP222",
    name="log1p-expm1",
    what="Finds `torch.log(1 + x)` and `torch.exp(x) - 1`, in function and method form.",
    why="""
1 + x is rounded to the neighbors of 1, which are 1.2e-7 apart in float32, 9.8e-4 in float16 and 7.8e-3 in bfloat16. Of
x = 1e-8 nothing is left: `log(1 + x)` is 0 and so is `exp(x) - 1`, where log1p and expm1 give 1e-8. Nothing becomes
NaN by it, which is why the rule is off by default.
""",
    bad="""
def spectrum_loss(a, b):
    return (torch.log(1 + a) - torch.log(1 + b)).abs().mean()
""",
    good="""
def spectrum_loss(a, b):
    return (torch.log1p(a) - torch.log1p(b)).abs().mean()
""",
    false_alarm="x is never small, such as a count. log1p is as good there, and no slower.",
    fix="safe",
    fix_note="The value and the gradient stay the same to the rounding of float32, and get better where x is small.",
    default=False,
    words=("log", "exp"),
    match=Match(_find, (ast.Call, ast.BinOp), frozenset({"log"})),
    where=training,
    unless=(_counted,),
    message=_message,
    help="use torch.log1p(x), or torch.expm1(x)",
    edit=_better,
)

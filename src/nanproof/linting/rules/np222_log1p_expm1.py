"""NP222: log(1 + x) and exp(x) - 1 lose small x; off by default."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..purpose import trains
from ..rule import Found, Rule
from ..values import called_last, core, operation, scalar, short
from .np212_softplus_overflow import beside_one

_COUNTS = re.compile(r"position|(^|_)(ids?|counts?|freqs?|num|lens?|lengths?|degrees?|deg|idx|index|steps?)(_|$)", re.I)

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    if isinstance(node, ast.BinOp):
        yield from _minus_one(node, module)
        return
    found = module.operation(node)
    if found is None or found.operand is None or found.name != "log" or module.is_test:
        return
    rest = beside_one(found.operand, module)
    if rest is None or scalar(rest, module):
        return
    exponential = operation(core(rest, module), module)
    if exponential is not None and exponential.name == "exp":
        return  # NP212
    if trains(node, module) and not _counted(rest, module):
        name, needed = module.spell("torch.log1p")
        text = short(rest, module) or "x"
        yield Found(
            node=node,
            message=f"1 + {text} has lost every {text} below 6e-8 (float16: 5e-4) before the logarithm is taken",
            help="use torch.log1p(x)",
            edits=(module.replace(node, f"{name}({module.source(rest)})"), *needed),
            safe=True,
        )


def _counted(rest: ast.expr, module: Module) -> bool:
    """Counts and positions, which are whole numbers."""
    if any(isinstance(p, ast.Call) and called_last(p, module) in ("floor", "round", "ceil") for p in ast.walk(rest)):
        return True
    return any(_COUNTS.search(key_of(n)) for n in ast.walk(rest) if key_of(n))


def _minus_one(node: ast.BinOp, module: Module) -> Iterator[Found]:
    """``torch.exp(x) - 1``."""
    if not isinstance(node.op, ast.Sub) or not (isinstance(node.right, ast.Constant) and node.right.value == 1):
        return
    found = module.operation(node.left)
    if found is None or found.name != "exp" or found.operand is None or scalar(found.operand, module):
        return
    if module.is_test or not trains(node, module):
        return
    name, needed = module.spell("torch.expm1")
    yield Found(
        node=node,
        message="exp(x) - 1 has lost every x below 6e-8 (float16: 5e-4) before the 1 is subtracted",
        help="use torch.expm1(x)",
        edits=(module.replace(node, f"{name}({module.source(found.operand)})"), *needed),
        safe=True,
    )


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
    nodes=(ast.Call, ast.BinOp),
    calls=frozenset({"log"}),
    words=("log", "exp"),
    check=check,
)

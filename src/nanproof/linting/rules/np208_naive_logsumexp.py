"""NP208: log(sum(exp(x))) overflows where logsumexp does not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..gradients import constant
from ..guards import guarded
from ..numerics import shifted
from ..purpose import aside
from ..rewrite import Moved, move
from ..rule import Found, Rule
from ..values import core, operation, trail
from .np209_naive_softmax import small_exponent

if TYPE_CHECKING:
    from ..names import Operation
    from ..source import Module


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    found = module.operation(node)
    if found is None or found.name not in ("log", "log_") or found.operand is None or aside(node, module):
        return
    total = operation(core(found.operand, module), module)
    if total is None or total.name not in ("sum", "mean") or total.operand is None:
        return
    exponential = operation(core(total.operand, module), module)
    if exponential is None or exponential.name != "exp" or exponential.operand is None:
        return
    if (
        shifted(exponential.operand, module)
        or constant(exponential.operand, module)
        or small_exponent(exponential.operand, module)
        or any(key_of(t) and guarded_elsewhere(t, module) for t in trail(found.operand, module))
    ):
        return
    moved = _rewrite(node, found.operand, total, exponential.operand, module)
    yield Found(
        node=node,
        message="the logarithm of a sum of exponentials is inf as soon as one exponent passes 88.7 (float16: 11.09)",
        help="use torch.logsumexp(x, dim), which subtracts the largest exponent first",
        edits=moved.edits,
        safe=moved.safe,
    )


def guarded_elsewhere(node: ast.expr, module: Module) -> bool:
    """Whether several assignments compete for a name and one of them keeps it away from zero."""
    return module.value(node) is None and guarded(node, module)


def _rewrite(node: ast.Call, operand: ast.expr, total: Operation, exponent: ast.expr, module: Module) -> Moved:
    """``torch.logsumexp`` needs to know the dimension, so a sum over everything is left to the user."""
    _, summand, rest, keywords = total
    dims = keywords.get("dim", keywords.get("axis", rest[0] if rest else None))
    if (
        total.name != "sum"
        or dims is None
        or len(rest) > 2
        or set(keywords) - {"dim", "axis", "keepdim", "keepdims"}
        or summand is None
    ):
        return Moved()
    keep = keywords.get("keepdim", keywords.get("keepdims", rest[1] if len(rest) > 1 else None))
    name, needed = module.spell("torch.logsumexp")
    args = [module.source(exponent), f"dim={module.source(dims)}"]
    args += [f"keepdim={module.source(keep)}"] if keep is not None else []
    names = [t for t in [*trail(operand, module), *trail(summand, module)] if key_of(t)]
    if len(names) > 1:
        return Moved()
    held = names[0] if names else operand
    parts = [exponent, dims, *([keep] if keep is not None else [])]
    return move(node, held, parts, f"{name}({', '.join(args)})", needed, module)


RULE = Rule(
    code="NP208",
    name="naive-logsumexp",
    what="""
Finds `torch.log(torch.exp(x).sum(dim))` and its spellings, where the largest value is not subtracted first.
""",
    why="""
exp(x) is infinite from x = 88.73 on in float32 and bfloat16, and from 11.09 on in float16; below -104 it is 0. The
logarithm brings the number back into range, but too late: of [88, 90] it makes inf with a gradient of [0, NaN], of
[-104, -110] it makes -inf with NaN. `logsumexp` subtracts the largest exponent first: 90.127, gradient [0.119, 0.881].
""",
    bad="""
def partition(scores):
    return torch.log(torch.sum(torch.exp(scores), dim=1))
""",
    good="""
def partition(scores):
    return torch.logsumexp(scores, dim=1)
""",
    miss="""
def partition(scores, keep):
    return torch.log((torch.exp(scores) * keep).sum(1))  # masked: fill with -inf, then logsumexp
""",
    false_alarm="""
The exponents are known to be small, such as cosines divided by a temperature of 0.1; logsumexp is as good there. If
the largest value is subtracted in a way that the rule does not see, silence the line.
""",
    fix="safe",
    fix_note="""
The value and the gradient stay the same, to rounding, wherever the old ones were finite. There is no fix for a sum over
all dimensions or a mean, where `torch.logsumexp` needs more than the code says.
""",
    nodes=(ast.Call,),
    calls=frozenset({"log", "log_"}),
    words=("exp",),
    check=check,
)

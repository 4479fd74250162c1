"""NP214: an eps that changes nothing, because it is too small beside what it is added to."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..guards import lower_bound
from ..names import called_last, word_set
from ..rule import Change, Found, Rule
from ..values import core, number

if TYPE_CHECKING:
    from ..source import Module

_CLAMPS = {"clamp", "clip", "clamp_", "clip_", "clamp_min"}
_HALF_STEP = 2.0**-24
"""Half the distance from 1 to the next float32: anything smaller is lost beside 1."""
_NORMS = word_set(
    """RMSNorm LayerNorm BatchNorm1d BatchNorm2d BatchNorm3d GroupNorm InstanceNorm1d InstanceNorm2d rms_norm
    layer_norm group_norm batch_norm instance_norm"""
)
_WHY = re.compile(r"\beps|epsilon|avoid|prevent|zero|stab|nan|divi|1e-", re.I)
_LEAST = 1e-12
"""The smallest eps that a common model has on purpose."""


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    found = list(_added(node, module) if isinstance(node, ast.BinOp) else _norm(node, module))
    if found and not (module.is_test or "float64" in module.text or ".double(" in module.text):
        yield from found


def _added(node: ast.BinOp, module: Module) -> Iterator[Found]:
    """``n.clamp(min=1) + 1e-8``."""
    if not isinstance(node.op, ast.Add):
        return
    for large, small in ((node.left, node.right), (node.right, node.left)):
        least = _least(large, module) if not isinstance(large, ast.Constant) else None
        eps = number(small, module) if least is not None else None
        if least is not None and eps is not None and 0 < eps < least * _HALF_STEP:
            yield Found(
                node=node,
                message=f"adding {eps:g} changes nothing: the other side is at least {least:g}, where float32 steps "
                f"are {2 * least * _HALF_STEP:.1g}",
                help="leave the eps out; the lower bound already does what it was meant for",
                edits=(module.replace(node, module.source(large)), *_explained(node, module)),
                safe=True,
            )
            return


def _explained(node: ast.AST, module: Module) -> tuple[Change, ...]:
    """The comment at the end of the line that says what the eps was for."""
    line = module.line(node.end_lineno or 0)  # type: ignore[attr-defined]
    at = line.rfind("#")
    if at < 0 or not _WHY.search(line[at:]) or "noqa" in line[at:]:
        return ()
    start = module.starts[node.end_lineno - 1]  # type: ignore[attr-defined]
    before = len(line[:at].rstrip())
    return (Change(start=start + before, end=start + len(line.rstrip()), text="", comment=True),)


def _least(node: ast.expr, module: Module) -> float | None:
    """The lower bound that a clamp gives an expression."""
    at = core(node, module)
    if isinstance(at, ast.Call):
        found = module.operation(at)
        if module.called(at) == "max" or (found is not None and found.name == "maximum"):
            numbers = [n for n in (number(a, module) for a in at.args) if n is not None]
            return max(numbers, default=None)
        if called_last(at, module) in _CLAMPS and module.operation(at):
            low = lower_bound(at, module)
            return low if low is not None and math.isfinite(low) and low > 0 else None
    return None


def _norm(node: ast.AST, module: Module) -> Iterator[Found]:
    """``nn.RMSNorm(dim, eps=1e-20)``."""
    if not isinstance(node, ast.Call):
        return
    given = next((k.value for k in node.keywords if k.arg in ("eps", "epsilon")), None)
    if given is None:
        return
    choices = [given.body, given.orelse] if isinstance(given, ast.IfExp) else [given]
    values = [v for v in (number(c, module) for c in choices) if v is not None]
    eps = min(values, default=1.0)
    if 0 <= eps < _LEAST:
        slope = f"up to {eps**-0.5:.0g}" if eps else "without bound"
        yield Found(
            node=node,
            message=f"an eps of {eps:g} protects nothing: gradients grow {slope} where the input is zero",
            help="use 1e-6 (1e-5 in half precision)",
        )


RULE = Rule(
    code="NP214",
    name="inert-eps",
    what="""
Finds an eps that does nothing: added to a value that a clamp keeps far above it, `n.clamp(min=1) + 1e-8`; or given to a
normalization layer and below 1e-12.
""",
    why="""
The float32 after 1 is 1 + 1.2e-7. What is nearer is rounded away: 1 + 1e-8 is 1, bit for bit, and so for every larger
number. The clamp already keeps the divisor from zero; the eps only looks like a guard. It is often the trace of a
repair that did not repair anything.

In a norm, x · rsqrt(mean(x²) + eps), the slope at x = 0 is 1/√eps: 1e10 for an eps of 1e-20, and in float16 such an eps
is 0 altogether. A dead channel or a padded row then sends back gradients ten billion times too large.
""",
    bad="""
def masked_loss(loss, mask):
    return (loss * mask).sum() / (mask.sum().clamp(min=1) + 1e-8)
""",
    good="""
def masked_loss(loss, mask):
    return (loss * mask).sum() / mask.sum().clamp(min=1)
""",
    miss="""
def masked_loss(loss, mask):
    return (loss * mask).sum() / (1 + mask.sum() + 1e-8)  # at least 1, but not by a clamp
""",
    false_alarm="""
The tensors are float64. Files that mention float64 are left alone.
""",
    fix="safe",
    fix_note="""
An eps that is added is taken out; every float32 result stays the same, bit for bit. The eps of a norm is left to you.
""",
    default=False,
    nodes=(ast.BinOp, ast.Call),
    calls=frozenset(_NORMS),
    words=("e-", "0.00000"),
    check=check,
)

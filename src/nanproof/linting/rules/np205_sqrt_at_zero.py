"""NP205: the slope of a square root at zero is infinite, and infinity times zero is NaN."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..guards import checked, guarded
from ..purpose import only_logged, trains
from ..rule import Change, Found, Rule
from ..values import called_last, names_of, number, operation, scalar, short, trail
from ..vanishing import is_constant, vanishes

if TYPE_CHECKING:
    from ..source import Module

_ROOTS = {"sqrt", "sqrt_", "rsqrt", "rsqrt_"}
# Noise schedules are differences such as 1 − ᾱ; grids and windows are constants.
_SCHEDULE = re.compile(
    r"(^|_)(alphas?|betas?|sigmas?|sigs?|gammas?|snr|cumprod|prod|timesteps?|t|t\d|s|tau|noise\w*|decay|rho|eta|a_?bar|ab|"
    r"at?|bias_correction\d?|beta\d)(_|$|\d)",
    re.I,
)


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    operand = _operand(node, module)
    if operand is None:
        return
    kind = vanishes(operand, module)
    if not kind or not trains(node, module) or _safe(node, operand, kind, module):
        return
    yield Found(
        node=node,
        message=f"the square root of {kind} has an infinite slope at zero, so its gradient there is NaN",
        help="add an eps under the root: torch.sqrt(x + 1e-12); an eps outside it, or clamp(min=0), does not help",
        edits=_fix(operand, module),
    )


def _operand(node: ast.AST, module: Module) -> ast.expr | None:
    """What stands under a root: ``torch.sqrt(x)``, ``x.sqrt()``, ``x ** 0.5``, ``x.pow(0.5)``."""
    found = operation(node, module)
    if found is None or found[1] is None:
        return None
    if found[0] in _ROOTS:
        return found[1]
    if found[0] == "pow" and found[2] and abs(number(found[2][0], module) or 0) == 0.5 and not scalar(found[1], module):
        return found[1]
    return None


def _safe(node: ast.AST, operand: ast.expr, kind: str, module: Module) -> bool:
    if guarded(operand, module) or only_logged(node, module):
        return True
    names = {n.rpartition(".")[2] for n in names_of(operand, module) if not n.startswith("self")}
    if "square" not in kind and names and all(_SCHEDULE.search(n) for n in names):
        return True
    keys = {key_of(t) for t in trail(operand, module)} - {""}
    return checked(keys, node, module) or is_constant(operand, module)


def _fix(operand: ast.expr, module: Module) -> tuple[Change, ...]:
    if isinstance(operand, ast.Call) and called_last(operand, module) in ("clamp", "clip", "clamp_min"):
        low = [k.value for k in operand.keywords if k.arg == "min"] or operand.args[-1:]
        zero = [n for n in low if number(n, module) == 0]
        return (module.replace(zero[0], "1e-12"),) if zero else ()
    return (module.replace(operand, f"{module.source(operand)} + 1e-12"),) if short(operand, module) else ()


RULE = Rule(
    code="NP205",
    name="sqrt-at-zero",
    what="""
Finds, in a loss or a forward pass, the square root of something that can be exactly zero: a square, a sum or mean of
squares, a variance, a difference, or a value clamped to zero. Powers of 0.5 count as roots.
""",
    why="""
The derivative of √x is 1 / (2√x): infinite at 0. The chain rule multiplies it with the derivative of what is inside,
and for a square that is 0 at the same place: ∞ · 0 is NaN. So the distance between two equal points,
`((a - b) ** 2).sum().sqrt()`, is a harmless 0 whose gradient is NaN. With
`torch.sqrt(d.clamp(min=0))` as the distances among 64 random points of 16 dimensions, all 1024 gradients are NaN,
because each point has the distance 0 from itself.

What does not help: an eps outside the root, `torch.sqrt(s) + 1e-8`, because the slope inside stays infinite; and
`clamp(min=0)`, because its gradient passes at exactly 0. What helps: an eps under the root. With 1e-12 the slope is at
most 5e5; in float16, 1e-12 is 0, so compute the root in float32 or use a larger eps. `x.norm()` and `torch.cdist` have
a gradient of 0 at 0, and `ops.safe_norm` too.
""",
    bad="""
import torch


def distance_loss(a, b):
    return torch.sqrt(((a - b) ** 2).sum(dim=-1)).mean()
""",
    good="""
import torch
from nanproof import ops


def distance_loss(a, b):
    return ops.safe_norm(a - b, dim=-1).mean()


def distance_loss_with_eps(a, b):
    return torch.sqrt(((a - b) ** 2).sum(dim=-1) + 1e-12).mean()
""",
    miss="""
import torch


def centerness_loss(left, right):
    return torch.sqrt(left.amin(-1) / left.amax(-1) * right.amin(-1) / right.amax(-1)).mean()
""",
    false_alarm="""
Nothing learned is under the root, or the value cannot be zero. Noise schedules, grids, random numbers and detached
tensors are left alone where they can be recognised.
""",
    fix="unsafe",
    fix_note="It adds `1e-12` under the root, or raises the bound of the clamp to it: a root of 0 becomes 1e-6.",
    nodes=(ast.Call, ast.BinOp),
    calls=frozenset({*_ROOTS, "pow"}),
    words=("sqrt", ".5", "1/2", "1 / 2"),
    check=check,
)

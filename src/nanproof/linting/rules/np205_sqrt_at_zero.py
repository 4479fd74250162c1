"""NP205: the slope of a square root at zero is infinite, and infinity times zero is NaN."""

from __future__ import annotations

import ast

from ..matching import (
    Hit,
    constant,
    data_by_name,
    guarded,
    held,
    power,
    reaches_zero,
    repaired,
    reported,
    tested,
    training,
    unproved,
)
from ..names import called_last
from ..ranges import range_of
from ..rule import Change, Rule
from ..values import number, short


def _selects(hit: Hit) -> bool:
    """A ReLU gives back a gradient of 0, not 0 · ∞; a single probability is zero only where it has rounded to it."""
    found = held(hit)
    rounded = range_of(hit.operand, hit.module).zero.startswith("a probability")
    return rounded or (found is not None and found.name in ("relu", "relu_"))


def _fix(hit: Hit) -> tuple[Change, ...]:
    module, operand = hit.module, hit.operand
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
squares, a variance, a difference, or a value clamped to zero. Powers of 0.5 count as roots. Where neither a loss nor
anything learned is in sight, it is an info, except with an eps outside the root.
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
def distance_loss(a, b):
    return torch.sqrt(((a - b) ** 2).sum(dim=-1)).mean()
""",
    good="""
def distance_loss(a, b):
    return ops.safe_norm(a - b, dim=-1).mean()


def distance_loss_with_eps(a, b):
    return torch.sqrt(((a - b) ** 2).sum(dim=-1) + 1e-12).mean()
""",
    miss="""
def centerness_loss(left, right):
    return torch.sqrt(left.amin(-1) / left.amax(-1) * right.amin(-1) / right.amax(-1)).mean()
""",
    false_alarm="""
Nothing learned is under the root, or the value cannot be zero. Noise schedules, grids, random numbers and detached
tensors are left alone where they can be recognized.
""",
    fix="unsafe",
    fix_note="It adds `1e-12` under the root, or raises the bound of the clamp to it: a root of 0 becomes 1e-6.",
    words=("sqrt", ".5", "1/2", "1 / 2"),
    match=power(lambda e: abs(e) == 0.5, "sqrt", "sqrt_", "rsqrt", "rsqrt_").of(reaches_zero),
    where=training,
    unless=(guarded, reported, tested, data_by_name, constant, repaired, _selects),
    doubt=(unproved,),
    message=lambda h: f"the square root of {h.why} has an infinite slope at zero, so its gradient there is NaN",
    help="add an eps under the root: torch.sqrt(x + 1e-12); an eps outside it, or clamp(min=0), does not help",
    edit=_fix,
    about=lambda h: h.node,
)

"""NP227: a division by something that code in sight brings to zero."""

from __future__ import annotations

import ast

from ..masks import is_padding
from ..matching import (
    Hit,
    asked,
    constant,
    data_by_name,
    guarded,
    in_loss,
    in_network,
    quotient,
    reaches_zero,
    repaired,
    replaced,
    reported,
    tested,
    training,
    unproved,
    written_into,
)
from ..names import called_last, key_of
from ..numerics import boolean, summed
from ..purpose import counts_hits
from ..ranges import range_of
from ..rule import Rule
from ..values import made_of, number, operation, trail

_ROOTS = ("sqrt", "rsqrt", "norm", "std")


def _elsewhere(hit: Hit) -> bool:
    """A mean over a mask (NP201), a norm (NP203), a deviation (NP204), a range (NP601), counts (metrics)."""
    above = summed(hit.over, hit.module) if hit.over is not None else None
    own = above is not None and boolean(above, hit.module)
    mask = summed(hit.operand, hit.module) is not None and "mask" in hit.why and not _of_itself(hit)
    parts = [*made_of(hit.operand, hit.module, limit=60)]
    calls = {called_last(p, hit.module).lstrip("a") for p in parts if isinstance(p, ast.Call)}
    ends = {"max", "min"} <= calls
    found = [o for p in parts if (o := operation(p, hit.module)) is not None]
    roots = any(o.name in _ROOTS or (o.name == "pow" and number(o.given(place=0), hit.module) == 0.5) for o in found)
    around = [p for p in hit.module.parents(hit.node) if isinstance(p, ast.Call)][:1]
    logged = hit.why.startswith("a probability") and any(called_last(c, hit.module) == "log" for c in around)
    return (
        mask
        or hit.why in ("a norm", "a deviation")
        or own
        or ends
        or logged
        or (roots and not range_of(hit.operand, hit.module).sure)
        or counts_hits(hit.over or hit.operand, hit.module)
    )


def _of_itself(hit: Hit) -> bool:
    """Weights divided by their own sum."""
    below = summed(hit.operand, hit.module)
    if below is None or hit.over is None:
        return False
    keys = {key_of(t) for t in trail(hit.over, hit.module)} - {""}
    return any(key_of(t) in keys for t in trail(below, hit.module)) or hit.module.source(hit.over) == hit.module.source(
        below
    )


def _data(hit: Hit) -> bool:
    """Settings and schedules by their names; targets in a loss may well be zero everywhere."""
    return data_by_name(hit) and not (in_loss(hit) and "target" in hit.module.source(hit.operand))


def _rarely(hit: Hit) -> bool:
    """Zero where things happen to be equal, or where a probability underflows: float32 takes long to get there."""
    if unproved(hit) or "probability" in hit.why or not (in_loss(hit) or in_network(hit)):
        return True
    names = [p for p in made_of(hit.operand, hit.module, limit=60) if isinstance(p, ast.Name)]
    padding = "mask" in hit.why and any(is_padding(n, hit.module) for n in names)
    return padding or not range_of(hit.operand, hit.module).sure or _of_whole_samples(hit)


def _of_whole_samples(hit: Hit) -> bool:
    """``x.view(b, -1).max(1)``: zero only where all of a sample is."""
    for part in made_of(hit.operand, hit.module, limit=40):
        found = hit.module.operation(part) if isinstance(part, ast.Call) else None
        if found is not None and found.name in ("max", "amax") and found.operand is not None:
            flat = found.operand
            last = called_last(flat, hit.module) if isinstance(flat, ast.Call) else ""
            if last == "flatten" or (last in ("view", "reshape") and "-1" in hit.module.source(flat)):
                return True
    return False


RULE = Rule(
    code="NP227",
    name="zero-divisor",
    what="""
Finds, in a loss or a forward pass, a division by something that reaches zero: a sum of weights behind a ReLU, a clamp
at zero or a mask, a sum of squares, an area or a union of boxes, one minus something that saturates at 1.
""",
    why="""
A row in which the mask leaves nothing, or every score is negative, sums to exactly 0, and 0 / 0 is NaN in the value and
in the gradient of the whole row. Two boxes without area have a union of 0; the energy of silence is 0.
`clamp(min=1e-6)` on the divisor, or an eps added to it, keeps both finite.
""",
    bad="""
class Mixer(nn.Module):
    def forward(self, scores, values):
        weights = torch.relu(scores)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights @ values
""",
    good="""
class Mixer(nn.Module):
    def forward(self, scores, values):
        weights = torch.relu(scores)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-6)
        return weights @ values
""",
    miss="""
class Linear(nn.Module):
    def forward(self, q, k, v):
        total = (q * k.sum(dim=1, keepdim=True)).sum(dim=-1, keepdim=True)  # nothing says that it is near zero
        return (q @ (k.transpose(1, 2) @ v)) / total
""",
    false_alarm="One weight is always positive, such as that of the element itself.",
    fix="unsafe",
    fix_note="The divisor is kept at 1e-6 or more; rows with a smaller sum are no longer brought to 1.",
    match=quotient().of(reaches_zero),
    where=training,
    unless=(guarded, reported, asked, tested, written_into, repaired, _data, constant, _elsewhere),
    doubt=(_rarely,),
    message=lambda h: f"{h.said('this divisor')} can be 0 ({h.why}): the result is NaN or infinite",
    help="keep the divisor away from zero: x / d.clamp(min=1e-6), or x / (d + eps) if d is never negative",
    edit=replaced("{x}.clamp(min=1e-6)", ast.Call, ast.Name),
    about=lambda h: h.node,
)

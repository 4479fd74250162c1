"""NP227: weights that may all be zero are divided by their sum."""

from __future__ import annotations

import ast

from ..guards import lower_bound
from ..matching import Hit, asked, held, quotient, replaced, reported, training, written_into
from ..names import called_last, key_of
from ..numerics import boolean, named_mask, summed
from ..rule import Rule
from ..values import core, trail


def _own_sum(hit: Hit) -> ast.expr | None:
    """The weights, if they are divided by their own sum."""
    module, weights = hit.module, summed(hit.operand, hit.module)
    if weights is None or hit.over is None:
        return None
    keys = {key_of(t) for t in trail(hit.over, module)} - {""}
    same = any(key_of(t) in keys for t in trail(weights, module)) or module.source(hit.over) == module.source(weights)
    return weights if same else None


def _all_zero(hit: Hit) -> str:
    """Why all weights may be zero at once: cut off below, or multiplied with a mask."""
    module, found, weights = hit.module, held(hit), core(hit.operand, hit.module)
    if found is None or found.operand is None:
        return ""
    if found.name in ("relu", "relu_", "threshold"):
        return "a ReLU can cut all of them off"
    if isinstance(weights, ast.Call) and called_last(weights, module) in ("clamp", "clip", "clamp_min", "clamp_"):
        return "clamped at 0" if lower_bound(weights, module) == 0 else ""
    if found.name in ("mul", "multiply") and found.args:
        for side in (found.operand, found.args[0]):
            name = key_of(core(side, module)) or key_of(side)
            if boolean(side, module) or named_mask(name.rpartition(".")[2]):
                return "a mask can leave none"
    filler = found.args[1] if found.name == "masked_fill" and len(found.args) == 2 else None
    return "a mask can leave none" if isinstance(filler, ast.Constant) and filler.value == 0 else ""


RULE = Rule(
    code="NP227",
    name="zero-sum",
    what="""
Finds weights divided by their own sum, `w / w.sum(-1, keepdim=True)`, where all of them can be zero: after a ReLU, a
clamp at zero, or a product with a mask.
""",
    why="""
A row in which the mask leaves nothing, or every score is negative, sums to exactly 0, and 0 / 0 is NaN in the value and
in the gradient of the whole row. `clamp(min=1e-6)` on the sum makes it a row of zeros.
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
    false_alarm="One weight is always positive, such as that of the element itself.",
    fix="unsafe",
    fix_note="The sum is kept at 1e-6 or more; rows with a smaller sum are no longer brought to 1.",
    words=("sum(",),
    match=quotient().of(_own_sum, _all_zero),
    where=training,
    unless=(reported, asked, written_into),
    message=lambda h: f"{h.said('the weights')} may sum to 0 ({h.why}): 0 / 0 = NaN",
    help="keep the sum away from zero: w / w.sum(-1, keepdim=True).clamp(min=1e-6)",
    edit=replaced("{x}.clamp(min=1e-6)", ast.Call, ast.Name),
    about=lambda h: h.node,
)

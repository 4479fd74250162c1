"""NP227: weights that may all be zero are divided by their sum."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..guards import changed_in_place, checked, lower_bound
from ..numerics import QUOTIENTS, boolean, division, named_mask, summed
from ..purpose import only_logged, trains
from ..rule import Change, Found, Rule
from ..values import called_last, core, operation, short, trail

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    parts = division(node, module)
    if parts is None:
        return
    above, below = parts
    weights = summed(below, module)
    if weights is None or not _same(above, weights, module):
        return
    why = _zero(core(weights, module), module)
    if not why or not trains(node, module) or only_logged(node, module):
        return
    keys = {key_of(t) for e in (weights, below) for t in trail(e, module)} - {""}
    if checked(keys, node, module) or any(key_of(t) and changed_in_place(t, module) for t in trail(below, module)):
        return
    yield Found(
        node=node,
        message=f"{short(weights, module) or 'the weights'} may sum to 0 ({why}): 0 / 0 = NaN",
        help="keep the sum away from zero: w / w.sum(-1, keepdim=True).clamp(min=1e-6)",
        edits=_fix(below, module),
        about=node,
    )


def _same(above: ast.expr, weights: ast.expr, module: Module) -> bool:
    keys = {key_of(t) for t in trail(above, module)} - {""}
    return any(key_of(t) in keys for t in trail(weights, module)) or module.source(above) == module.source(weights)


def _zero(weights: ast.expr, module: Module) -> str:
    """Why all weights may be zero at once: cut off below, or multiplied with a mask."""
    found = operation(weights, module)
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
    if found.name == "masked_fill" and len(found.args) == 2:
        filler = found.args[1]
        return "a mask can leave none" if isinstance(filler, ast.Constant) and filler.value == 0 else ""
    return ""


def _fix(below: ast.expr, module: Module) -> tuple[Change, ...]:
    if not isinstance(below, ast.Call | ast.Name):
        return ()
    return (module.replace(below, f"{module.source(below)}.clamp(min=1e-6)"),)


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
    nodes=(ast.BinOp, ast.AugAssign, ast.Call),
    calls=QUOTIENTS,
    words=("sum(",),
    check=check,
)

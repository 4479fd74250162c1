"""NP229: a loss is divided by the length of a list that may be empty."""

from __future__ import annotations

import ast

from ..guards import checked
from ..matching import Hit, of_loss, quotient, replaced, reported, training
from ..names import key_of
from ..rule import Rule
from ..values import trail


def _filtered(hit: Hit) -> ast.expr | None:
    """The list whose length divides, if it holds only what passed a test: by a comprehension, or by ``append``."""
    module = hit.module
    length = next(
        (t for t in trail(hit.operand, module) if isinstance(t, ast.Call) and module.called(t) == "len"), None
    )
    items = length.args[0] if length is not None and len(length.args) == 1 else None
    if not isinstance(items, ast.Name):
        return None
    held = module.value(items)
    if isinstance(held, ast.ListComp):
        return items if any(g.ifs for g in held.generators) else None
    scope = module.function(items)
    added = [c for c in module.calls("append") if module.receiver(c) == items.id and module.function(c) is scope]
    return items if added and all(_under_if(c, hit) for c in added) else None


def _under_if(call: ast.Call, hit: Hit) -> bool:
    for outer in hit.module.parents(call):
        if isinstance(outer, ast.If):
            return call not in [n for s in outer.orelse for n in ast.walk(s)]
        if isinstance(outer, ast.For | ast.While):  # behind `if …: continue`
            before = [s for s in outer.body if isinstance(s, ast.If) and s.lineno < call.lineno]
            return any(isinstance(n, ast.Continue) for s in before for n in s.body)
        if isinstance(outer, ast.FunctionDef):
            return False
    return False


def _asked(hit: Hit) -> bool:
    return checked({key_of(hit.operand), key_of(hit.outer)} - {""}, hit.node, hit.module)


RULE = Rule(
    code="NP229",
    name="filtered-length",
    what="Finds a loss divided by `len(items)` where `items` holds only what passed a test.",
    why="""
When nothing passes, a Python number raises ZeroDivisionError, and a tensor of zeros divided by 0 is NaN without a word.
""",
    bad="""
def total_loss(losses, device):
    kept = [value for value in losses if value > 0]
    loss = torch.zeros((), device=device)
    for value in kept:
        loss = loss + value
    return loss / len(kept)
""",
    good="""
def total_loss(losses, device):
    kept = [value for value in losses if value > 0]
    loss = torch.zeros((), device=device)
    for value in kept:
        loss = loss + value
    return loss / max(len(kept), 1)
""",
    false_alarm="Something always passes the test. An assertion before the division says so.",
    fix="unsafe",
    fix_note="`max(len(items), 1)` is the same for every list that holds something.",
    default=False,
    words=("len(",),
    match=quotient().of(_filtered),
    where=training,
    unless=(lambda h: not of_loss(h), reported, _asked),
    message=lambda h: f"the loss is divided by len({h.said('items')}), which is 0 when the filter leaves nothing",
    help="divide by max(len(items), 1)",
    edit=replaced("max({x}, 1)"),
)

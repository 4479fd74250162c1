"""NP229: a loss is divided by the length of a list that may be empty."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..guards import checked
from ..numerics import division
from ..purpose import only_logged, trains
from ..rule import Change, Found, Rule
from ..training import loss_like
from ..values import trail

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    parts = division(node, module)
    if parts is None:
        return
    above, below = parts
    length = next((t for t in trail(below, module) if isinstance(t, ast.Call) and module.called(t) == "len"), None)
    if length is None or len(length.args) != 1 or not isinstance(length.args[0], ast.Name):
        return
    items = length.args[0]
    owner = module.statement(node)
    stored = getattr(owner, "targets", [getattr(owner, "target", None)])
    named = [key_of(t) for t in [*trail(above, module), *stored] if t is not None]
    if not any(loss_like(n) for n in named if n) or not trains(node, module) or only_logged(node, module):
        return
    if not _filtered(items, module) or checked({items.id, key_of(below)} - {""}, node, module):
        return
    yield Found(
        node=node,
        message=f"the loss is divided by len({items.id}), which is 0 when the filter leaves nothing",
        help=f"divide by max(len({items.id}), 1)",
        edits=_fix(below, module),
    )


def _filtered(items: ast.Name, module: Module) -> bool:
    """Whether a list holds only what passed a test: a comprehension with ``if``, or ``append`` under an ``if``."""
    held = module.value(items)
    if isinstance(held, ast.ListComp):
        return any(g.ifs for g in held.generators)
    scope = module.function(items)
    added = [c for c in module.calls("append") if module.receiver(c) == items.id and module.function(c) is scope]
    return bool(added) and all(_under_if(c, module) for c in added)


def _under_if(call: ast.Call, module: Module) -> bool:
    for outer in module.parents(call):
        if isinstance(outer, ast.If):
            return call not in [n for s in outer.orelse for n in ast.walk(s)]
        if isinstance(outer, ast.For | ast.While | ast.FunctionDef):
            return False
    return False


def _fix(below: ast.expr, module: Module) -> tuple[Change, ...]:
    text = module.source(below)
    return (module.replace(below, f"max({text}, 1)"),)


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
    nodes=(ast.BinOp, ast.AugAssign),
    words=("len(",),
    check=check,
)

"""NP226: the standard deviation of one element is NaN, whatever eps is added."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..guards import checked
from ..numerics import boolean, named_mask
from ..purpose import aside, only_logged
from ..rule import Change, Found, Rule
from ..values import called_last, core, short

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    found = module.operation(node)
    if found is None or found.name not in ("std", "var") or found.operand is None or aside(node, module):
        return
    if (
        {"unbiased", "correction"} & set(found.keywords)
        or found.args
        or found.keywords.get("dim") is not None
        or only_logged(node, module)
    ):
        return
    operand = core(found.operand, module)
    why = _few(operand, module)
    keys = {key_of(n) for n in [*ast.walk(found.operand), *ast.walk(operand)]} - {""}
    if not why or checked(keys, node, module) or _measured(keys, node, module):
        return
    yield Found(
        node=node,
        message=f"the {found.name} of {short(operand, module) or why} is NaN when it holds one element; "
        "an eps added to it does not help",
        help="test the count first, or use correction=0, which gives 0 for one element",
        edits=_fix(node, found.args, module),
    )


def _few(operand: ast.expr, module: Module) -> str:
    """Why there may be one element only: a selection, or a list that was collected."""
    if isinstance(operand, ast.Subscript) and (
        boolean(operand.slice, module) or named_mask(key_of(operand.slice).rpartition(".")[2])
    ):
        return "a selection"
    if isinstance(operand, ast.Call) and called_last(operand, module) in ("tensor", "as_tensor", "stack", "Tensor"):
        given = operand.args[0] if operand.args else None
        held = core(given, module) if given is not None else None
        if isinstance(given, ast.Subscript) and not isinstance(given.slice, ast.Slice):
            return "a group"
        if isinstance(held, ast.ListComp) and any(g.ifs for g in held.generators):
            return "a filtered list"
    return ""


def _measured(keys: set[str], node: ast.AST, module: Module) -> bool:
    """Whether ``len(group)`` is asked for in a condition before."""
    scope = module.function(node)
    for call in module.calls("len", "numel"):
        inside = any(isinstance(p, ast.If | ast.IfExp | ast.Assert) for p in module.parents(call))
        if inside and module.function(call) is scope and keys & {key_of(n) for n in ast.walk(call)}:
            return True
    return False


def _fix(node: ast.Call, given: list[ast.expr], module: Module) -> tuple[Change, ...]:
    text = module.source(node)
    if given or not text.endswith(")"):
        return ()
    return (module.replace(node, f"{text[:-1]}{'' if text.endswith('()') else ', '}correction=0)"),)


RULE = Rule(
    code="NP226",
    name="std-of-one",
    what="""
Finds `std()` and `var()` of a selection, of a group, or of a filtered list, where nothing asks how many elements it
holds.
""",
    why="""
With the default correction of 1 the deviation of one element is 0 / 0 = NaN. `(x - mean) / (std + 1e-6)` stays NaN.
Groups of one come with the last batch, with a prompt whose other answers were filtered out, with one valid pixel.
""",
    bad="""
def advantages(groups, index, reward):
    scores = torch.tensor(groups[index])
    return (reward - scores.mean()) / (scores.std() + 1e-6)
""",
    good="""
def advantages(groups, index, reward):
    scores = torch.tensor(groups[index])
    return (reward - scores.mean()) / (scores.std(correction=0) + 1e-6)
""",
    false_alarm="Every group has two elements or more, by construction.",
    fix="unsafe",
    fix_note="`correction=0` is added: for n elements the deviation shrinks by the factor sqrt((n - 1) / n).",
    nodes=(ast.Call,),
    calls=frozenset({"std", "var"}),
    check=check,
)

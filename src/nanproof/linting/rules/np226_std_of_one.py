"""NP226: the standard deviation of one element is NaN, whatever eps is added."""

from __future__ import annotations

import ast

from ..guards import checked
from ..matching import Hit, call, not_aside, outside_loss, reported
from ..names import called_last, key_of
from ..numerics import boolean, named_mask
from ..rule import Change, Rule
from ..values import core


def _whole(hit: Hit) -> bool:
    """Over everything, with the default correction."""
    found = hit.module.operation(hit.node)
    return found is not None and not found.args and not {"unbiased", "correction", "dim"} & set(found.keywords)


def _few(hit: Hit) -> str:
    """Why there may be one element only: a selection, or a list that was collected."""
    module, operand = hit.module, core(hit.operand, hit.module)
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


def _counted(hit: Hit) -> bool:
    """Whether a test asks about it, or ``len(group)`` is asked for in a condition before."""
    module = hit.module
    keys = {key_of(n) for e in (hit.operand, core(hit.operand, module)) for n in ast.walk(e)} - {""}
    if checked(keys, hit.node, module):
        return True
    scope = module.function(hit.node)
    lengths = [c for c in module.calls("len", "numel") if module.function(c) is scope]
    tested = [c for c in lengths if any(isinstance(p, ast.If | ast.IfExp | ast.Assert) for p in module.parents(c))]
    return any(keys & {key_of(n) for n in ast.walk(c)} for c in tested)


def _corrected(hit: Hit) -> tuple[Change, ...]:
    text = hit.module.source(hit.node)
    return (hit.module.replace(hit.node, f"{text[:-1]}{'' if text.endswith('()') else ', '}correction=0)"),)


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
    match=call("std", "var").of(_whole, _few),
    where=not_aside,
    unless=(reported, _counted),
    doubt=(lambda h: h.why == "a selection" and outside_loss(h),),
    message=lambda h: (
        f"the deviation of {h.said(h.why)} is NaN when it holds one element; an eps added to it does not help"
    ),
    help="test the count first, or use correction=0, which gives 0 for one element",
    edit=_corrected,
)

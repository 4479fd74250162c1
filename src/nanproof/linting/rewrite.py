"""Fixes that several rules share, above all of what was computed on an earlier line and has not changed since."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .flow import end, start
from .guards import changed_in_place
from .names import called_last, key_of, word_set
from .numerics import named_mask
from .rule import Change, Moved
from .values import cores, trail

if TYPE_CHECKING:
    from .source import Module


def move(
    node: ast.expr, operand: ast.expr, parts: Iterable[ast.expr], text: str, needed: Sequence[Change], module: Module
) -> Moved:
    """Put ``text`` in the place of ``node``, where ``text`` is written with ``parts`` of what ``operand`` holds.

    If the operand is a name, the parts stand on the line of its assignment: they must mean the same here. That line
    goes when this was its only use. The fix is safe if so, or if the operand is written here.
    """
    replaced = (module.replace(node, text), *needed)
    names = [t for t in trail(operand, module) if key_of(t)]
    if not names:
        return Moved(replaced, safe=True)
    made = _assignment(names[0], module)
    if len(names) > 1 or made is None or not all(_unchanged(p, made, node, module) for p in parts):
        return Moved()
    uses = module.uses(names[0], module.function(names[0]))
    if len(uses) == 1 and uses[0] is names[0] and _alone(made, names[0], module):
        return Moved((*replaced, module.remove(made)), safe=True)
    return Moved(replaced)


def _assignment(name: ast.expr, module: Module) -> ast.Assign | None:
    """The plain assignment ``name = …`` in this function that gives the name its value."""
    if not isinstance(name, ast.Name):
        return None
    value = module.value(name)
    for binding in module.flow.bindings(module.function(name), name.id):
        if binding.value is value and isinstance(binding.owner, ast.Assign) and len(binding.owner.targets) == 1:
            return binding.owner if isinstance(binding.owner.targets[0], ast.Name) else None
    return None


def _unchanged(part: ast.expr, made: ast.Assign, here: ast.expr, module: Module) -> bool:
    """Whether nothing that ``part`` is made of is given another value between its line and this place."""
    scope = module.function(here)
    around = [p for p in module.parents(here) if isinstance(p, ast.For | ast.AsyncFor | ast.While)]
    turns = [loop for loop in around if all(p is not loop for p in module.parents(made))]
    for name in ast.walk(part):
        if isinstance(name, ast.Call) and not module.operation(name):
            return False  # a layer or a random number: not to be computed twice, or later
        if not key_of(name):
            continue
        for binding in module.flow.bindings(scope, key_of(name)):
            if end(made) <= binding.place <= start(here):
                return False  # its own line included: `x = x.sigmoid()` has left nothing of the logits
            if any(p is loop for loop in turns for p in module.parents(binding.owner)):
                return False  # the next turn of a loop that began after it would see another value
        if isinstance(name, ast.Name) and name.id in module.aliases:
            continue
        if changed_in_place(name, module, until=here):
            return False
    return True


def _alone(made: ast.Assign, use: ast.expr, module: Module) -> bool:
    """Whether the assignment can be taken out: it stands in the same block as its use, and nothing else reads it."""
    block = module.block(made)
    return any(module.statement(use) is s or use in ast.walk(s) for s in block)


_FLOATS = word_set(
    """matmul bmm mm einsum baddbmm softmax log_softmax linear float half bfloat16 exp log sqrt tanh sigmoid div
    cosine_similarity norm mean randn rand cdist"""
)
_SCORES = re.compile(r"score|logit|attn|attention|weight|energy|sim|dots?$|affinity|^x$|^e$|^w$|^a$|^out|^h$", re.I)


def floating(node: ast.expr, module: Module) -> bool:
    """Whether a value is a float tensor: it comes out of a product, a quotient, a layer; or is called scores."""
    held = cores(node, module)
    for part in (inner for at in held for inner in ast.walk(at)):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult | ast.Div):
            return True
        if isinstance(part, ast.Call) and (
            called_last(part, module) in _FLOATS or key_of(part.func).startswith("self.")
        ):
            return True
    named = bool(_SCORES.search(key_of(node).rpartition(".")[2]))
    return named and not any(isinstance(v, ast.Constant | ast.Compare) for v in held)


def fill_with_lowest(scores: ast.expr, filler: ast.expr, module: Module) -> tuple[Change, ...]:
    """``torch.finfo(scores.dtype).min`` in the place of a filler, if the scores have a name to ask."""
    if not isinstance(scores, ast.Name) or named_mask(scores.id) or not floating(scores, module):
        return ()  # torch.finfo raises for whole numbers, and a mask is often made of them
    name, needed = module.spell("torch.finfo")
    return (module.replace(filler, f"{name}({scores.id}.dtype).min"), *needed)

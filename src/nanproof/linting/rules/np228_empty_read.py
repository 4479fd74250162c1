"""NP228: memory is read before anything was written into it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import has_argument, start
from ..names import key_of
from ..rule import Change, Found, Rule

if TYPE_CHECKING:
    from ..source import Module

_EMPTY = {"torch.empty", "torch.empty_like", "torch.empty_strided"}


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    method = isinstance(node.func, ast.Attribute) and node.func.attr == "new_empty"
    if module.is_test or not (method or module.called(node) in _EMPTY):
        return
    owner = module.parent(node)
    if not isinstance(owner, ast.Assign) or len(owner.targets) != 1 or not isinstance(owner.targets[0], ast.Name):
        return
    name, scope = owner.targets[0].id, module.function(node)
    later = [u for u in _touched(name, scope) if start(u) > start(owner) and not _of_lambda(u, module)]
    first = min(later, key=start, default=None)
    if first is None or not _reads(first, module) or ("empty" in (module.source(node) or "") and _no_size(node)):
        return
    yield Found(
        node=node,
        message=f"{name} is read in line {first.lineno} before anything was written into it",
        help="use torch.zeros, or write all of it first",
        edits=_fix(node, module),
    )


def _touched(name: str, scope: ast.AST) -> list[ast.Name]:
    return [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name]


def _of_lambda(use: ast.Name, module: Module) -> bool:
    """An argument of a lambda that has the same name."""
    return any(isinstance(p, ast.Lambda) and has_argument(p, use.id) for p in module.parents(use))


def _reads(use: ast.Name, module: Module) -> bool:
    """Whether the first thing that happens to it is arithmetic: ``x += y``, ``x * 2``; a call may write into it."""
    parent = module.parent(use)
    if isinstance(parent, ast.AugAssign):
        return (parent.target is use and not isinstance(parent.op, ast.Mult)) or parent.value is use
    return isinstance(parent, ast.BinOp) and isinstance(use.ctx, ast.Load)


def _no_size(node: ast.Call) -> bool:
    """``torch.empty(0)`` holds nothing."""
    return bool(node.args) and any(isinstance(n, ast.Constant) and n.value == 0 for n in ast.walk(node.args[0]))


def _fix(node: ast.Call, module: Module) -> tuple[Change, ...]:
    text = module.source(node.func)
    head, dot, last = text.rpartition(".")
    return (module.replace(node.func, f"{head}{dot}{last.replace('empty', 'zeros')}"),) if key_of(node) == "" else ()


RULE = Rule(
    code="NP228",
    name="empty-read",
    what="Finds a tensor from `torch.empty` that is added to or computed with before anything was written into it.",
    why="""
`torch.empty` gives memory as it is found. It is mostly zeros in a fresh process, so `total = torch.empty(n)` followed
by `total += x` works in a test, and adds to old values, 1e38 or NaN once memory is reused.
""",
    bad="""
def pool(chunks, dim):
    total = torch.empty(dim)
    for chunk in chunks:
        total += chunk.sum(0)
    return total
""",
    good="""
def pool(chunks, dim):
    total = torch.zeros(dim)
    for chunk in chunks:
        total += chunk.sum(0)
    return total
""",
    false_alarm="Something writes into it through another name.",
    fix="unsafe",
    fix_note="`empty` becomes `zeros`.",
    default=False,
    nodes=(ast.Call,),
    calls=frozenset({"empty", "empty_like", "empty_strided", "new_empty"}),
    check=check,
)

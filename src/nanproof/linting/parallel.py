"""Is this code run by several ranks, and have they agreed on what a test is about?"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from .paths import Way
from .project import FileFacts
from .training import calls_in, is_collective

if TYPE_CHECKING:
    from .source import Module

_SPOKEN = re.compile(
    r"\b(local_)?rank\b|world_size|distributed|\bddp\b|\bfsdp\b|all_reduce|accelerator|\bfabric\b", re.IGNORECASE
)
_AGREED = re.compile(r"reduced|gathered|synced|global_|all_rank|any_rank|_all$|world")


def is_parallel(module: Module) -> bool:
    """Whether the code of this file runs in several processes: it wraps a model itself, or speaks of ranks in a project
    that does."""
    facts, project = module.facts, module.project
    return _wraps(facts) or (_wraps(project) and bool(_SPOKEN.search(module.text)))


def _wraps(facts: FileFacts) -> bool:
    return facts.ddp or facts.fsdp1 or facts.fsdp2 or facts.deepspeed or "accelerate" in facts.trainer


def is_agreed(module: Module, way: Way, at: int) -> bool:
    """Whether what is tested here has been reduced or gathered over the ranks before."""
    event = way[at]
    test = event.test
    if test is None or test.kinds & {"agreed", "helper"}:
        return True
    if any(_AGREED.search(name) for name in event.names):
        return True
    names = event.names | _flags(module, event.node)
    if any(e.kind == "reduce" and (e.names & names or not e.names) for e in way[:at]):
        return True
    return any(_is_reduced(module, name, event.node) for name in names)


def _flags(module: Module, branch: ast.AST) -> frozenset[str]:
    """The names in the condition itself: a flag may have been reduced that says nothing of the loss."""
    condition = branch.test if isinstance(branch, ast.If) else branch
    return frozenset(n.id for n in ast.walk(condition) if isinstance(n, ast.Name))


def _is_reduced(module: Module, name: str, near: ast.AST) -> bool:
    """Whether a name is given the result of a collective in this function."""
    scope = module.function(near)
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign) or not any(is_collective(c, module) for c in calls_in(node.value)):
            continue
        if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
    return False

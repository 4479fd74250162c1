"""NP403: torch's clip_grad_norm_ on a model in FSDP (version 1)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..names import called_last, last_name, written
from ..rule import Change, Found, Rule
from ..source import Module
from ..training import in_tests, keyword

_WRAPS = ("FullyShardedDataParallel", "FSDP")


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    if in_tests(module) or not module.facts.fsdp1 or module.facts.fsdp2 or "NO_SHARD" in module.text:
        return
    if module.called(node) not in ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"):
        return
    if any(_is_method(module, c) for c in module.calls("clip_grad_norm_", "clip_grad_norm")):
        return  # the file knows: another branch clips with the method
    model = _model(node)
    if model is None or not _is_sharded(module, model):
        return
    yield Found(
        node=node,
        message=f"each rank computes the norm of its own shard of `{module.source(model)}` only, and clips by that",
        help=f"use `{module.source(model)}.clip_grad_norm_(max_norm)`, which adds up the norms of all shards",
        edits=_fix(module, node, model),
    )


def _is_method(module: Module, call: ast.Call) -> bool:
    func = call.func
    return isinstance(func, ast.Attribute) and not module.called(call) and last_name(call).startswith("clip_grad_norm")


def _model(call: ast.Call) -> ast.expr | None:
    """``model`` of ``model.parameters()``."""
    first = call.args[0] if call.args else keyword(call, "parameters")
    if isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "parameters":
        return first.func.value
    return None


def _is_sharded(module: Module, model: ast.expr) -> bool:
    """Whether a model is wrapped in this file, or handed in where the file wraps a model of that name."""
    made = [v for v in module.values(model) if isinstance(v, ast.Call)]
    if any(called_last(v, module) in _WRAPS for v in made):
        return True
    if made:
        return False
    wrapped = {written(t) for a in module.nodes(ast.Assign) for t in a.targets if _is_wrap(module, a.value)}
    return written(model).rpartition(".")[2] in {w.rpartition(".")[2] for w in wrapped}


def _is_wrap(module: Module, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and called_last(node, module) in _WRAPS


def _fix(module: Module, call: ast.Call, model: ast.expr) -> tuple[Change, ...]:
    given = call.args[1] if len(call.args) > 1 else keyword(call, "max_norm")
    if given is None or len(call.args) + len(call.keywords) != 2:
        return ()
    return (module.replace(call, f"{module.source(model)}.clip_grad_norm_({module.source(given)})"),)


RULE = Rule(
    code="NP403",
    name="plain-clip-on-fsdp",
    what="Finds `torch.nn.utils.clip_grad_norm_(model.parameters(), …)` for a model wrapped in "
    "FullyShardedDataParallel.",
    why="In FSDP version 1 each rank holds a shard of every gradient, as a plain tensor. With 4 ranks and a true "
    "norm of 2.0 spread evenly, each sees a norm of 1.0 and clips nothing at max_norm=1.0; spread unevenly, the "
    "ranks multiply their shards of one gradient by different factors, and its direction changes. FSDP version 2 "
    "(`fully_shard`) has DTensor gradients, for which the plain function is right.",
    bad="""import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

def train(model, loader, criterion):
    model = FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
""",
    good="""import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

def train(model, loader, criterion):
    model = FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
""",
    miss="""import torch

def clip(model):  # wrapped in FSDP by another file
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    false_alarm="The sharding strategy is NO_SHARD, chosen by a setting that is not in this file.",
    fix="unsafe",
    fix_note="The call becomes the method of the wrapped model, which must be the outermost FSDP module and be "
    "called on all ranks.",
    nodes=(ast.Call,),
    calls=frozenset({"clip_grad_norm_"}),
    words=("FSDP", "FullyShardedDataParallel"),
    check=check,
)

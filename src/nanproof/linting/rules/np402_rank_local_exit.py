"""NP402: under DDP or FSDP one rank raises or leaves, and the others wait for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..nonfinite import subject_of
from ..parallel import is_agreed, is_parallel
from ..paths import all_ways
from ..reaction import arms, leaves
from ..rule import Found, Rule
from ..source import Module
from ..training import in_tests


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module) or not is_parallel(module):
        return
    told: set[ast.AST] = set()
    for way in all_ways(module):
        losses = frozenset(n for e in way if e.kind in ("backward", "scaled") for n in e.names)
        for at, event in enumerate(way):
            test = event.test
            if event.kind != "test" or test is None or event.node in told or event.site is not None:
                continue
            if subject_of(module, test, losses) != "loss" or is_agreed(module, way, at):
                continue
            if not any(e.kind in ("backward", "scaled") for e in way):
                continue
            ends = "raise" if isinstance(event.node, ast.Assert) else ""
            if isinstance(event.node, ast.If):
                ends = leaves(module, arms(event.node, test)[0])
            if ends not in ("raise", "exit", "break"):
                continue
            told.add(event.node)
            yield Found(
                node=event.node,
                message="one rank leaves here for a loss of its own, and the others wait for it until the time limit",
                help="let all ranks agree first, or start with torchrun, which ends all when one ends",
            )


RULE = Rule(
    code="NP402",
    name="rank-local-exit",
    what="Finds, in code for DDP, FSDP or Accelerate, a process that ends (`raise`, `sys.exit`, `assert`, `break`) "
    "because the loss of its own rank is not finite.",
    why="The other ranks are inside a collective at that moment and wait for the one that has left: up to "
    "`default_pg_timeout`, 30 minutes, on paid hardware, and the error that they show then is about a time limit, "
    "not about NaN.",
    bad="""import torch
from torch.nn.parallel import DistributedDataParallel

def train(model, loader, optimizer, rank):
    model = DistributedDataParallel(model, device_ids=[rank])
    for batch in loader:
        loss = model(batch)
        if not torch.isfinite(loss):
            raise RuntimeError(f"rank {rank}: loss is {loss.item()}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    good="""import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(model, loader, optimizer, rank):
    model = DistributedDataParallel(model, device_ids=[rank])
    for batch in loader:
        loss = model(batch)
        bad = (~torch.isfinite(loss.detach())).float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            raise RuntimeError("the loss of some rank is not finite")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    false_alarm="torchrun ends all workers when one of them ends, so under torchrun this is the usual and "
    "acceptable way to stop: off by default.",
    default=False,
    nodes=(ast.Module,),
    words=("backward(",),
    check=check,
)

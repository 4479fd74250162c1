"""NP401: under DDP or FSDP one rank skips a batch that the others do not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..names import last_name
from ..nonfinite import find_test, subject_of
from ..parallel import is_agreed, is_parallel
from ..paths import Way, all_ways
from ..reaction import arms, leaves
from ..rule import Found, Rule
from ..source import Module
from ..training import calls_in, in_tests, is_none

_STRATEGY = re.compile(r"""strategy\s*=\s*["'](ddp|fsdp|deepspeed)|(DDP|FSDP|DeepSpeed)Strategy\(""")


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module):
        return
    if "training_step" in module.text and _STRATEGY.search(module.text):
        yield from _without_a_loss(module)
    skipped = list(_skipped(module))
    if skipped and is_parallel(module):
        yield from skipped


def _without_a_loss(module: Module) -> Iterator[Found]:
    """A training_step of Lightning that returns nothing for a bad loss: the step is left out on this rank."""
    for branch in module.nodes(ast.If):
        scope = module.function(branch)
        if not isinstance(scope, ast.FunctionDef) or scope.name != "training_step":
            continue
        test = find_test(module, branch.test)
        if test is None or test.kinds & {"agreed", "helper"} or subject_of(module, test) != "loss":
            continue
        last = arms(branch, test)[0][-1:]
        nothing = [s for s in last if isinstance(s, ast.Return)]
        if nothing and (nothing[0].value is None or is_none(nothing[0].value)):
            yield _found(module, branch)


def _skipped(module: Module) -> Iterator[Found]:
    told: set[ast.AST] = set()
    for way in all_ways(module):
        losses = frozenset(n for e in way if e.kind in ("backward", "scaled") for n in e.names)
        for at, event in enumerate(way):
            branch, test = event.node, event.test
            if event.kind != "test" or event.bad or test is None or branch in told or not isinstance(branch, ast.If):
                continue
            if event.site is not None or subject_of(module, test, losses) not in ("loss", "other"):
                continue
            if not _skips(module, way, at) or is_agreed(module, way, at):
                continue
            told.add(branch)
            yield _found(module, branch)


def _found(module: Module, branch: ast.If) -> Found:
    return Found(
        node=branch,
        message=f"`{module.source(branch.test)}` is decided by each rank for itself: one skips, the others wait",
        help="let all ranks agree (all_reduce of a flag with MAX, after backward), then skip on all or on none",
    )


def _skips(module: Module, way: Way, at: int) -> bool:
    """Whether the good answer leads to a backward or a step that the bad one leaves out."""
    event = way[at]
    assert isinstance(event.node, ast.If)
    assert event.test is not None
    ahead = [e for e in way[at + 1 :] if e.kind in ("backward", "scaled", "step", "scaler-step", "engine-step")]
    if not ahead:
        return False
    bad, good = arms(event.node, event.test)
    if any(last_name(c) in ("backward", "step") for s in bad for c in calls_in(s)):
        return False  # the bad batch takes part in the collectives all the same
    if any(isinstance(n, ast.Raise) for s in bad for n in ast.walk(s)):
        return False  # it ends the run, by default
    inside = any(e.place is n for e in ahead for s in good for n in ast.walk(s))
    return leaves(module, bad) in ("continue", "return") or (inside and not leaves(module, bad))


RULE = Rule(
    code="NP401",
    name="rank-local-skip",
    what="Finds, in code for DDP, FSDP or Accelerate, a batch that is skipped (`continue`, `return`, no step) "
    "because the loss or the data of this rank is not finite, when the ranks have not agreed on it.",
    why="In DDP every backward is a meeting: rank 0 skips its batch 7 and starts backward of batch 8 while rank 1 "
    "is in that of batch 7; the all-reduce adds up gradients of different batches without a word, and at the end "
    "one rank waits for a partner that has left, until the time limit (`default_pg_timeout` is 30 minutes). A "
    "skipped step without a skipped backward makes the copies of the model drift apart. After backward the reduced "
    "gradients are the same on all ranks, so their norm is a test that needs no talk.",
    bad="""import torch
from torch.nn.parallel import DistributedDataParallel

def train(model, loader, optimizer, rank, log):
    model = DistributedDataParallel(model, device_ids=[rank])
    for i, batch in enumerate(loader):
        loss = model(batch)
        if not torch.isfinite(loss):
            log.warning("step %d skipped on rank %d", i, rank)
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    good="""import torch
from torch.nn.parallel import DistributedDataParallel

def train(model, loader, optimizer, rank, log):
    model = DistributedDataParallel(model, device_ids=[rank])
    for i, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()  # a NaN reaches every rank with the gradients
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            log.warning("step %d skipped on all ranks", i)
            continue
        optimizer.step()
""",
    miss="""def training_step(self, batch, index):  # the strategy is chosen on the command line
    loss = self.net(batch)
    return None if loss.isnan() or loss.isinf() else loss
""",
    false_alarm="The loss is the same on all ranks (it was reduced in a function of another file), or the script "
    "is never started with more than one process.",
    nodes=(ast.Module,),
    words=("backward(", "training_step"),
    check=check,
)

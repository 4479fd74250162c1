"""NP106: the norm that clipping returns is thrown away, and nothing else looks whether the gradients are finite."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..paths import all_ways
from ..rule import Found, Rule
from ..source import Module
from ..training import in_tests, is_true, keyword


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module):
        return
    told: set[ast.AST] = set()
    for way in all_ways(module):
        if any(e.kind in ("test", "scaled", "scaler-step", "engine-step") for e in way):
            continue
        for at, event in enumerate(way):
            call = event.node
            if (
                call in told
                or not isinstance(call, ast.Call)
                or event.name not in ("clip_grad_norm_", "clip_grad_norm")
            ):
                continue
            if event.kind != "clip" or not any(e.kind == "step" for e in way[at:]):
                continue
            if not isinstance(module.parent(call), ast.Expr) or is_true(keyword(call, "error_if_nonfinite")):
                continue
            told.add(call)
            yield Found(
                node=call,
                message=f"nobody looks at the norm that `{event.name}` returns: a NaN or Inf in it goes into the step",
                help="test the returned norm with isfinite and skip the step, or give error_if_nonfinite=True",
            )


RULE = Rule(
    code="NP106",
    name="clip-norm-ignored",
    what="Finds `clip_grad_norm_` whose returned norm is thrown away in a loop that tests neither the loss nor the "
    "gradients and has no GradScaler.",
    why="Clipping does not protect against NaN, it spreads it: one infinite gradient of three, [inf, 1, 1], has "
    "norm inf, and clipping turns it into [nan, 0, 0]; one NaN makes all gradients of the model NaN, because all "
    "are multiplied with max_norm / NaN. The norm is computed anyway: looking at it costs nothing.",
    bad="""import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
""",
    good="""import torch

def train(model, loader, optimizer, criterion, log):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            log.warning("step %d skipped: gradient norm %s", i, norm)
            continue
        optimizer.step()
""",
    false_alarm="Nearly every training loop in the world is written like this, and most never meet a NaN: it is "
    "advice, so it is off by default.",
    default=False,
    nodes=(ast.Module,),
    words=("backward(",),
    check=check,
)

"""NP503: a run that can be resumed, without the state of its gradient scaler."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..names import written
from ..rule import Found, Rule
from ..source import Module
from ..training import in_tests, is_optimizer, is_scaler


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    """``node`` is ``optimizer.load_state_dict(...)``."""
    func = node.func
    if in_tests(module) or not isinstance(func, ast.Attribute) or not is_optimizer(module, func.value):
        return
    if not (module.facts.scaler and module.facts.scaler_step) or _keeps_scaler(module):
        return
    saved = [c for c in module.calls("state_dict") if isinstance(c.func, ast.Attribute)]
    if not any(is_optimizer(module, c.func.value) for c in saved if isinstance(c.func, ast.Attribute)):
        return
    first = next(c for c in module.calls("load_state_dict") if _of_optimizer(module, c))
    if first is not node:
        return
    yield Found(
        node=node,
        message=f"`{written(func.value)}` is saved and restored, the gradient scaler is not: it begins again at 65,536",
        help="save scaler.state_dict() in the checkpoint and load it",
    )


def _of_optimizer(module: Module, call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and is_optimizer(module, call.func.value)


def _keeps_scaler(module: Module) -> bool:
    for call in module.calls("state_dict", "load_state_dict"):
        if isinstance(call.func, ast.Attribute) and is_scaler(module, call.func.value):
            return True
    return bool(re.search(r"scaler[\"']?\]|[\"'][a-z_]*scaler|enabled=False|init_scale", module.text))


RULE = Rule(
    code="NP503",
    name="scaler-state-lost",
    what="Finds a file that saves and restores its optimizer and steps through a GradScaler, but neither saves nor "
    "restores the scaler.",
    why="A scaler that had settled at 128 begins again at 65,536 and overflows until it is back: log2(65536 / 128) "
    "= 9 steps are left out after each resume, while the scheduler goes on. It is a small loss, and one line to "
    "avoid it.",
    bad="""import torch

def resume(path, model, optimizer):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

def train(model, loader, optimizer, path):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
""",
    good="""import torch

def resume(path, model, optimizer, scaler):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])

def train(model, loader, optimizer, scaler, path):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(saved, path)
""",
    miss="""def resume(state, optimizer):  # the scaler is in another file
    optimizer.load_state_dict(state)
""",
    false_alarm="A function of another file keeps the scaler's state, or the scaler is switched off (bfloat16). It "
    "is a small thing, so the rule is off by default.",
    default=False,
    nodes=(ast.Call,),
    calls=frozenset({"load_state_dict"}),
    words=("caler",),
    check=check,
)

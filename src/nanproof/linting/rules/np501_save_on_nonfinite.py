"""NP501: a checkpoint is written because the loss is not finite."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..names import last_name
from ..nonfinite import NAN_WORDS, find_test, subject_of
from ..reaction import arms
from ..rule import Found, Rule
from ..source import Module
from ..training import calls_in, in_tests

_SAVES = re.compile(
    r"^_?save(_?(check_?point|model|state|ckpt|weights|network\w*|pretrained|training_state|snapshot|all))?\w{0,8}$"
)
_STATE = re.compile(r"state_dict|model|net|optim|checkpoint|ckpt|weights|policy|actor", re.IGNORECASE)
_APART = re.compile(
    r"crash|debug|nan|inf\b|error|bad|emergency|interrupt|dump|incident|fail|diverg|broken|corrupt|abort", re.IGNORECASE
)
_TYPES = re.compile(r"FloatingPoint|Arithmetic|NaN|NonFinite|NotFinite|Diverg|Overflow|Numeric", re.IGNORECASE)
_ANY = {"Exception", "BaseException", "RuntimeError", "ValueError", "AssertionError", ""}


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module) or not any(word in module.text for word in NAN_WORDS):
        return
    for branch in module.nodes(ast.If):
        yield from _in_branch(branch, module)
    for block in module.nodes(ast.Try):
        yield from _in_branch(block, module)


def _in_branch(node: ast.If | ast.Try, module: Module) -> Iterator[Found]:
    if isinstance(node, ast.If):
        test = find_test(module, node.test)
        if test is None or subject_of(module, test) not in ("loss", "gradient"):
            return
        block, when = arms(node, test)[0], "where the loss or a gradient is not finite"
    else:
        handler = next((h for h in node.handlers if _for_nan(module, node, h)), None)
        if handler is None:
            return
        block, when = handler.body, "after the failure that a NaN raises"
    for statement in block:
        for call in calls_in(statement):
            if _saves_state(module, call):
                yield Found(
                    node=call,
                    message=f"`{module.source(call.func)}` writes a checkpoint {when}: it may replace a good one",
                    help="keep the last healthy checkpoint; write this one under a name of its own, or not at all",
                )
                return


def _saves_state(module: Module, call: ast.Call) -> bool:
    name = last_name(call)
    if not _SAVES.match(name) or _APART.search(module.source(call)) or module.called(call).startswith("numpy."):
        return False
    if name != "save":
        return not re.search(r"image|fig|video|sample|batch|audio|plot|log|history|metric|result", name)
    return module.called(call) == "torch.save" and bool(call.args) and bool(_STATE.search(module.source(call.args[0])))


def _for_nan(module: Module, block: ast.Try, handler: ast.ExceptHandler) -> bool:
    """Whether a handler is for a NaN: by its type, or because the block raises for one and it catches that."""
    types = module.source(handler.type) if handler.type is not None else ""
    if _TYPES.search(types):
        return True
    if not any(t.strip(" ()") in _ANY for t in types.split(",")):
        return False
    for node in (n for s in block.body for n in ast.walk(s)):
        if isinstance(node, ast.Assert) and find_test(module, node.test):
            return True
        if isinstance(node, ast.If):
            test = find_test(module, node.test)
            if test is not None and any(isinstance(s, ast.Raise) for s in arms(node, test)[0]):
                return True
    return False


RULE = Rule(
    code="NP501",
    name="save-on-nonfinite",
    what="Finds a checkpoint that is written in the branch for a non-finite loss or gradient, or in the `except` "
    "that such a branch leads to.",
    why="What is saved at that moment is the state that has just failed: weights, optimizer moments and BatchNorm "
    "statistics may hold NaN by then (in one post-mortem all parameters were finite and 4 BatchNorm buffers NaN). "
    "Under the usual name it replaces the last good checkpoint, and the resumed run begins dead.",
    bad="""import torch

def train(model, loader, optimizer, criterion, path):
    for x, y in loader:
        loss = criterion(model(x), y)
        if not torch.isfinite(loss):
            torch.save(model.state_dict(), path)
            raise RuntimeError("loss is not finite, state saved")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    good="""import torch

def train(model, loader, optimizer, criterion, folder):
    for x, y in loader:
        loss = criterion(model(x), y)
        if not torch.isfinite(loss):
            torch.save(model.state_dict(), f"{folder}/crash.pt")  # to be looked at, never to be resumed from
            raise RuntimeError("loss is not finite")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    miss="""def train(run, save):
    try:
        run()
    except Exception:  # run raises for NaN, in another file
        save("last.pt")
        raise
""",
    false_alarm="The name of the file is made so that it replaces nothing, in a way that is not seen here. Names "
    "with crash, debug, nan, error, emergency and the like are not reported, nor saving on KeyboardInterrupt.",
    nodes=(ast.Module,),
    words=("save",),
    check=check,
)

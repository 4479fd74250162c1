"""NP404: a loss that is computed through ``model.module`` in training, past DDP."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..flow import has_argument
from ..names import called_last, last_name, written
from ..paths import ways_of
from ..rule import Found, Rule
from ..source import Module
from ..training import calls_in, in_tests, stored_in

_WRAPS = ("DistributedDataParallel", "DDP")
_EVAL = re.compile(
    r"valid|eval|test|infer|predict|sample|generate|export|save|log|visuali[sz]e|plot|ema|teacher", re.IGNORECASE
)
_NO_FORWARD = re.compile(
    r"^(state_dict|load_state_dict|parameters|named_parameters|named_modules|modules|children|train|eval|to|cuda|half|float|"
    r"zero_grad|backward|requires_grad_|save\w*|set_\w+|update\w*|reset\w*|get_\w+|log\w*|register\w*|freeze\w*|unfreeze\w*|no_sync|"
    r"init\w*|load\w*|is_\w+|has_\w+|step|clip\w*|apply|buffers|named_buffers|enable\w*|disable\w*|gradient_checkpointing\w*)$"
)


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    model = _wrapped_model(node)
    if model is None or in_tests(module) or not module.project.ddp or module.under_no_grad(node):
        return
    if not _is_ddp(module, model) or _called_itself(module, node, model) or not _differentiated(module, node):
        return
    yield Found(
        node=node,
        message=f"`{module.source(node.func)}` goes past DDP: its gradients are not averaged over the ranks",
        help=f"call `{module.source(model)}(...)` itself, and let its forward return what the loss needs",
    )


def _wrapped_model(call: ast.Call) -> ast.expr | None:
    """``model`` of ``model.module(x)`` and ``model.module.loss(x)``."""
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr == "module":
        return func.value
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Attribute) and func.value.attr == "module":
        return None if _NO_FORWARD.match(func.attr) else func.value.value
    return None


def _is_ddp(module: Module, model: ast.expr) -> bool:
    name = written(model)
    if not name or _EVAL.search(name):
        return False
    made = [v for v in module.values(model) if isinstance(v, ast.Call)]
    if any(called_last(v, module) in _WRAPS for v in made):
        return True
    last = name.rpartition(".")[2]
    wrapped = {
        written(t).rpartition(".")[2] for a in module.nodes(ast.Assign) for t in a.targets if _is_wrap(module, a.value)
    }
    if not made and last in wrapped:
        return True
    scope = module.function(model)  # handed in: its `.module` says that it is wrapped, and the program uses DDP
    return not made and not isinstance(scope, ast.Module) and has_argument(scope, name)


def _called_itself(module: Module, node: ast.Call, model: ast.expr) -> bool:
    """Whether the wrapped model is called in the same function as well: then DDP has prepared this iteration."""
    scope, name = module.function(node), written(model)
    return any(written(c.func) == name and not module.under_no_grad(c) for c in calls_in(scope))


def _is_wrap(module: Module, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and called_last(node, module) in _WRAPS


def _differentiated(module: Module, call: ast.Call) -> bool:
    """Whether the result flows into a loss that this function differentiates."""
    scope = module.function(call)
    if isinstance(scope, ast.FunctionDef) and _EVAL.search(scope.name):
        return False
    targets: set[str] = set()
    for way in ways_of(module, scope):
        for event in way:
            if event.kind in ("backward", "scaled"):
                if any(call is n for n in ast.walk(event.node)):
                    return True
                targets |= event.names
    return bool(targets) and _flows_into(module, call, scope, targets)


def _flows_into(module: Module, call: ast.Call, scope: ast.AST, targets: set[str]) -> bool:
    """Follow the names that hold the result, forwards, until one of the differentiated ones is reached."""
    statement = module.statement(call)
    if last_name(call) == "detach" or not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return False
    held = stored_in(statement) | {written(t) for t in getattr(statement, "targets", [])}
    assigns = [n for n in ast.walk(scope) if isinstance(n, ast.Assign | ast.AugAssign) and n.lineno > statement.lineno]
    for node in sorted(assigns, key=lambda n: n.lineno):
        if held & targets:
            return True
        if any(
            isinstance(n, ast.Name) and n.id in held for n in ast.walk(node.value)
        ) and "detach" not in module.source(node.value):
            held |= stored_in(node)
    return bool(held & targets)


RULE = Rule(
    code="NP404",
    name="bypasses-ddp-forward",
    what="Finds `model.module(...)` or `model.module.some_loss(...)` in training code, where `model` is wrapped in "
    "DistributedDataParallel and the result is differentiated.",
    why="DDP prepares the averaging of gradients in its own forward. A call of the inner module leaves that out: "
    "unless the wrapped model was called in the same iteration as well, every rank steps with the gradients of its "
    "own batch. The copies of the model drift apart without an error, and a NaN on one rank stays there unseen by "
    "the others.",
    bad="""import torch
from torch.nn.parallel import DistributedDataParallel

def train(model, loader, criterion, rank):
    model = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model.module(x), y)
        loss.backward()
        optimizer.step()
""",
    good="""import torch
from torch.nn.parallel import DistributedDataParallel

def train(model, loader, criterion, rank):
    model = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
""",
    miss="""def train_step(model, x, y):  # wrapped in DDP by the caller
    loss = model.module.compute_loss(x, y)
    loss.backward()
""",
    false_alarm="Gradients are averaged by hand, or the wrapped model is called in the same iteration by another "
    "function. Functions that call the wrapped model too (`out = model(x)`, `loss = model.module.loss(out)`) are "
    "not reported.",
    default=False,
    nodes=(ast.Call,),
    words=("DistributedDataParallel", "DDP"),
    check=check,
)

"""NP109: the loss is clamped from above, which takes its gradient away exactly where it is large."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..names import called_last, written
from ..rule import Found, Rule
from ..source import Module
from ..training import in_tests, loss_like

_MEANT = re.compile(r"trunc|robust|clipped|bounded|capped|trimmed|huber|quantile|ppo|grpo|surrogate|dual")
_OPTION = re.compile(r"clip|clamp|trunc|max_loss|robust|\bcap\b", re.IGNORECASE)
_EACH = re.compile(r"per_|token|pixel|element|each|unreduced", re.IGNORECASE)
_NOT_A_LOSS = {"log", "log1p", "exp", "acos", "sqrt", "logit", "nll_loss", "binary_cross_entropy"}
_LARGEST = re.compile(r"inf(?!o)|finfo|fp16|max_float|65504", re.IGNORECASE)
"""A bound at the largest number of a dtype: only what has overflowed is beyond it."""
_NO_TRAINING = re.compile(r"valid|eval|test|metric|log_|plot|report|infer|predict|score|perplexity|ppl")


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    found = module.operation(node)
    if found is None or in_tests(module):
        return
    name, operand, rest, keywords = found
    limit = _limit(name, rest, keywords)
    if operand is None or limit is None or not _is_loss(module, operand):
        return
    if not _stays_loss(module, node) or module.under_no_grad(node) or not _trains(module, node):
        return
    if _is_theory(module, operand, limit) or _LARGEST.search(module.source(limit)):
        return
    what = module.source(operand)
    yield Found(
        node=node,
        message=f"`{what}` is clamped at {module.source(limit)}: above that its gradient is zero, and Inf is hidden",
        help="test it with isfinite instead, and clip the gradients by norm",
    )


def _limit(name: str, rest: list[ast.expr], keywords: dict[str, ast.expr]) -> ast.expr | None:
    """The upper bound that an operation puts on its operand."""
    if name in ("clamp", "clamp_", "clip", "clip_"):
        bound = keywords.get("max") or (rest[1] if len(rest) > 1 else None)
    elif name in ("clamp_max", "clamp_max_"):
        bound = keywords.get("max") or (rest[0] if rest else None)
    elif name == "minimum":
        bound = rest[0] if rest else None
        if not (isinstance(bound, ast.Call) and isinstance(bound.args[0] if bound.args else None, ast.Constant)):
            return None
    else:
        return None
    return None if isinstance(bound, ast.Constant) and bound.value is None else bound


def _is_loss(module: Module, operand: ast.expr) -> bool:
    name = written(operand)
    if not name and isinstance(operand, ast.Call) and isinstance(operand.func, ast.Attribute):
        name = written(operand.func.value) if called_last(operand, module) in ("mean", "sum") else ""
    last = name.rpartition(".")[2]
    return bool(re.search("loss", last, re.IGNORECASE)) and loss_like(name) and not _EACH.search(last)


def _stays_loss(module: Module, call: ast.Call) -> bool:
    """Whether the clamped value is used as a loss: not put through a logarithm, not a metric that is only shown."""
    parent = module.parent(call)
    while isinstance(parent, ast.Attribute | ast.Call | ast.BinOp | ast.UnaryOp):
        if isinstance(parent, ast.Call) and called_last(parent, module) in (*_NOT_A_LOSS, "item", "detach", "float"):
            return False
        parent = module.parent(parent)
    if isinstance(parent, ast.Assign):
        target = written(parent.targets[0])
        scope = module.function(call)
        for use in module.uses(target, scope) if target.isidentifier() else ():
            above = module.parent(use)
            if use.lineno > call.lineno and isinstance(above, ast.Call) and called_last(above, module) in _NOT_A_LOSS:
                return False
        return True
    return isinstance(parent, ast.Return | ast.AugAssign | ast.Expr)


def _trains(module: Module, call: ast.Call) -> bool:
    scope = module.function(call)
    called = scope.name.lower() if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) else ""
    klass = module.klass(call)
    if any(isinstance(p, ast.If | ast.IfExp) and _OPTION.search(module.source(p.test)) for p in module.parents(call)):
        return False  # an option that says what it is
    return not _NO_TRAINING.search(called) and not _MEANT.search(called + (klass.name.lower() if klass else ""))


def _is_theory(module: Module, operand: ast.expr, limit: ast.expr) -> bool:
    """A bound that the value cannot pass anyway: 1 − something, at 1 or 2."""
    held = module.value(operand)
    small = isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and limit.value <= 2
    return (
        small and isinstance(held, ast.BinOp) and isinstance(held.op, ast.Sub) and isinstance(held.left, ast.Constant)
    )


RULE = Rule(
    code="NP109",
    name="loss-clamped",
    what="Finds a loss that is clamped from above (`loss.clamp(max=100)`, `torch.clamp(loss, 0, 10)`) on its way "
    "to backward.",
    why="Above the bound the gradient is exactly 0: `(x ** 4).clamp(max=100)` at x = 5 gives 100 and a gradient of "
    "0, so the batches that are worst teach nothing. Inf becomes the bound too, so that a test for Inf after the "
    "clamp cannot fire, while the NaN gradients behind it stay; NaN itself passes a clamp unchanged.",
    bad="""import torch

def loss_function(pred, target):
    loss = ((pred - target) ** 2).mean()
    loss = torch.clamp(loss, max=100.0)
    return loss
""",
    good="""import torch
import torch.nn.functional as F

def loss_function(pred, target):
    return F.huber_loss(pred, target)  # grows linearly: large errors keep a gradient
""",
    miss="""def train_step(model, batch, optimizer, limit):
    value = model(batch).mean()
    value.clamp(max=limit).backward()  # nothing here is called a loss
    optimizer.step()
""",
    false_alarm="A truncated loss that is meant to ignore outliers. Functions and classes whose names say so "
    "(`truncated`, `robust`, `clipped` …) are not reported, nor bounds from below (`clamp(min=0)`, a hinge).",
    nodes=(ast.Call,),
    calls=frozenset({"clamp", "clamp_", "clip", "clip_", "clamp_max", "clamp_max_", "minimum"}),
    words=("loss", "Loss"),
    check=check,
)

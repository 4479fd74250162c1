"""NP103: a NaN loss is replaced by a number before backward."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import islice

from ..events import event_of
from ..gradients import gradless
from ..names import called_last, last_name, word_set, written
from ..nonfinite import NAN_WORDS, find_test
from ..reaction import arms, is_report
from ..rule import Found, Rule
from ..source import Module
from ..training import in_tests, loss_like, names_in

_LOSS_FUNCTION = re.compile(
    r"loss|forward|__call__|training_step|train_step|compute|criterion|objective|step|train|fit|elbo|nll"
)
_NO_TRAINING = re.compile(r"valid|eval|test|metric|log_|plot|report|infer|predict|score")
_MODEL = re.compile(r"model|net|module|forward|generator|student|policy|actor|critic|decoder|encoder", re.IGNORECASE)
_CROSS_ENTROPY = re.compile(r"cross_?entropy|nll_loss|ce_loss|ce_impl|lm_loss|loss_fct|ce_fn", re.IGNORECASE)


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module):
        return
    told: set[ast.AST] = set()
    for place, name in (*_cleaned(module), *_masked(module), *_branched(module)):
        statement = module.statement(place)
        if statement in told or gradless(place, module) or not _trains(module, place, name):
            continue
        told.add(statement)
        yield Found(
            node=statement,
            message=f"`{name}` is replaced where it is not finite: its value looks fine then, its gradient does not",
            help="find out why it is not finite (`nanproof locate`), or skip the batch as a whole",
            info=_cut_off(module, statement),
        )


def _cut_off(module: Module, statement: ast.stmt) -> bool:
    """Whether what takes its place has no part of it: elements that were selected, a fresh tensor of zeros, zero
    times something else."""
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Subscript):
        return True
    if isinstance(value, ast.BinOp) and isinstance(statement, ast.Assign):
        return written(statement.targets[0]) not in {written(n) for n in ast.walk(value)}
    return isinstance(value, ast.Call) and called_last(value, module) in ("new_tensor", "new_zeros", "zeros_like")


def _cleaned(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """``loss = torch.nan_to_num(loss)``, ``loss.nan_to_num_()``, ``torch.where(torch.isnan(loss), 0, loss)``."""
    for call in module.calls("nan_to_num", "nan_to_num_", "where"):
        where = called_last(call, module) == "where"
        if where:
            test = find_test(module, call.args[0]) if len(call.args) == 3 else None
            operand = test.operands[0] if test and test.operands else None
        else:
            operand = _operand(module, call)
        name = _loss_name(operand) or _differentiated(module, operand) or _loss_name(_target(module, call))
        if operand is None or not name or _is_logged(operand) or _ignores_labels(module, operand):
            continue
        if where and ast.dump(operand) not in {ast.dump(a) for a in call.args[1:]}:
            continue
        if _flows(module, call):
            yield call, name


def _operand(module: Module, call: ast.Call) -> ast.expr | None:
    if module.called(call).startswith("torch.") or isinstance(call.func, ast.Name):
        return call.args[0] if call.args else None
    return call.func.value if isinstance(call.func, ast.Attribute) and not module.called(call) else None


def _loss_name(node: ast.AST | None) -> str:
    if node is None:
        return ""
    name = written(node)
    return name if name and loss_like(name) else ""


def _target(module: Module, call: ast.Call) -> ast.AST | None:
    """What a call's result is assigned or added to."""
    parent = module.parent(call)
    if isinstance(parent, ast.Assign):
        return parent.targets[0]
    return parent.target if isinstance(parent, ast.AugAssign) else None


def _differentiated(module: Module, node: ast.AST | None) -> str:
    """The name of a prediction or a part of the loss, when the same function differentiates it."""
    name = written(node) if node is not None else ""
    if node is None or not name:
        return ""
    scope = module.function(node)
    for call in module.calls("backward"):
        event = event_of(module, call) if module.function(call) is scope else None
        if event is not None and name in event.names and any(_computed(module, v) for v in module.values(node)):
            return name
    return ""


def _computed(module: Module, value: ast.expr) -> bool:
    """Whether a value comes out of a model or of arithmetic, not out of a batch."""
    nodes = list(ast.walk(value))
    made = (last_name(n) for n in nodes if isinstance(n, ast.Call) and not module.called(n).startswith("torch."))
    return any(isinstance(n, ast.BinOp) for n in nodes) or any(_MODEL.search(name) for name in made)


def _is_logged(operand: ast.AST) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr in ("detach", "item", "data") for n in ast.walk(operand))


def _ignores_labels(module: Module, operand: ast.expr) -> bool:
    """A cross entropy whose labels are all ignored is 0/0 with a gradient of exact zeros: replacing it is right."""
    made = [operand, *module.values(operand)]
    return any(isinstance(v, ast.Call) and _CROSS_ENTROPY.search(called_last(v, module)) for v in made)


def _flows(module: Module, call: ast.Call) -> bool:
    """Whether the result is used as the loss from here on: assigned, returned, summed."""
    for outer in module.parents(call):
        if isinstance(outer, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return):
            return True
        if isinstance(outer, ast.Expr):
            return called_last(call, module) == "nan_to_num_"
        if isinstance(outer, ast.Call) and called_last(outer, module) in (
            "log",
            "update",
            "append",
            "add_scalar",
            "print",
            "item",
        ):
            return False
        if isinstance(outer, ast.stmt):
            return False
    return False


def _masked(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """``loss[torch.isnan(loss)] = 0`` and ``loss = loss[~torch.isnan(loss)]``."""
    for assign in module.nodes(ast.Assign):
        target, value = assign.targets[0], assign.value
        for held in (target, value):
            if not isinstance(held, ast.Subscript) or not _loss_name(held.value):
                continue
            test = find_test(module, held.slice)
            own = test is not None and any(written(o) == written(held.value) for o in test.operands)
            if test is not None and own and test.bad == (held is target) and not _told(module, assign, held is target):
                yield assign, _loss_name(held.value)


def _told(module: Module, assign: ast.Assign, replaced: bool) -> bool:
    """Whether bad elements are left out in a branch that says so, or stops when there are too many."""
    branch = module.parent(assign)
    inside = [n for s in getattr(branch, "body", []) for n in ast.walk(s)] if isinstance(branch, ast.If) else []
    return not replaced and any(isinstance(n, ast.Raise) or (isinstance(n, ast.Call) and is_report(n)) for n in inside)


def _branched(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """``if torch.isnan(loss): loss = torch.tensor(0.0, requires_grad=True)``."""
    for branch in module.nodes(ast.If):
        test = find_test(module, branch.test)
        if test is None:
            continue
        tested = {written(o).removesuffix(".data") for o in test.operands} | {
            n for o in test.operands for n in names_in(o)
        }
        yield from islice(_replacements(module, arms(branch, test)[0], tested), 1)


def _replacements(module: Module, block: list[ast.stmt], tested: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """Numbers that are put in the place of one of the tested losses."""
    for node in (n for s in block for n in ast.walk(s)):
        if isinstance(node, ast.Assign | ast.AugAssign):
            name = written(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if name in tested and loss_like(name) and not _recomputed(module, node.value):
                yield node, name
        elif isinstance(node, ast.Return) and node.value is not None and _is_number(module, node.value):
            yield from ((node, n) for n in sorted(tested) if loss_like(n))


def _recomputed(module: Module, value: ast.expr) -> bool:
    """A loss that is computed again, or taken from elsewhere, is not replaced by a number."""
    made = isinstance(value, ast.Call) and called_last(value, module) in _NUMBERS
    return not (made or isinstance(value, ast.BinOp) or _is_number(module, value))


_NUMBERS = word_set(
    """tensor zeros zeros_like ones_like full full_like new_zeros new_tensor new_full Tensor FloatTensor nan_to_num
    where as_tensor scalar_tensor requires_grad_ Variable clamp"""
)


def _is_number(module: Module, value: ast.expr) -> bool:
    while (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in ("to", "cuda", "requires_grad_", "mean", "sum")
    ):
        value = value.func.value
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    return isinstance(value, ast.Call) and called_last(value, module) in _NUMBERS


def _trains(module: Module, place: ast.AST, name: str) -> bool:
    """Whether the replaced value is differentiated: backward in this function, or a function whose result is a loss."""
    scope = module.function(place)
    called = scope.name.lower() if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) else ""
    passes = [c for c in module.calls("backward", "manual_backward") if module.function(c) is scope]
    if passes:
        return not isinstance(place, ast.Return) and any(_reaches(module, place, name, c) for c in passes)
    if not called or _NO_TRAINING.search(called):
        return False
    klass = module.klass(place)
    owner = klass.name.lower() if klass else ""
    if "metric" in owner or "callback" in owner:
        return False
    returned = any(
        isinstance(n, ast.Return) and n.value is not None and module.function(n) is scope and _holds(n.value, name)
        for n in ast.walk(scope)
    )
    return returned and bool(_LOSS_FUNCTION.search(called) or "loss" in owner)


def _holds(value: ast.expr, name: str) -> bool:
    """Whether a returned value may hold the loss: anything but numbers and other names alone."""
    names = {written(n) for n in ast.walk(value)} - {""}
    return not names or name in names or any(loss_like(n) or n.startswith("out") for n in names)


def _reaches(module: Module, place: ast.AST, name: str, backward: ast.Call) -> bool:
    """Whether a backward pass after this place differentiates what was replaced, not just a number for the log."""
    event = event_of(module, backward)
    if event is None or backward.lineno < module.statement(place).lineno:
        return False
    target = _target(module, place) if isinstance(place, ast.Call) else None
    names = {name} if target is None else {name, written(target)}
    return bool(names & event.names) or not event.names


RULE = Rule(
    code="NP103",
    name="nonfinite-loss-replaced",
    what="Finds a loss whose NaN or Inf are replaced by a number before it is differentiated: "
    "`torch.nan_to_num(loss)`, `torch.where(torch.isnan(loss), 0, loss)`, `loss[torch.isnan(loss)] = 0`, `loss = "
    "loss[~torch.isnan(loss)]`, `if torch.isnan(loss): loss = torch.tensor(0.0, requires_grad=True)`.",
    why="The value becomes finite, the gradient does not: with x = [1, 0], `(x / x).mean()` is NaN, `nan_to_num` "
    "of it is 0.0, and the gradient of x is [0, nan], because backward multiplies 0 with the NaN further in; "
    "`torch.where` and boolean indexing give the same [0, nan]. The weights are NaN after the next step while the "
    "log shows a fine loss. A fresh `torch.tensor(0.0, requires_grad=True)` has no graph at all: gradients are "
    "missing, and under DDP the other ranks wait for them.",
    bad="""import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss = torch.nan_to_num(loss, nan=0.0)
        loss.backward()
        optimizer.step()
""",
    good="""import torch

def train(model, loader, optimizer, criterion, log):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        if not torch.isfinite(loss):
            log.warning("step %d skipped: loss %s", i, loss.item())
            continue
        loss.backward()
        optimizer.step()
""",
    miss="""def total(parts, safe):
    return sum(safe(p) for p in parts)  # a function of another file replaces NaN
""",
    false_alarm="A mean over labels that are all ignored is 0/0 with a gradient of exact zeros; for "
    "`F.cross_entropy` this is known and not reported. For your own mean divide by `count.clamp(min=1)` instead, "
    "then nothing needs replacing.",
    nodes=(ast.Module,),
    words=NAN_WORDS,
    check=check,
)

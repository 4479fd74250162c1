"""NP102: non-finite gradients are set to zero, and the optimizer steps with them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..names import called_last, last_name
from ..nonfinite import NAN_WORDS, find_test, subject_of
from ..reaction import arms
from ..rule import Found, Rule
from ..source import Module
from ..training import calls_in, in_tests, is_false, keyword

_ZEROING = {"zero_", "fill_", "mul_", "masked_fill_", "nan_to_num_", "copy_"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if ("grad" not in module.text and "register_hook" not in module.text) or in_tests(module):
        return
    told: set[ast.AST] = set()
    for place, how in (*_replaced(module), *_zeroed(module), *_hooked(module)):
        statement = module.statement(place)
        if statement in told or not _goes_on(module, statement):
            continue
        told.add(statement)
        yield Found(
            node=place,
            message=f"{how}; a step with such gradients still moves the weights",
            help="skip the whole step instead: no optimizer, scheduler, scaler or EMA step for this batch",
            info=isinstance(place, ast.Call) and keyword(place, "posinf") is not None,  # bounds that were thought about
        )


def _is_grad(node: ast.AST) -> bool:
    """``p.grad``, ``p.grad.data``, an element of it, or a name that says so."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        node = node.value
    return (isinstance(node, ast.Attribute) and node.attr == "grad") or (
        isinstance(node, ast.Name) and node.id in ("grad", "grads", "gradient", "g")
    )


def _replaced(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """``p.grad`` with its NaN replaced, wherever that stands."""
    for call in module.calls("nan_to_num", "nan_to_num_"):
        operand = call.args[0] if call.args else None
        if operand is None and isinstance(call.func, ast.Attribute):
            operand = call.func.value
        if operand is not None and _holds_grad(module, operand) and _kept(module, call, operand):
            yield call, f"NaN and Inf in `{module.source(operand)}` are replaced by numbers"
    for assign in module.nodes(ast.Assign):
        target = assign.targets[0]
        if isinstance(target, ast.Subscript) and _stored_grad(target.value):
            test = find_test(module, target.slice)
            if test is not None and test.bad:
                yield assign, f"NaN in `{module.source(target.value)}` is overwritten"
        elif _stored_grad(target) and _name_of(module, assign.value) == "where":
            assert isinstance(assign.value, ast.Call)
            if assign.value.args and find_test(module, assign.value.args[0]):
                yield assign, f"NaN in `{module.source(target)}` is overwritten"


def _holds_grad(module: Module, operand: ast.expr) -> bool:
    """``p.grad``, or a name for gradients put together: ``flat = torch.cat([p.grad.flatten() for p in params])``."""
    if isinstance(operand, ast.Attribute):
        return _is_grad(operand)
    held = module.value(operand) if isinstance(operand, ast.Name) else None
    return held is not None and any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in ast.walk(held))


def _stored_grad(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and _is_grad(node)


def _name_of(module: Module, node: ast.AST) -> str:
    return called_last(node, module) if isinstance(node, ast.Call) else ""


def _kept(module: Module, call: ast.Call, operand: ast.expr) -> bool:
    """Whether the cleaned gradient goes back to where it came from, and not just into a plot or a norm."""
    if called_last(call, module) == "nan_to_num_" or keyword(call, "out") is not None:
        return True
    parent = module.parent(call)
    if isinstance(parent, ast.Assign):
        return any(_stored_grad(t) for t in parent.targets)
    return isinstance(parent, ast.Call) and last_name(parent) == "copy_"


def _zeroed(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Gradients set to zero in the branch for bad ones."""
    for branch in module.nodes(ast.If):
        test = find_test(module, branch.test)
        if test is None or subject_of(module, test) == "other":
            continue
        for statement in arms(branch, test)[0]:
            for node in ast.walk(statement):
                if _zeroes(module, node):
                    yield node, f"gradients that are not finite are set to zero by `{module.source(node)}`"


def _zeroes(module: Module, node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        made = _name_of(module, node.value)
        return _stored_grad(node.targets[0]) and made in ("zeros_like", "zeros", "new_zeros")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "zero_grad":
        return is_false(keyword(node, "set_to_none"))
    zero = not node.args or _is_zero(node.args[-1])
    return node.func.attr in _ZEROING and _stored_grad(node.func.value) and zero


def _is_zero(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in (0, 0.0) and not isinstance(node.value, bool)


def _hooked(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """A hook that returns a cleaned gradient."""
    for hook in module.calls(*_HOOKS):
        given = hook.args[0] if hook.args else None
        body: ast.AST | None = given.body if isinstance(given, ast.Lambda) else None
        if isinstance(given, ast.Name):
            body = next((f for f in module.nodes(ast.FunctionDef) if f.name == given.id), None)
        if body is not None and any(_cleans(module, c) for c in calls_in(body)):
            yield hook, "a hook replaces NaN in the gradients by numbers"


def _cleans(module: Module, call: ast.Call) -> bool:
    name = called_last(call, module)
    if name == "where":
        return bool(call.args and find_test(module, call.args[0]))
    return name in ("nan_to_num", "nan_to_num_")


def _goes_on(module: Module, statement: ast.stmt) -> bool:
    """Whether the program goes on towards a step from here: no branch around it leaves the iteration."""
    at: ast.AST = statement
    loop: ast.AST | None = None
    for outer in module.parents(statement):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module):
            return True
        if isinstance(outer, ast.If) and isinstance(at, ast.stmt):
            block = module.block(at)
            for after in block[block.index(at) + 1 :]:
                if isinstance(after, ast.Return | ast.Raise):
                    return False
                if isinstance(after, ast.Continue | ast.Break):
                    loop = next((p for p in module.parents(after) if isinstance(p, ast.For | ast.While)), None)
                    if loop is not None and _steps(loop):
                        return False
        at = outer
    return True


def _steps(loop: ast.AST) -> bool:
    """Whether a loop is one over batches, not one over parameters."""
    return any(last_name(c) in ("step", "backward") for c in calls_in(loop))


RULE = Rule(
    code="NP102",
    name="nonfinite-grad-zeroed",
    what="Finds gradients whose NaN or Inf are set to zero (`p.grad.zero_()`, `p.grad[torch.isnan(p.grad)] = 0`, "
    "`torch.nan_to_num(p.grad)`, a hook, `zero_grad(set_to_none=False)` in the branch for bad ones) on the way to "
    "a step.",
    why='A zero gradient is not "no step". Adam divides a momentum that is still there by a square root that '
    "shrinks: after one ordinary gradient, 50 AdamW steps with zero gradients moved a weight by 5.0 × lr more (9.0 "
    "× lr after 1000 ordinary ones), 50 steps of SGD with momentum 0.9 by 9.0 × lr; weight decay 0.1 at lr 1e-3 "
    "took 9.5 % off it in 1000 such steps. And a gradient with some entries replaced is the gradient of nothing: "
    "the batch that broke goes on steering the others. `optimizer.zero_grad()` sets gradients to None, and a step "
    "then moves nothing (0.0 measured): that one is fine.",
    bad="""import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        for p in model.parameters():
            if p.grad is not None and not torch.isfinite(p.grad).all():
                p.grad.zero_()
        optimizer.step()
""",
    good="""import torch

def train(model, loader, optimizer, criterion, log):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
        if not torch.isfinite(norm):
            log.warning("step %d skipped: gradient norm %s", i, norm)
            continue
        optimizer.step()
""",
    miss="""def clean(model, sanitize):
    for p in model.parameters():
        p.grad = sanitize(p.grad)  # a function of another file
""",
    false_alarm="The gradient of one entry is known to be undefined by construction (a distance of a point to "
    "itself) and zero is its right value. Better: make the forward safe, then there is nothing to clean.",
    nodes=(ast.Module,),
    words=NAN_WORDS,
    check=check,
)

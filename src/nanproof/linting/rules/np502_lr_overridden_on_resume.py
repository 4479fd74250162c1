"""NP502: after a resume the learning rate is set by hand, while a scheduler has its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..names import written
from ..rule import Found, Rule
from ..source import Module
from ..training import in_tests, is_optimizer, names_in


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    """``node`` is ``optimizer.load_state_dict(...)``."""
    func = node.func
    if in_tests(module) or not isinstance(func, ast.Attribute) or not is_optimizer(module, func.value):
        return
    scope = module.function(node)
    optimizer = written(func.value)
    loaded = {n for a in node.args for n in names_in(a)}
    scheduler = _scheduler(module, scope)
    if scheduler is None:
        return
    for assign in module.nodes(ast.Assign):
        target = assign.targets[0]
        if not _sets_lr(target) or module.function(assign) is not scope or assign.lineno < node.lineno:
            continue
        if (
            not _of(module, target, optimizer)
            or loaded & set(names_in(assign.value))
            or _later_loop(module, assign, node)
        ):
            continue
        yield Found(
            node=assign,
            message=f"the learning rate is set after `{optimizer}` was restored, but `{scheduler}` has its own",
            help="change the schedule (base_lrs, or make a new scheduler), or leave the restored learning rate alone",
        )
        return


def _sets_lr(target: ast.AST) -> bool:
    return isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and target.slice.value == "lr"


def _of(module: Module, target: ast.AST, optimizer: str) -> bool:
    """Whether the parameter group belongs to this optimizer: the loop is over its groups."""
    assert isinstance(target, ast.Subscript)
    if written(target.value).startswith(f"{optimizer}."):
        return True
    loop = next((p for p in module.parents(target) if isinstance(p, ast.For)), None)
    return loop is not None and written(loop.iter) == f"{optimizer}.param_groups"


def _later_loop(module: Module, assign: ast.Assign, load: ast.Call) -> bool:
    """A learning rate that is set in the training loop is a schedule of its own, not part of the resume."""
    around = {id(p) for p in module.parents(load)}
    loops = [p for p in module.parents(assign) if isinstance(p, ast.For | ast.While) and id(p) not in around]
    return len(loops) > 1 or any(not written(p.iter).endswith("param_groups") for p in loops if isinstance(p, ast.For))


def _scheduler(module: Module, scope: ast.AST) -> str | None:
    """The scheduler that is restored or stepped in the same function."""
    for call in module.calls("load_state_dict", "step"):
        if module.function(call) is scope and isinstance(call.func, ast.Attribute):
            name = written(call.func.value)
            if re.search(r"sched|lr_|warmup", name.rpartition(".")[2].lower()):
                return name
    return None


RULE = Rule(
    code="NP502",
    name="lr-overridden-on-resume",
    what="Finds, after `optimizer.load_state_dict(...)`, an assignment to the learning rate of its groups in a "
    "function that restores or steps a scheduler too.",
    why="The number that is set does not last. Measured: with LambdaLR at base 1e-3, a learning rate set to 5e-5 "
    "is 1e-3 again after one `scheduler.step()`; with OneCycleLR at its peak, 1e-4 becomes 5.0e-4. That is how a "
    "run whose config said 1e-4 died at 4.92e-4. Schedulers that multiply the present value (CosineAnnealingLR) "
    "follow a curve that nobody planned.",
    bad="""import torch

def resume(args, model, optimizer, scheduler):
    state = torch.load(args.resume, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    for group in optimizer.param_groups:
        group["lr"] = args.lr
""",
    good="""import torch

def resume(args, model, optimizer):
    state = torch.load(args.resume, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = args.lr
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)  # a new schedule from the new value
""",
    miss="""def resume(args, optimizer, state):
    optimizer.load_state_dict(state)
    set_lr(optimizer, args.lr)  # a function of another file
""",
    false_alarm="The scheduler is one that never overwrites what is set, such as ReduceLROnPlateau.",
    default=False,
    nodes=(ast.Call,),
    calls=frozenset({"load_state_dict"}),
    words=("param_groups",),
    check=check,
)

"""NP310: the schedule goes on although the GradScaler has skipped the step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..matching import Hit, Match, in_test
from ..rule import Rule, amp_loop
from ..source import Module
from ..training import is_scaler, keyword

_SCHEDULER = re.compile(r"sched|warm_?up|annealing", re.I)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def _scheduler(node: ast.AST, module: Module) -> str:
    return module.receiver(node).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _loop(node: ast.AST, module: Module) -> ast.AST | None:
    return next((p for p in module.parents(node) if isinstance(p, _LOOPS)), None)


def _find(node: ast.AST, module: Module) -> Iterator[Hit]:
    """``scheduler.step()`` behind ``scaler.step(optimizer)``, in the same innermost loop."""
    loop = _loop(node, module)
    if loop is None or not isinstance(node, ast.Call) or not _SCHEDULER.search(_scheduler(node, module)):
        return
    for call in module.calls("step"):
        on = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        if call.args and call.lineno < node.lineno and is_scaler(module, on) and _loop(call, module) is loop:
            yield Hit(node, on, module)
            return


def _told(hit: Hit) -> bool:
    """The function looks at the scale, or at what the step gave back; or the scaler may be off."""
    scope = hit.module.function(hit.node)
    words = ast.unparse(scope) if not isinstance(scope, ast.Module) else hit.module.text
    return bool(re.search(r"get_scale|_scale\b|found_inf|skipp|was_run|_step_count", words))


def _off(hit: Hit) -> bool:
    return any(keyword(c, "enabled") is not None for c in hit.module.calls("GradScaler"))


RULE = Rule(
    code="NP310",
    name="schedule-ahead-of-steps",
    what="""
Finds `scheduler.step()` once per batch behind `scaler.step(optimizer)`, where nothing asks whether the scaler has
skipped the step.
""",
    why="""
A GradScaler begins at 65,536 and skips `optimizer.step()` until the gradients fit: often the first steps, which are the
smallest ones of a warm-up. The schedule is then ahead of the training, and torch warns that `lr_scheduler.step()` came
before `optimizer.step()`.
""",
    bad=amp_loop("scaler.step(optimizer)", "scaler.update()", "scheduler.step()"),
    good=amp_loop(
        "before = scaler.get_scale()",
        "scaler.step(optimizer)",
        "scaler.update()",
        "if scaler.get_scale() >= before:  # it shrinks when a step was skipped",
        "    scheduler.step()",
    ),
    false_alarm="The schedule counts batches on purpose. A few skipped steps do little harm to a long schedule, so the "
    "rule is off until you name it.",
    default=False,
    words=("scaler", "Scaler"),
    match=Match(_find, (ast.Call,), frozenset({"step"})),
    unless=(in_test, _told, _off),
    message=lambda h: (
        f"`{_scheduler(h.node, h.module)}.step()` also runs when the GradScaler has skipped the optimizer's step"
    ),
    help="step the schedule only if scaler.get_scale() has not shrunk in scaler.update()",
)

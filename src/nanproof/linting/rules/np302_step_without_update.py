"""NP302: a GradScaler that steps and is never updated."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..paths import all_ways
from ..rule import Found, Rule, amp_loop
from ..source import Module
from ..training import is_scaler


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    func = node.func
    if module.is_test or not isinstance(func, ast.Attribute):
        return
    if len(node.args) != 1 or not is_scaler(module, func.value):
        return
    if module.project.scaler_update or any(e.kind == "scaler-update" for way in all_ways(module) for e in way):
        return
    if any(is_scaler(module, c.func.value) for c in module.calls("update") if isinstance(c.func, ast.Attribute)):
        return
    if not any(module.klass(c) is module.klass(node) for c in module.calls("scale", "backward")):
        return  # a wrapper that hands the call on
    scaler = module.source(func.value)
    yield Found(
        node=node,
        message=f"`{scaler}.step` is called, `{scaler}.update()` nowhere: the second step fails",
        help=f"call `{scaler}.update()` once after all optimizers have stepped",
    )


RULE = Rule(
    code="NP302",
    name="step-without-update",
    what="Finds `scaler.step(optimizer)` in a project in which no `scaler.update()` is called.",
    why="`update()` is what halves the scale (65,536 at the start) after an overflow, doubles it after 2,000 good "
    "steps, and tells the scaler that a new iteration begins. Without it the second step of the same optimizer "
    'raises "step() has already been called since the last update()", measured in the second iteration.',
    bad=amp_loop("scaler.step(optimizer)"),
    good=amp_loop("scaler.step(optimizer)", "scaler.update()"),
    false_alarm="The update is in a file that is not linted together with this one: give `nanproof lint` the whole "
    "project.",
    nodes=(ast.Call,),
    calls=frozenset({"step"}),
    words=("scaler", "Scaler"),
    check=check,
)

"""NP303: the loss is scaled, but the optimizer steps without the scaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..events import Event
from ..paths import Way, scopes, ways_of
from ..rule import Change, Found, Rule, amp_loop
from ..source import Module


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if "scale(" not in module.text:
        return
    told: set[ast.AST] = set()
    for scope in scopes(module):
        ways = ways_of(module, scope)
        stepped = {e.name for way in ways for e in way if e.kind == "scaler-step"}
        for way in ways:
            for at, event in enumerate(way):
                if event.kind != "step" or event.node in told or event.name in stepped or event.managed:
                    continue
                scaled, harm = _scaled_before(way, at)
                if scaled is None:
                    continue
                told.add(event.node)
                yield Found(
                    node=event.node,
                    message=f"`{module.source(event.node)}` steps without `{scaled.name}`: {harm}",
                    help=f"`{scaled.name}.step({event.name})`, then `{scaled.name}.update()`",
                    edits=() if _also_plain(ways, event) else _fix(module, event, scaled, way, at),
                )


def _scaled_before(way: Way, at: int) -> tuple[Event | None, str]:
    """The scaled backward that this step uses, and what is wrong with its gradients by now."""
    unscaled = tested = False
    for event in reversed(way[:at]):
        if event.kind == "test":
            tested = True
        elif event.kind == "unscale":
            unscaled = True
        elif event.kind in ("backward", "scaler-step", "step") or (tested and unscaled):
            return None, ""
        elif event.kind == "scaled":
            return event, "Inf from an overflow goes into the weights" if unscaled else "the gradients are still scaled"
    return None, ""


def _also_plain(ways: list[Way], step: Event) -> bool:
    """Whether the same call steps after a plain backward on another way, where there may be no scaler."""
    for way in ways:
        kinds = [e.kind for e in way]
        for at, event in enumerate(way):
            if event.node is step.node and "backward" in kinds[:at] and "scaled" not in kinds[:at]:
                return True
    return False


def _fix(module: Module, step: Event, scaled: Event, way: Way, at: int) -> tuple[Change, ...]:
    call = step.node
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    statement = module.statement(call)
    local = (step.site is None and scaled.site is None) or scaled.name.startswith("self.")
    if not local or not scaled.name or not isinstance(statement, ast.Expr) or statement.value is not call:
        return ()
    new = module.replace(call, f"{scaled.name}.step({module.source(call.func.value)})")
    if any(e.kind == "scaler-update" for e in way[at:]):
        return (new,)
    return (new, module.insert_after(statement, f"{scaled.name}.update()"))


RULE = Rule(
    code="NP303",
    name="scaled-loss-plain-step",
    what="Finds `scaler.scale(loss).backward()` followed by `optimizer.step()` instead of `scaler.step(optimizer)`.",
    why="The gradients are 65,536 times too large at the start: SGD at lr 0.1 with a true gradient of 0.01 takes a "
    "weight from 1.0 to −64.5 in one step. Adam hides the factor, but not the overflow that scaling provokes on "
    "purpose: with one Inf gradient the step writes NaN, where `scaler.step` would have left it out and halved the "
    'scale. `scaler.update()` without a `scaler.step` raises "No inf checks were recorded prior to update.", after '
    "the harm is done.",
    bad=amp_loop("optimizer.step()", "scaler.update()"),
    good=amp_loop("scaler.step(optimizer)", "scaler.update()"),
    miss="""def backward(scaler, loss):
    scaler.scale(loss).backward()  # the plain step is in another file
""",
    false_alarm="The gradients are divided by the scale and tested by hand between the two calls in a way that is "
    "not seen here.",
    fix="unsafe",
    fix_note="`optimizer.step()` becomes `scaler.step(optimizer)`, and `scaler.update()` is added if it does not "
    "follow.",
    nodes=(ast.Module,),
    words=("backward(",),
    check=check,
)

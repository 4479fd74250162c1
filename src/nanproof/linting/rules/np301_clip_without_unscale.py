"""NP301: gradients are clipped while they are still multiplied by the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..events import Event
from ..names import written
from ..paths import Way, all_ways
from ..rule import Change, Found, Rule, amp_loop
from ..source import Module
from ..training import keyword, within_block


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if "scale(" not in module.text and "Accelerator(" not in module.text:
        return
    ways = list(all_ways(module))
    fine = {e.node for way in ways for i, e in enumerate(way) if e.kind == "clip" and _unscaled(way, i)}
    told: set[ast.AST] = set()
    for way in ways:
        for at, event in enumerate(way):
            if event.kind != "clip" or event.managed or _knows_scale(event.node) or event.node in fine | told:
                continue
            scaled = _scaled_before(module, way, at)
            if scaled is None:
                continue
            told.add(event.node)
            yield _found(module, event, scaled, way)
    yield from _split(module, ways, fine | told)


def _scaled_before(module: Module, way: Way, at: int) -> Event | None:
    """The scaled backward whose gradients are clipped here."""
    for event in reversed(way[:at]):
        if event.kind == "backward" and event.managed and _scales(module):
            return event
        if event.kind in ("unscale", "backward", "scaler-step", "step"):
            return None
        if event.kind == "scaled":
            return event
    return None


def _knows_scale(clip: ast.AST) -> bool:
    """Whether the function that clips is given the scale, ``scale=scaler.get_scale()``."""
    inside = [n for a in (*clip.args, *clip.keywords) for n in ast.walk(a)] if isinstance(clip, ast.Call) else []
    return any(isinstance(n, ast.Attribute) and n.attr in ("get_scale", "loss_scale", "cur_scale") for n in inside)


def _scales(module: Module) -> bool:
    """Whether an Accelerator of this file is told to scale: it does so in ``accelerator.backward``."""
    modes = (keyword(c, "mixed_precision") for c in module.calls("Accelerator"))
    return any(isinstance(mode, ast.Constant) and mode.value == "fp16" for mode in modes)


def _unscaled(way: Way, at: int) -> bool:
    """Whether the gradients have been unscaled since the last backward."""
    for event in reversed(way[:at]):
        if event.kind in ("scaled", "backward", "scaler-step"):
            return False
        if event.kind == "unscale":
            return True
    return False


def _split(module: Module, ways: list[Way], known: set[ast.AST]) -> Iterator[Found]:
    """A class whose methods scale, clip and step, called from elsewhere, where nothing in the project unscales."""
    if module.project.unscale:
        return
    events = {e.node: e for way in ways for e in way}.values()
    seen = {
        e.node for way in ways if any(f.kind in ("scaled", "backward") for f in way) for e in way if e.kind == "clip"
    }
    for event in events:
        klass = module.klass(event.node)
        if event.kind != "clip" or event.managed or _knows_scale(event.node) or klass is None:
            continue
        if event.node in known | seen:
            continue
        here = [e for e in events if module.klass(e.node) is klass]
        scaled = next((e for e in here if e.kind == "scaled"), None)
        if scaled and not any(e.kind == "backward" for e in here) and any(e.kind == "scaler-step" for e in here):
            yield _found(module, event, scaled, ())


def _found(module: Module, clip: Event, scaled: Event, way: Way) -> Found:
    return Found(
        node=clip.node,
        message=f"`{clip.name}` sees gradients that are still multiplied by the scale of `{scaled.name}`",
        help=f"use `{scaled.name}.clip_grad_norm_`"
        if scaled.managed
        else f"call `{scaled.name}.unscale_(optimizer)` before",
        edits=_fix(module, clip, way),
    )


def _fix(module: Module, clip: Event, way: Way) -> tuple[Change, ...]:
    """Unscale just before, the optimizer that the scaler steps next, if that step follows whenever this is reached."""
    steps = [e.node for e in way[way.index(clip) :] if e.kind == "scaler-step"] if clip in way else []
    step = steps[0] if steps else None
    if not isinstance(step, ast.Call) or not isinstance(step.func, ast.Attribute):
        return ()
    scaler, optimizer = module.source(step.func.value), module.source(step.args[0])
    if module.function(step) is not module.function(clip.node):
        known = scaler.startswith("self.") and optimizer.startswith("self.")
        if not known or module.klass(step) is not module.klass(clip.node) or not _always_reached(module, step):
            return ()
    elif within_block(module, clip.node, module.block(module.statement(step))) is None:
        return ()  # clipped for every micro-batch, stepped now and then: a second unscale_ would raise
    if any(e.kind == "unscale" and e.name == written(step.args[0]) for e in way[way.index(clip) :]):
        return ()
    return (module.insert_before(module.statement(clip.node), f"{scaler}.unscale_({optimizer})"),)


def _always_reached(module: Module, step: ast.Call) -> bool:
    """Whether a function comes to this call on every way through it."""
    statement, function = module.statement(step), module.function(step)
    body = function.body if isinstance(function, ast.FunctionDef) else []
    if not any(statement is s for s in body):
        return False
    before = body[: body.index(statement)]
    return not any(isinstance(n, ast.Return) for s in before for n in ast.walk(s))


RULE = Rule(
    code="NP301",
    name="clip-without-unscale",
    what="Finds gradient clipping between `scaler.scale(loss).backward()` and `scaler.step(optimizer)` without "
    "`scaler.unscale_(optimizer)` before it; also when these calls are in different methods of a class or "
    "functions of a file, and for clipping functions of your own.",
    why="A GradScaler starts with a scale of 65,536. A gradient of norm 0.05 then has norm 3,276.8 when it is "
    "clipped to 1.0, and after the scaler's own division it is 1.5e-5: every gradient is shrunk to `max_norm / "
    "scale`, whatever its size. Under SGD that is a learning rate of nearly zero that changes whenever the scale "
    "does; under Adam the ratio of large to small gradients is lost.",
    bad=amp_loop(
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "scaler.step(optimizer)", "scaler.update()"
    ),
    good=amp_loop(
        "scaler.unscale_(optimizer)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "scaler.step(optimizer)",
        "scaler.update()",
    ),
    miss="""def train(model, loader, optimizer, scaler, limit_gradients):
    for x in loader:
        scaler.scale(model(x)).backward()
        limit_gradients(model)  # a function of another file, its name says nothing
        scaler.step(optimizer)
        scaler.update()
""",
    false_alarm="The limit was multiplied by `scaler.get_scale()` on purpose. Clipping by a library that unscales "
    "itself (`accelerator.clip_grad_norm_`, `fabric.clip_gradients`, functions that are given the scaler) is not "
    "reported.",
    fix="unsafe",
    fix_note="`scaler.unscale_(optimizer)` is inserted before the clipping, with the optimizer that the scaler "
    "steps afterwards; never twice for one optimizer. Training changes: gradients are now clipped at the size that "
    "was asked for.",
    nodes=(ast.Module,),
    words=("backward(",),
    check=check,
)

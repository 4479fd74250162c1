"""NP105: gradients are clipped after the step, or before backward: at a time when it has no effect."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..events import Event
from ..paths import Way, all_ways
from ..rule import Change, Found, Rule
from ..source import Module
from ..training import within_block

_BACKWARD = ("backward", "scaled")
_STEP = ("step", "scaler-step", "engine-step")


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    ways = list(all_ways(module))
    fine = {e.node for way in ways for i, e in enumerate(way) if e.kind == "clip" and _in_order(way, i)}
    told: set[ast.AST] = set()
    for way in ways:
        for at, event in enumerate(way):
            if event.kind != "clip" or event.node in fine or event.node in told:
                continue
            late, early = _too_late(way, at), _too_early(way, at)
            other = late or early
            if other is None or (event.site is not None and event.site is other.site):
                continue
            told.add(event.node)
            when = f"after `{module.source(other.node)}`, which has used the gradients" if late else "before backward"
            yield Found(
                node=event.node,
                message=f"`{event.name}` is called {when}: it has no effect on this step",
                help="clip between backward and step",
                edits=_fix(module, event, way, at, late),
            )


def _in_order(way: Way, at: int) -> bool:
    """Whether the gradients that are clipped here are used by a step after it."""
    for event in way[at + 1 :]:
        if event.kind in _STEP:
            return True
        if event.kind in (*_BACKWARD, "zero"):
            return False
    return False


def _too_late(way: Way, at: int) -> Event | None:
    """The step since the last backward, when the gradients are thrown away or overwritten after this."""
    for event in reversed(way[:at]):
        if event.kind in _STEP:
            return event if event.loop is way[at].loop and any(e.kind in _BACKWARD for e in way[:at]) else None
        if event.kind in (*_BACKWARD, "zero"):
            return None
    return None


def _too_early(way: Way, at: int) -> Event | None:
    """The backward that comes only after this, when there was none before and no step in between."""
    if any(e.kind in _BACKWARD and e.loop is way[at].loop for e in way[:at]):
        return None
    for event in way[at + 1 :]:
        if event.kind in _STEP:
            return None
        if event.kind in _BACKWARD:
            after = [e for e in way[way.index(event) :] if e.kind in _STEP]
            return event if after and event.loop is way[at].loop else None
    return None


def _fix(module: Module, clip: Event, way: Way, at: int, late: Event | None) -> tuple[Change, ...]:
    """Move the statement to just before the step."""
    if late is None:
        steps = [e for e in way[at:] if e.kind in _STEP]
        late = steps[0] if steps else None
    statement = module.statement(clip.node)
    if late is None or not isinstance(statement, ast.Expr) or clip.site is not None:
        return ()
    block = module.block(statement)
    target = within_block(module, late.place, block)
    if target is None or target is statement or "\n" in module.source(statement):
        return ()
    return (module.insert_before(target, module.source(statement)), module.remove(statement))


RULE = Rule(
    code="NP105",
    name="clip-order",
    what="Finds gradient clipping that comes after `optimizer.step()` or before `loss.backward()` in an iteration, "
    "so that no step ever uses a clipped gradient.",
    why="Clipping changes `p.grad` at the moment it is called. After the step the gradients have been used: a "
    "gradient of norm 1000 with `max_norm=1` moves SGD's weights a thousand times as far as intended. Before "
    "backward there is nothing to clip yet (after `zero_grad()` every gradient is None, and the returned norm is "
    "0.0).",
    bad="""import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    good="""import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
""",
    miss="""import torch

def after_step_hook(model):  # called by a framework after its step
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    false_alarm="Gradients are kept over the step on purpose (they are not zeroed) and the next iteration adds to "
    "the clipped ones.",
    fix="unsafe",
    fix_note="The call moves to just before the step. Training will now really be clipped, so its course changes.",
    nodes=(ast.Module,),
    words=("backward(",),
    check=check,
)

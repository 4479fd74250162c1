"""NP101: the loss or the gradients are tested only after the optimizer has used them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..events import Event
from ..nonfinite import subject_of
from ..paths import Way, all_ways
from ..reaction import arms, debuggers, may_leave, only_reports
from ..rule import Change, Found, Rule
from ..source import Module
from ..training import detects_anomalies, in_tests, loss_like, moved, read_in, stored_in, within_block


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module) or detects_anomalies(module):
        return  # anomaly detection raises in backward, before the step
    told: set[ast.AST] = set()
    for way in all_ways(module):
        for at, event in enumerate(way):
            if event.kind != "test" or event.place in told or not _reacts(module, event):
                continue
            before = _late(module, way, at)
            if before is None:
                continue
            told.add(event.place)
            step, backward = before
            name = _name(module.source(event.place), event, backward)
            what = "the gradients are" if _subject(module, way, at) == "gradient" else f"`{name}` is"
            yield Found(
                node=event.place,
                message=f"{what} tested for NaN after `{module.source(step.node)}` has already used the gradients",
                help="test before the step (a loss before backward), so that a bad batch leaves the weights alone",
                edits=_fix(module, event, step, backward),
            )


def _late(module: Module, way: Way, at: int) -> tuple[Event, Event] | None:
    """The step that came before this test, and the backward before that, when nothing tested the value in time."""
    test = way[at]
    subject = _subject(module, way, at)
    if subject not in ("loss", "gradient"):
        return None
    passes = [i for i in range(at) if way[i].kind in ("backward", "scaled")]
    alone = len(passes) == 1
    backward = None
    for i in reversed(passes):
        related = alone and any(loss_like(name) for name in way[i].names & test.names)
        if subject == "gradient" or way[i].about(test) or related:
            backward = i
            break
    if backward is None or way[backward].kind == "scaled":
        return None
    steps = [i for i in range(backward + 1, at) if way[i].kind == "step" and way[i].loop is test.loop]
    if not steps or way[steps[0]].managed:
        return None
    if any(way[i].kind == "scaler-step" for i in range(backward + 1, at)):
        return None  # the scaler leaves the weights alone when a gradient is not finite
    for i in range(steps[0]):
        if way[i].kind == "test" and _subject(module, way, i) in ("loss", "gradient"):
            return None
    if test.site is not None and test.site is way[steps[0]].site:
        return None  # both in the function that is called: found there
    return way[steps[0]], way[backward]


def _subject(module: Module, way: Way, at: int) -> str:
    test = way[at].test
    losses = frozenset(n for e in way if e.kind in ("backward", "scaled") for n in e.names)
    return subject_of(module, test, losses) if test else "other"


def _reacts(module: Module, event: Event) -> bool:
    if isinstance(event.node, ast.Assert | ast.Expr):
        return True
    if not isinstance(event.node, ast.If) or event.test is None:
        return False
    bad, _ = arms(event.node, event.test)
    return may_leave(module, bad) or only_reports(module, bad) or bool(debuggers(module, bad))


def _name(text: str, event: Event, backward: Event) -> str:
    """What is tested, by the name that stands there."""
    shared = sorted(event.roots & backward.names or event.names & backward.roots, key=len)
    there = [
        n for n in [*shared, *sorted(event.roots | event.names, key=len)] if re.search(rf"\b{re.escape(n)}\b", text)
    ]
    return [*there, *shared, "the loss"][0]


def _fix(module: Module, event: Event, step: Event, backward: Event) -> tuple[Change, ...]:
    """Move the test to before the backward pass, or to before the step, when all that it reads is there by then."""
    test = module.statement(event.place)
    if event.site is not None and not isinstance(test, ast.Expr):
        return ()
    block = module.block(test)
    text = moved(module, test)
    if text is None:
        return ()
    for earlier in (backward.place, step.place):
        target = within_block(module, earlier, block)
        if target is None or target is test:
            continue
        between = block[block.index(target) : block.index(test)]
        if not read_in(test) & set().union(*map(stored_in, between)):
            return (module.insert_before(target, text), module.remove(test))
    return ()


RULE = Rule(
    code="NP101",
    name="nan-check-after-step",
    what="Finds a test of the loss or of the gradients for NaN or Inf that comes after `optimizer.step()` in the "
    "same iteration: whatever the test looks like (`isnan`, `not isfinite`, `math.isnan(loss.item())`, `loss != "
    "loss`, a function of the same file that tests).",
    why="One NaN gradient makes its weight NaN in a single step: `torch.ones(3)` with gradient `[nan, 1, 1]` and "
    "one step of SGD or Adam at lr 0.1 gives `[nan, 0.9, 0.9]` (AdamW: `[nan, 0.899, 0.899]`), and no later step "
    "brings it back. A test after the step can only report a dead model; with `continue` after it, training goes "
    "on with dead weights.",
    bad="""import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not torch.isfinite(loss):
            raise RuntimeError("loss is not finite")
""",
    good="""import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        loss = criterion(model(x), y)
        if not torch.isfinite(loss):
            raise RuntimeError("loss is not finite")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    miss="""import math

def fit(model, loader, train_step):
    for batch in loader:
        loss = train_step(model, batch)  # defined in another file, steps inside
        if math.isnan(loss) or math.isinf(loss):
            break
""",
    false_alarm="The weights are restored from a copy when the test fires. Tests after `scaler.step(optimizer)` "
    "are not reported, because a GradScaler leaves the weights alone when a gradient is not finite; neither are "
    "tests of the weights themselves, of a validation loss or of an epoch's mean.",
    fix="unsafe",
    fix_note="The test moves, as it is, to before the backward pass (or before the step, if it needs something "
    "computed in between). It now decides about the step, which is the point.",
    nodes=(ast.Module,),
    words=("backward(",),
    check=check,
)

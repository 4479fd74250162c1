"""NP110: a test for NaN that lets Inf pass, where a step depends on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..events import Event
from ..nonfinite import NanTest, is_infinity, subject_of
from ..paths import Way, all_ways
from ..reaction import arms, leaves
from ..rule import Change, Found, Rule
from ..source import Module
from ..training import in_tests, origins


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module):
        return
    told: set[ast.AST] = set()
    for way in all_ways(module):
        losses = frozenset(n for e in way if e.kind in ("backward", "scaled") for n in e.names)
        for at, event in enumerate(way):
            test = event.test
            if (
                event.kind != "test"
                or event.bad
                or test is None
                or test.kinds - {"flag"} != {"nan"}
                or event.node in told
            ):
                continue
            subject = subject_of(module, test, losses)
            if subject not in ("loss", "gradient") or event.site is not None or not _guards(module, way, at):
                continue
            if _sees_infinity(module, event, test):
                continue
            told.add(event.node)
            what = "gradient" if subject == "gradient" else "loss"
            yield Found(
                node=test.calls[0] if test.calls else event.node,
                message=f"only NaN is tested here, so an infinite {what} goes into the step",
                help="use isfinite, which sees both",
                edits=_fix(module, test),
                safe=True,
            )


def _guards(module: Module, way: Way, at: int) -> bool:
    """Whether a step without a scaler depends on the answer: the bad branch skips it, the good one goes on to it."""
    event = way[at]
    if not isinstance(event.node, ast.If) or event.test is None:
        return False
    bad, good = arms(event.node, event.test)
    step = next((e for e in way[at + 1 :] if e.kind in ("step", "scaler-step")), None)
    if step is None or step.kind != "step":
        return False
    inside = any(step.place is n for s in good for n in ast.walk(s))
    return inside or leaves(module, bad) in ("continue", "return")


def _sees_infinity(module: Module, event: Event, test: NanTest) -> bool:
    """Whether the same function looks for Inf, or for values that are too large, by other means."""
    scope = module.function(event.node)
    if any(module.function(c) is scope for c in module.calls("isinf", "isfinite")):
        return True
    names = frozenset(n for o in test.operands for n in origins(module, o))
    for compare in ast.walk(scope):
        if not isinstance(compare, ast.Compare) or not names & origins(module, compare.left, 1):
            continue
        if is_infinity(module, compare.comparators[0]) or isinstance(compare.ops[0], ast.Gt | ast.GtE | ast.Lt):
            return True
    return False


def _fix(module: Module, test: NanTest) -> tuple[Change, ...]:
    """``isnan(x)`` to ``not isfinite(x)``, and ``isnan(x).any()`` to ``not isfinite(x).all()``."""
    if len(test.calls) != 1:
        return ()
    call = test.calls[0]
    branch = next((p for p in module.parents(call) if isinstance(p, ast.stmt)), None)
    if not isinstance(branch, ast.If):
        return ()
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    outer: ast.AST = call
    text = module.source(call)
    if name != "isnan":
        return ()
    finite = _renamed(module, call)
    above = module.parent(call)
    if isinstance(above, ast.Attribute) and above.attr == "any" and isinstance(module.parent(above), ast.Call):
        whole = module.parent(above)
        assert isinstance(whole, ast.Call)
        if whole.args or whole.keywords:
            return ()
        outer, text = whole, f"not {finite}.all()"
        beyond = module.parent(whole)
        if isinstance(beyond, ast.Attribute):
            return ()
    elif isinstance(above, ast.Attribute | ast.Call | ast.Compare | ast.BinOp):
        return ()
    else:
        text = f"not {finite}"
    negation = module.parent(outer)
    if isinstance(negation, ast.UnaryOp) and isinstance(negation.op, ast.Not):
        outer, text = negation, text.removeprefix("not ")
    return (module.replace(outer, text),)


def _renamed(module: Module, call: ast.Call) -> str:
    """The call with isfinite in place of isnan."""
    assert isinstance(call.func, ast.Attribute)
    start, _ = module.span(call)
    _, end = module.span(call.func)
    text = module.source(call)
    cut = end - start
    return text[: cut - len("isnan")] + "isfinite" + text[cut:]


RULE = Rule(
    code="NP110",
    name="isnan-without-isinf",
    what="Finds a step that is skipped for a NaN loss or a NaN gradient norm, but not for an infinite one: `isnan` "
    "(or `x != x`) without `isinf` or `isfinite` in the same function.",
    why="Inf comes before NaN. One infinite gradient of three, [inf, 1, 1], has norm inf: `isnan(norm)` is False, "
    "`clip_grad_norm_` has already turned the gradients into [nan, 0, 0], and the step makes the weight NaN. An "
    "infinite loss gives NaN gradients as a rule (inf − inf, 0 · inf). `isfinite` sees both at the same price.",
    bad="""import torch

def train(model, loader, optimizer, criterion, log):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isnan(norm):
            log.warning("step %d skipped", i)
            continue
        optimizer.step()
""",
    good="""import torch

def train(model, loader, optimizer, criterion, log):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            log.warning("step %d skipped", i)
            continue
        optimizer.step()
""",
    miss="""def has_nan(model):
    return any(p.grad.isnan().any() for p in model.parameters())  # the step is in another file
""",
    false_alarm="The value cannot be infinite, or a limit elsewhere catches it. A comparison of the same value "
    "with a limit or with infinity in the same function is seen; steps through a GradScaler are not reported, as "
    "it looks for Inf itself.",
    fix="safe",
    fix_note="`isnan(x)` becomes `not isfinite(x)`: for every finite x the answer is the same.",
    nodes=(ast.Module,),
    words=("backward(",),
    check=check,
)

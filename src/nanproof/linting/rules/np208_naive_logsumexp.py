"""NP208: log(sum(exp(x))) overflows where logsumexp does not."""

from __future__ import annotations

import ast

from ..guards import guarded
from ..matching import Hit, call, constant, exponent, held, not_aside, outside_loss
from ..names import called_last, key_of
from ..numerics import shifted
from ..rewrite import move
from ..rule import Moved, Rule
from ..values import core, made_of, operation, trail
from .np209_naive_softmax import small


def _total(hit: Hit) -> ast.expr | None:
    found = held(hit)
    return found.operand if found is not None and found.name in ("sum", "mean") else None


def _ensemble(hit: Hit) -> bool:
    """The log-probabilities of several models, stacked and averaged: never above zero."""
    parts = made_of(hit.operand, hit.module, limit=40)
    return any(isinstance(p, ast.Call) and called_last(p, hit.module) == "stack" for p in parts)


def _guarded_elsewhere(hit: Hit) -> bool:
    """Whether several assignments compete for a name and one of them keeps it away from zero."""
    names = [t for t in trail(hit.outer, hit.module) if key_of(t)]
    return any(hit.module.value(t) is None and guarded(t, hit.module) for t in names)


def _rewrite(hit: Hit) -> Moved:
    """``torch.logsumexp`` needs to know the dimension, so a sum over everything is left to the user."""
    module, total = hit.module, operation(core(hit.outer, hit.module), hit.module)
    if total is None or total.operand is None or total.name != "sum" or len(total.args) > 2:
        return Moved()
    dims, keep = total.given("dim", "axis", place=0), total.given("keepdim", "keepdims", place=1)
    names = [t for t in [*trail(hit.outer, module), *trail(total.operand, module)] if key_of(t)]
    plain = not set(total.keywords) - {"dim", "axis", "keepdim", "keepdims"}
    if not plain or dims is None or len(names) > 1 or not isinstance(hit.node, ast.expr):
        return Moved()
    name, needed = module.spell("torch.logsumexp")
    args = [module.source(hit.operand), f"dim={module.source(dims)}"]
    args += [f"keepdim={module.source(keep)}"] if keep is not None else []
    parts = [hit.operand, dims, *([keep] if keep is not None else [])]
    return move(hit.node, names[0] if names else hit.outer, parts, f"{name}({', '.join(args)})", needed, module)


def _of_a_model(hit: Hit) -> bool:
    """In a function that is given a model and makes no loss: its predictions are put together."""
    scope = hit.module.function(hit.node)
    given = {a.arg for a in scope.args.args} if isinstance(scope, ast.FunctionDef) else set()
    return bool(given & {"model", "net", "network"}) and outside_loss(hit)


RULE = Rule(
    code="NP208",
    name="naive-logsumexp",
    what="""
Finds `torch.log(torch.exp(x).sum(dim))` and its spellings, where the largest value is not subtracted first.
""",
    why="""
exp(x) is infinite from x = 88.73 on in float32 and bfloat16, and from 11.09 on in float16; below -104 it is 0. The
logarithm brings the number back into range, but too late: of [88, 90] it makes inf with a gradient of [0, NaN], of
[-104, -110] it makes -inf with NaN. `logsumexp` subtracts the largest exponent first: 90.127, gradient [0.119, 0.881].
""",
    bad="""
def partition(scores):
    return torch.log(torch.sum(torch.exp(scores), dim=1))
""",
    good="""
def partition(scores):
    return torch.logsumexp(scores, dim=1)
""",
    miss="""
def partition(scores, keep):
    return torch.log((torch.exp(scores) * keep).sum(1))  # masked: fill with -inf, then logsumexp
""",
    false_alarm="""
The exponents are known to be small, such as cosines divided by a temperature of 0.1; logsumexp is as good there. If
the largest value is subtracted in a way that the rule does not see, silence the line.
""",
    fix="safe",
    fix_note="""
The value and the gradient stay the same, to rounding, wherever the old ones were finite. There is no fix for a sum over
all dimensions or a mean, where `torch.logsumexp` needs more than the code says.
""",
    words=("exp",),
    match=call("log", "log_").of(_total, exponent),
    where=not_aside,
    unless=(lambda h: shifted(h.operand, h.module), constant, small, _ensemble, _guarded_elsewhere),
    doubt=(_of_a_model,),
    message="the logarithm of a sum of exponentials is inf as soon as one exponent passes 88.7 (float16: 11.09)",
    help="use torch.logsumexp(x, dim), which subtracts the largest exponent first",
    edit=_rewrite,
)

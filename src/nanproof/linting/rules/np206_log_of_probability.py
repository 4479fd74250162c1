"""NP206: the logarithm of a sigmoid or softmax is −∞ where the probability has rounded to zero."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..gradients import constant
from ..guards import checked, guarded
from ..names import key_of
from ..numerics import division, named_probability, probability, summed
from ..purpose import aside, only_logged, trains
from ..rewrite import move
from ..rule import Found, Moved, Rule
from ..values import core, number, operation, short, trail
from .np209_naive_softmax import small_exponent

if TYPE_CHECKING:
    from ..names import Operation
    from ..source import Module

_LOGS = {"log", "log2", "log10", "log_"}


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    found = module.operation(node)
    if found is None or found.name not in _LOGS or found.operand is None or aside(node, module):
        return
    operand = found.operand
    if constant(operand, module):
        return
    inner = _complement(operand, module)
    source = probability(inner if inner is not None else operand, module)
    if source is None and inner is None and (made := _handmade(operand, module)) is not None:
        yield Found(
            node=node,
            message="the logarithm of a softmax written by hand is -inf where the probability rounds to zero, and NaN "
            "where the exponential overflows",
            help="use torch.nn.functional.log_softmax(x, dim), which forms neither",
            about=made,
        )
    elif source is not None:
        yield from _known(node, found.name, operand, inner, source, module)
    elif _named(operand, module) and trains(node, module) and not _kept(node, operand, module):
        yield Found(
            node=node,
            message=f"the logarithm of the probability {short(operand, module)} is -inf where it is zero",
            help="pass log-probabilities (log_softmax, logsigmoid) instead, or clamp: .clamp(min=1e-12).log()",
            info=not _times_itself(node, operand, module),
        )


def _times_itself(node: ast.AST, operand: ast.expr, module: Module) -> bool:
    """``p * p.log()``: 0 · -inf is NaN already in the value."""
    names = {key_of(n) for n in ast.walk(operand)} - {""}
    above = module.parent(node)
    sides = [above.left, above.right] if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Mult) else []
    return any(names & {key_of(n) for n in ast.walk(s)} for s in sides if s is not node)


def _handmade(operand: ast.expr, module: Module) -> ast.expr | None:
    """The division ``exp(x) / exp(x).sum()`` that an operand is, through names."""
    at = core(operand, module)
    parts = division(at, module)
    above = module.operation(core(parts[0], module)) if parts else None
    below = summed(parts[1], module) if parts else None
    if parts is None or above is None or above.name != "exp" or below is None:
        return None
    total = module.operation(core(below, module))
    if above.operand is None or small_exponent(above.operand, module):
        return None
    return at if total is not None and total.name == "exp" else None


def _known(
    node: ast.Call, log: str, operand: ast.expr, inner: ast.expr | None, source: Operation, module: Module
) -> Iterator[Found]:
    if any(key_of(t) and guarded(t, module) for t in trail(operand, module)):
        return
    kind = source.name
    better = "torch.nn.functional.logsigmoid" if kind == "sigmoid" else "torch.nn.functional.log_softmax"
    if kind == "softmax" and inner is not None:
        better = ""
    moved = _rewrite(node, inner if inner is not None else operand, source, better, inner is not None, module)
    name = better.rpartition(".")[2]
    yield Found(
        node=node,
        message=f"the logarithm of {'1 - ' if inner is not None else ''}a {kind} is -inf where the probability "
        "rounds to zero, and its gradient NaN",
        help=f"use {name}, which never forms the probability" if name else "work with log_softmax from the start",
        edits=moved.edits if log == "log" and better else (),
        safe=moved.safe,
        info=_parameter(source) and not _times_itself(node, operand, module),
    )


def _parameter(source: Operation) -> bool:
    """A parameter of its own, such as the weights of a mixture, moves slowly and starts small."""
    return key_of(source.operand).startswith("self.") if source.operand is not None else False


def _complement(node: ast.expr, module: Module) -> ast.expr | None:
    """``p`` for ``1 - p``."""
    at = core(node, module)
    if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Sub) and number(at.left, module) == 1:
        return at.right
    return None


def _named(operand: ast.expr, module: Module) -> bool:
    """A probability by its name, or a quotient of two."""
    inner = _complement(operand, module)
    at = inner if inner is not None else operand
    found = operation(at, module)
    if found and found.name == "div" and found.operand is not None and found.args:
        return all(named_probability(e) or probability(e, module) for e in (found.operand, found.args[0]))
    if found and found.name in ("gather", "index_select", "take_along_dim") and found.operand is not None:
        at = found.operand  # chooses elements and leaves them what they are
    if not named_probability(at):
        return False
    held = module.value(at)
    return held is None or (isinstance(held, ast.BinOp) and not guarded(held, module))


def _kept(node: ast.Call, operand: ast.expr, module: Module) -> bool:
    parts = [n for n in ast.walk(operand) if key_of(n)]
    if any(guarded(n, module) for n in parts if isinstance(n, ast.expr)):
        return True
    return checked({key_of(n) for n in parts}, node, module) or only_logged(node, module)


def _rewrite(node: ast.Call, held: ast.expr, source: Operation, better: str, negated: bool, module: Module) -> Moved:
    """The same logarithm from the logits; nothing if they have changed since, or if their text is needed twice."""
    if not better or source.operand is None:
        return Moved()
    name, needed = module.spell(better)
    logits = module.source(source.operand)
    if negated:
        logits = f"-({logits})" if not isinstance(source.operand, ast.Name | ast.Call | ast.Attribute) else f"-{logits}"
    others = [module.source(a) for a in source.args]
    others += [f"{k}={module.source(v)}" for k, v in source.keywords.items() if source.name == "softmax"]
    parts = [source.operand, *source.args, *source.keywords.values()]
    return move(node, held, parts, f"{name}({', '.join([logits, *others])})", needed, module)


RULE = Rule(
    code="NP206",
    name="log-of-probability",
    what="""
Finds the logarithm of a sigmoid or a softmax, also of `1 - sigmoid(x)` and of a probability computed a few lines
before; and, in a loss, the logarithm of a tensor whose name says that it is a probability, with nothing that keeps it
from zero.
""",
    why="""
The probability is rounded before its logarithm is taken. In float32 `sigmoid(x)` is 0 from x = -89 on (the logarithm
ought to be -89, not -inf), and `1 - sigmoid(x)` is 0 from x = 17 on. In float16 the limits are -18 and 9. A softmax
is 0 wherever a logit is that far below the largest one. The gradient is ∞ · 0, NaN, for every logit of that row.

`logsigmoid` and `log_softmax` compute the logarithm from the logits and never form the probability: `log_softmax` of
[0, 200] is [-200, 0] with gradient [1, -1], where `softmax(x).log()` gives [-inf, 0] and [NaN, NaN].
""",
    bad="""
def nll_loss(logits, target):
    log_p = torch.log(torch.softmax(logits, dim=-1))
    return -log_p.gather(-1, target[..., None]).mean()
""",
    good="""
def nll_loss(logits, target):
    log_p = F.log_softmax(logits, dim=-1)
    return -log_p.gather(-1, target[..., None]).mean()
""",
    miss="""
def policy_loss(policy, states, actions, returns):
    chosen = policy(states).gather(1, actions)  # the softmax is in the policy's forward
    return -(torch.log(chosen) * returns).mean()
""",
    false_alarm="""
The logits are small for certain, or the infinity is wanted, as in a mask of log-probabilities. A probability that is
clamped, or has an eps added, is left alone.
""",
    fix="safe",
    fix_note="""
Every finite value and gradient stays the same, to rounding. When the probability is used elsewhere too, or was
computed on another line, the fix is marked unsafe unless that line can go.
""",
    nodes=(ast.Call,),
    calls=frozenset(_LOGS),
    check=check,
)

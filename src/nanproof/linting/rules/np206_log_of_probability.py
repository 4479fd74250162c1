"""NP206: the logarithm of a sigmoid or softmax is −∞ where the probability has rounded to zero."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import has_argument
from ..gradients import constant, given_by_name
from ..guards import checked, guarded
from ..names import key_of
from ..numerics import boolean, division, named_probability, probability, summed
from ..purpose import aside, in_loss, only_logged, trains
from ..ranges import Range, range_of
from ..rewrite import move
from ..rule import Found, Moved, Rule
from ..training import loss_like
from ..values import core, cores, number, operation, scalar, short, trail
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
    elif _mixed(operand, module) and trains(node, module) and not only_logged(node, module):
        yield Found(
            node=node,
            message="the logarithm of a mixture of probabilities is -inf where all of them round to zero",
            help="mix logarithms: torch.logsumexp(torch.stack([log_p + math.log(a), log_q + math.log(b)]), dim=0)",
        )
    elif (_predicted(node, operand, module) or _overlap(node, operand, module)) and not only_logged(node, module):
        yield Found(
            node=node,
            message=f"the logarithm of {short(operand, module) or 'a prediction'} is -inf where it is zero",
            help="take log-probabilities (log_softmax, logsigmoid), or clamp: .clamp(min=1e-12).log()",
        )
    elif _named(operand, module) and trains(node, module) and not _kept(node, operand, module):
        yield Found(
            node=node,
            message=f"the logarithm of the probability {short(operand, module)} is -inf where it is zero",
            help="pass log-probabilities (log_softmax, logsigmoid) instead, or clamp: .clamp(min=1e-12).log()",
            info=not (_times_itself(node, operand, module) or in_loss(node, module)),
        )
    elif (held := _held(operand, inner, node, module)).zero and held.low >= 0 and _fits(node, operand, held, module):
        yield Found(
            node=node,
            message=f"the logarithm of {short(operand, module) or 'this'} is -inf where it is zero ({held.zero})",
            help="clamp it first: .clamp(min=1e-12).log(), or compute the logarithm of its parts",
            info=not (held.sure and in_loss(node, module)),
            about=node,
        )


def _held(operand: ast.expr, inner: ast.expr | None, node: ast.AST, module: Module) -> Range:
    """The range of the operand; in a loss, ``log(1 - f(x))`` says that ``f`` gives a probability."""
    held = range_of(operand, module)
    at = core(inner, module) if inner is not None else None
    if held.zero or not isinstance(at, ast.Call) or module.operation(at) is not None or not in_loss(node, module):
        return held
    return Range(low=0, high=1, zero="1 minus something that rounds to 1")


def _fits(node: ast.AST, operand: ast.expr, held: Range, module: Module) -> bool:
    """Whether this is trained through, and nothing keeps the operand from zero."""
    if not trains(node, module) or only_logged(node, module) or _kept(node, operand, module):
        return False
    if boolean(operand, module):
        return False  # 0 and -inf, to be added to scores
    at = core(operand, module)
    names = {key_of(n).rpartition(".")[2] for n in ast.walk(at)} - {"", "self", *module.aliases}
    return held.sure or not all(given_by_name(n) for n in names)


_GIVEN = re.compile(
    r"(^|_)(targets?|labels?|gt|true|ref\w*|teacher\w*|t|var\w*|std\w*|sigma\w*|scale\w*|lam\w*|weights?|alphas?|betas?|"
    r"gammas?|tau|temp\w*|theta|mu|lens?|lengths?|counts?|num|dist\w*|z|rates?|ratio|mask|prior|det\w*)(_|$|\d)",
    re.I,
)


def _mixed(operand: ast.expr, module: Module, depth: int = 0) -> bool:
    """``0.5 * (p + q)`` of two softmaxes, or of the exponentials of two log-probabilities."""
    at = core(operand, module)
    found = operation(at, module)
    if found is None or found.operand is None or depth > 6:
        return False
    if found.name == "add" and found.args:
        return all(_weighted(side, module, depth) for side in (found.operand, found.args[0]))
    if found.name in ("mul", "div") and found.args:
        sides = (found.operand, found.args[0])
        return any(_mixed(a, module, depth + 1) and scalar(b, module) for a, b in (sides, sides[::-1]))
    return False


def _weighted(side: ast.expr, module: Module, depth: int) -> bool:
    """One summand of a mixture: a probability, times a number or not, or a mixture itself."""
    found = operation(core(side, module), module)
    if found is not None and found.name == "mul" and found.operand is not None and found.args:
        return any(_weighted(f, module, depth + 1) for f in (found.operand, found.args[0]))
    logs = found is not None and found.name == "exp" and found.operand is not None
    if logs and found is not None and found.operand is not None:
        return bool(re.search(r"log", module.source(found.operand)))
    return probability(side, module) is not None or _mixed(side, module, depth + 1)


def _predicted(node: ast.AST, operand: ast.expr, module: Module) -> bool:
    """In a loss, ``target * log(p)`` of a ``p`` that the function is given: a cross entropy written by hand."""
    owner = module.statement(node)
    stored = [key_of(t) for t in getattr(owner, "targets", [])]
    if not in_loss(node, module) and not (any(loss_like(n) for n in stored) and trains(node, module)):
        return False
    parts = [p for at in cores(operand, module) for p in _chosen(at, module)]
    scope = module.function(node)
    names = [key_of(p) for p in parts]
    if any(guarded(p, module) for p in parts) or checked(set(names), node, module):
        return False
    given = bool(names) and all(
        n and not _GIVEN.search(n) and "log" not in n and not isinstance(scope, ast.Module) and has_argument(scope, n)
        for n in names
    )
    return given and _multiplied(node, module)


def _overlap(node: ast.AST, operand: ast.expr, module: Module) -> bool:
    """In a loss, the logarithm of an overlap of boxes, which is 0 for boxes that do not touch."""
    named = re.search(r"(^|_)[gdc]?ious?(_|$)", key_of(operand))
    return named is not None and in_loss(node, module) and not _kept_alone(operand, node, module)


def _kept_alone(operand: ast.expr, node: ast.AST, module: Module) -> bool:
    return guarded(operand, module) or checked({key_of(operand)}, node, module)


def _chosen(at: ast.expr, module: Module, depth: int = 0) -> list[ast.expr]:
    """What may be taken: both arms of a ``where``, ``p`` of ``1 - p``, of ``p.gather(…)`` and of ``p[mask]``."""
    inner = _complement(at, module)
    if inner is not None:
        return _chosen(core(inner, module), module)
    found = module.operation(at)
    if found is not None and found.name == "where" and len(found.args) >= 2:
        return [c for side in found.args[-2:] for c in _chosen(core(side, module), module)]
    found = operation(at, module)
    taken = ("gather", "index_select", "take_along_dim", "sum", "mean")
    if found is not None and found.operand is not None and depth < 8 and found.name in (*taken, "div"):
        return [c for one in cores(found.operand, module) for c in _chosen(one, module, depth + 1)]
    return [at]


def _multiplied(node: ast.AST, module: Module) -> bool:
    """Whether a logarithm is a factor beside something that is no number."""
    above = module.parent(node)
    if isinstance(above, ast.UnaryOp):
        node, above = above, module.parent(above)
    if isinstance(above, ast.Call):
        found = module.operation(above)
        return found is not None and found.name in ("mul", "dot", "nll_loss", "kl_div")
    if not isinstance(above, ast.BinOp) or not isinstance(above.op, ast.Mult):
        return False
    return not scalar(above.right if above.left is node else above.left, module)


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


def _kept(node: ast.AST, operand: ast.expr, module: Module) -> bool:
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
before; of a mixture of probabilities, `(0.5 * (p + q)).log()`; and, in a loss, `target * log(p)` of a `p` that the
function is given, and the logarithm of an overlap of boxes, with nothing that keeps it from zero.
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

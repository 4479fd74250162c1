"""NP209: exp(x) / exp(x).sum() overflows where softmax does not."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ..guards import small_constant
from ..matching import Hit, constant, not_aside, quotient, training
from ..names import Operation, called_last, key_of
from ..numerics import division, shifted, summed
from ..rewrite import move
from ..rule import Moved, Rule
from ..values import core, made_of, operation, trail
from ..vanishing import squared

if TYPE_CHECKING:
    from ..source import Module

_BOUNDED = {"tanh", "sigmoid", "clamp", "clip", "logsigmoid", "sin", "cos", "cosine_similarity"}
_SMALL = {"normalize", "cosine_similarity", "arange", "linspace", "cdist", "pdist", "log_softmax", "logsigmoid"}


def _exponent(hit: Hit) -> ast.expr | None:
    """What is exponentiated above and summed below, alone or times a mask."""
    module = hit.module
    divisor = _without_eps(hit.operand, module)
    below = summed(divisor, module) or _scattered(divisor, module)
    if hit.over is None or below is None:
        return None
    found = operation(core(hit.over, module), module)
    sides: list[Operation | None] = [found]
    if found is not None and found.name in ("mul", "multiply") and found.args:
        sides = [operation(core(s, module), module) for s in (found.operand, found.args[0]) if s is not None]
    keys = {key_of(t) for t in trail(hit.over, module)} - {""}
    same = any(key_of(t) in keys for t in trail(below, module))
    same = same or ast.dump(core(below, module)) == ast.dump(core(hit.over, module))
    return next((s.operand for s in sides if s is not None and s.name == "exp"), None) if same else None


def _scattered(node: ast.expr, module: Module) -> ast.expr | None:
    """What is added up by groups, as in graphs: ``scatter_add(x, index)[index]``."""
    at = core(node, module)
    at = core(at.value, module) if isinstance(at, ast.Subscript) else at
    last = called_last(at, module) if isinstance(at, ast.Call) else ""
    if not isinstance(at, ast.Call) or not at.args:
        return None
    if (
        last in ("index_add", "index_add_", "scatter_add", "scatter_add_")
        and len(at.args) >= 3
        and not module.called(at)
    ):
        return at.args[2]  # zeros.index_add(0, index, x)
    return at.args[0] if last in ("scatter_add", "scatter_sum", "segment_sum", "scatter") else None


def _without_eps(node: ast.expr, module: Module) -> ast.expr:
    """``s`` for ``s + 1e-12``, which does not help where the sum is infinite."""
    at = core(node, module)
    if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Add) and small_constant(at.right, module):
        return at.left
    return node


def small(hit: Hit) -> bool:
    return small_exponent(hit.operand, hit.module)


def small_exponent(exponent: ast.expr, module: Module, depth: int = 0) -> bool:
    """Exponents that cannot be large: minus a square, as in a Gaussian kernel, cosines, or something bounded."""
    found = operation(core(exponent, module), module)
    if found is not None and found.name in _BOUNDED:
        return True
    if found is not None and found.name in ("mul", "div", "neg") and depth < 8:
        sides = [side for side in (found.operand, *found.args) if side is not None]
        if any(small_exponent(side, module, depth + 1) for side in sides):
            return True
    parts = made_of(exponent, module, limit=120)
    return any(
        (isinstance(p, ast.expr) and squared(p, module))
        or (isinstance(p, ast.Call) and called_last(p, module) in _SMALL)
        for p in parts
    )


def _looked_at(hit: Hit) -> bool:
    """Whether a test before asks whether the exponentials are finite."""
    module, keys = hit.module, {key_of(t) for t in trail(hit.over or hit.operand, hit.module)} - {""}
    calls = [c for c in module.calls("isnan", "isinf", "isfinite") if module.function(c) is module.function(hit.node)]
    return any(key_of(n) in keys for c in calls for n in ast.walk(c))


def _divided_again(hit: Hit) -> bool:
    """Whether the same thing is divided by its sums several times: Sinkhorn, which NP218 is about."""
    module, below = hit.module, summed(hit.outer, hit.module)
    keys = {key_of(t) for t in trail(below, module)} - {""} if below is not None else set()
    found = 0
    for other in [*module.nodes(ast.BinOp), *module.nodes(ast.AugAssign)]:
        parts = division(other, module)
        if parts is not None and key_of(parts[0]) in keys and module.function(other) is module.function(hit.node):
            found += summed(parts[1], module) is not None
    return found > 1


def _rewrite(hit: Hit) -> Moved:
    module, above, below = hit.module, hit.over or hit.operand, hit.outer
    total = operation(core(below, module), module)
    if (
        total is None
        or not isinstance(hit.node, ast.BinOp)
        or set(total.keywords) - {"dim", "axis", "keepdim", "keepdims"}
    ):
        return Moved()
    dims, keep = total.given("dim", "axis", place=0), total.given("keepdim", "keepdims", place=1)
    if dims is None or isinstance(dims, ast.Tuple | ast.List) or not isinstance(keep, ast.Constant) or not keep.value:
        return Moved()
    name, needed = module.spell("torch.softmax")
    text = f"{name}({module.source(hit.operand)}, dim={module.source(dims)})"
    names = [t for t in trail(above, module) if key_of(t)]
    if not names and not any(key_of(t) for t in trail(below, module)):
        return Moved((module.replace(hit.node, text), *needed), safe=True)
    if len(names) != 1:
        return Moved()
    return Moved(
        move(hit.node, names[0], [hit.operand, dims], text, needed, module).edits
    )  # exp stays: it was used twice


RULE = Rule(
    code="NP209",
    name="naive-softmax",
    what="""
Finds a softmax written by hand, `torch.exp(x) / torch.exp(x).sum(dim, keepdim=True)`, where the largest value is not
subtracted first.
""",
    why="""
exp(x) is infinite from x = 88.73 on in float32 and bfloat16, and from 11.09 on in float16, and ∞ / ∞ is NaN. If all
exponents are below -104 the sum is 0, and 0 / 0 is NaN as well. Attention scores pass 11 in ordinary training.
`torch.softmax` subtracts the largest exponent first: the largest becomes exp(0) = 1 and the sum at least 1.
""",
    bad="""
def attend(scores, values):
    weights = torch.exp(scores) / torch.exp(scores).sum(dim=-1, keepdim=True)
    return weights @ values
""",
    good="""
def attend(scores, values):
    return torch.softmax(scores, dim=-1) @ values
""",
    miss="""
def attend(scores, values):
    weights = torch.exp(scores)
    total = 0
    for column in weights.unbind(-1):
        total = total + column
    return (weights / total[..., None]) @ values  # still inf / inf, but the sum is taken in a loop
""",
    false_alarm="""
The exponents are bounded in a way that the rule does not see. Gaussian kernels, cosines, tanh and clamped values are
left alone.
""",
    fix="safe",
    fix_note="""
The value and the gradient stay the same, to rounding, wherever the old ones were finite. If the exponential has a name
of its own, the fix is marked unsafe, because that name may be used elsewhere.
""",
    default=False,
    words=("exp",),
    match=quotient().of(_exponent),
    where=not_aside,
    unless=(lambda h: shifted(h.operand, h.module), constant, small, _divided_again, _looked_at),
    doubt=(lambda h: not training(h),),
    message="a softmax written by hand is inf / inf = NaN as soon as one exponent passes 88.7 (float16: 11.09)",
    help="use torch.softmax(x, dim), which subtracts the largest exponent first",
    edit=_rewrite,
    about=lambda h: h.node,
)

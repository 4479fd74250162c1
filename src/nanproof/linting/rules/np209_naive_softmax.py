"""NP209: exp(x) / exp(x).sum() overflows where softmax does not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..gradients import constant
from ..numerics import QUOTIENTS, division, shifted, summed
from ..purpose import aside
from ..rewrite import Moved, move
from ..rule import Found, Rule
from ..values import called_last, core, made_of, operation, trail
from ..vanishing import squared

if TYPE_CHECKING:
    from ..names import Operation
    from ..source import Module

_BOUNDED = {"tanh", "sigmoid", "clamp", "clip", "logsigmoid", "sin", "cos", "cosine_similarity"}
_SMALL = {"normalize", "cosine_similarity", "arange", "linspace", "cdist", "pdist", "log_softmax", "logsigmoid"}


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    parts = division(node, module)
    if parts is None or aside(node, module):
        return
    exponential = _exponential(parts[0], module)
    if exponential is None or exponential.name != "exp" or exponential.operand is None:
        return
    below = summed(parts[1], module)
    if below is None or not _same(below, parts[0], module):
        return
    exponent = exponential.operand
    if shifted(exponent, module) or constant(exponent, module) or small_exponent(exponent, module):
        return
    if _divided_again(node, below, module):
        return
    moved = _rewrite(node, parts[0], parts[1], exponent, module)
    yield Found(
        node=node,
        message="a softmax written by hand is inf / inf = NaN as soon as one exponent passes 88.7 (float16: 11.09)",
        help="use torch.softmax(x, dim), which subtracts the largest exponent first",
        edits=moved.edits,
        safe=moved.safe,
        about=node,
    )


def _exponential(above: ast.expr, module: Module) -> Operation | None:
    """The exponential above the line, alone or times a mask."""
    found = operation(core(above, module), module)
    if found is None or found.name not in ("mul", "multiply") or not found.args:
        return found
    sides = [operation(core(s, module), module) for s in (found.operand, found.args[0]) if s is not None]
    return next((s for s in sides if s is not None and s[0] == "exp"), None)


def _same(below: ast.expr, above: ast.expr, module: Module) -> bool:
    """Whether what is summed is what stands above, by name or by text."""
    keys = {key_of(t) for t in trail(above, module)} - {""}
    if any(key_of(t) in keys for t in trail(below, module)):
        return True
    return ast.dump(core(below, module)) == ast.dump(core(above, module))


def small_exponent(exponent: ast.expr, module: Module, depth: int = 0) -> bool:
    """Exponents that cannot be large: minus a square, as in a Gaussian kernel, cosines, or something bounded."""
    found = operation(core(exponent, module), module)
    if found is not None and found.name in _BOUNDED:
        return True
    if found is not None and found.name in ("mul", "div", "neg") and depth < 8:
        sides = [side for side in (found.operand, *found.args) if side is not None]
        if any(small_exponent(side, module, depth + 1) for side in sides):
            return True
    for part in made_of(exponent, module, limit=120):
        if isinstance(part, ast.expr) and squared(part, module):
            return True
        if isinstance(part, ast.Call) and called_last(part, module) in _SMALL:
            return True
    return False


def _divided_again(node: ast.AST, below: ast.expr, module: Module) -> bool:
    """Whether the same thing is divided by its sums several times: Sinkhorn, which NP218 is about."""
    keys = {key_of(t) for t in trail(below, module)} - {""}
    scope = module.function(node)
    found = 0
    for other in [*module.nodes(ast.BinOp), *module.nodes(ast.AugAssign)]:
        parts = division(other, module)
        if parts is not None and key_of(parts[0]) in keys and module.function(other) is scope:
            found += summed(parts[1], module) is not None
    return found > 1


def _rewrite(node: ast.AST, above: ast.expr, below: ast.expr, exponent: ast.expr, module: Module) -> Moved:
    total = operation(core(below, module), module)
    if total is None or not isinstance(node, ast.BinOp) or set(total.keywords) - {"dim", "axis", "keepdim", "keepdims"}:
        return Moved()
    rest, keywords = total.args, total.keywords
    dims = keywords.get("dim", keywords.get("axis", rest[0] if rest else None))
    keep = keywords.get("keepdim", keywords.get("keepdims", rest[1] if len(rest) > 1 else None))
    if dims is None or isinstance(dims, ast.Tuple | ast.List) or not isinstance(keep, ast.Constant) or not keep.value:
        return Moved()
    name, needed = module.spell("torch.softmax")
    text = f"{name}({module.source(exponent)}, dim={module.source(dims)})"
    names = [t for t in trail(above, module) if key_of(t)]
    if not names and not any(key_of(t) for t in trail(below, module)):
        return Moved((module.replace(node, text), *needed), safe=True)
    if len(names) != 1:
        return Moved()
    moved = move(node, names[0], [exponent, dims], text, needed, module)
    return Moved(moved.edits)  # the exponential stays where it is: it was used twice


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
def attend(scores, values, mask):
    weights = torch.exp(scores) * mask
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-6) @ values  # still inf / inf, but not a plain softmax
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
    nodes=(ast.BinOp, ast.AugAssign, ast.Call),
    calls=QUOTIENTS,
    words=("exp",),
    check=check,
)

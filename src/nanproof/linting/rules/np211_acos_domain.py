"""NP211: acos of a cosine that has rounded past 1 is NaN, and so is acosh below 1."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..gradients import learned
from ..guards import guarded, lower_bound
from ..matching import Hit, Match, asked, constant, in_loss, not_aside, reported
from ..names import called_last
from ..numerics import boolean, division
from ..purpose import is_network
from ..ranges import range_of
from ..rule import Change, Rule
from ..values import core, made_of, number, trail
from ..vanishing import squared

if TYPE_CHECKING:
    from ..source import Module

_INVERSE = frozenset(
    {"acos", "arccos", "asin", "arcsin", "acos_", "asin_", "atanh", "arctanh", "atanh_", "acosh", "arccosh"}
)
_INSIDE = {"tanh", "sin", "cos", "sigmoid", "rand", "hardtanh", "softsign"}
_CLAMPED = "clamped"


def _find(node: ast.AST, module: Module) -> Iterator[Hit]:
    found = module.operation(node)
    if found is not None and found.operand is not None:
        yield Hit(node, found.operand, module)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not (module.called(node) or node.args):
        root = module.receiver(node).partition(".")[0]
        if root not in module.aliases and root not in ("np", "math"):
            yield Hit(node, node.func.value, module)


def _outside(hit: Hit) -> bool | str:
    """Whether the operand may leave the interval; one clamped to exactly 1 stays in it, with an infinite slope."""
    if isinstance(hit.node, ast.Call) and "cosh" in called_last(hit.node, hit.module):
        low = range_of(hit.operand, hit.module).low
        return _CLAMPED if low == 1 and in_loss(hit) else low < 1 and not constant(hit)
    bound = _bound(hit)
    if bound is None:
        return not _inside(hit)
    return _CLAMPED if bound >= 1 and in_loss(hit) else False


def _bound(hit: Hit) -> float | None:
    """How far from zero a clamp lets the operand go; infinity if that is not a plain number; None without a clamp."""
    for part in trail(hit.operand, hit.module):
        if isinstance(part, ast.Call):
            last = called_last(part, hit.module)
            if last.rstrip("_") in ("clamp", "clip"):
                low = lower_bound(part, hit.module)
                return 0.0 if low is None or math.isinf(low) else abs(low)
            words = ("clamp", "clip", "safe", "minimum", "maximum", "where", "nan_to_num")
            if last in ("min", "max", "minimum", "maximum") and len(part.args) > 1:
                return _ones(part.args[1], hit.module)
            if any(word in last.lower() for word in words):
                return 0.0
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
            factors = (number(part.left, hit.module), number(part.right, hit.module))
            if any(f is not None and 0 < abs(f) < 1 for f in factors):
                return 0.0  # x * (1 - 1e-6)
    return None


def _ones(bound: ast.expr, module: Module) -> float:
    """1 for ``torch.ones(n)`` and ``-torch.ones(n)``, what a minimum is taken with; else 0: it may be less."""
    parts = list(ast.walk(bound))
    factors = [abs(v) for p in parts if isinstance(p, ast.Constant) and (v := number(p, module)) is not None]
    made = any(isinstance(p, ast.Call) and called_last(p, module).startswith("ones") for p in parts)
    return 1.0 if made and all(f >= 1 for f in factors) else 0.0


def _inside(hit: Hit) -> bool:
    """Whether the operand cannot leave the interval, is a constant, or was checked before."""
    module, at = hit.module, core(hit.operand, hit.module)
    if number(hit.operand, module) is not None or constant(hit):
        return True
    for part in made_of(at, module, limit=150):
        if isinstance(part, ast.Call):
            last = called_last(part, module)
            if (last in _INSIDE and part in ast.walk(at)) or last in ("clamp", "clip", "clamp_", "linspace", "arange"):
                return True
            if module.called(part).partition(".")[0] in ("numpy", "math") or last in ("rand", "rand_like", "uniform_"):
                return True
    parts = division(at, module)
    if parts is not None and isinstance(core(parts[1], module), ast.BinOp) and guarded(parts[1], module):
        return True  # a quotient by a length with an eps added stays below 1
    if isinstance(at, ast.Subscript) and boolean(at.slice, module):
        return True
    return asked(hit) or squared(at, module)


def _cosine(hit: Hit) -> bool:
    """A quotient by a length: 1 for what is parallel, or a little more."""
    at = core(hit.operand, hit.module)
    parts = division(at, hit.module)
    alike = isinstance(at, ast.Call) and called_last(at, hit.module) == "cosine_similarity"
    return alike or (parts is not None and "norm" in hit.module.source(parts[1]))


def _elsewhere(hit: Hit) -> bool:
    """Neither a cosine made here, nor in a loss or in what a network learns."""
    module, klass = hit.module, hit.module.klass(hit.node)
    network = klass is not None and is_network(klass, module) and learned(hit.operand, module)
    half = isinstance(hit.node, ast.Call) and "sin" in called_last(hit.node, module)  # of half a chord, as a rule
    return half or not (in_loss(hit) or network or (_cosine(hit) and klass is not None))


def _message(hit: Hit) -> str:
    name = called_last(hit.node, hit.module).rstrip("_") if isinstance(hit.node, ast.Call) else ""
    if hit.why == _CLAMPED:
        return f"{name} has an infinite slope at 1 and -1, and this clamp lets both through"
    return f"{name} is NaN when {hit.said('its operand')} has rounded past 1 or -1"


def _fix(hit: Hit) -> tuple[Change, ...]:
    text = hit.module.source(hit.operand)
    if isinstance(hit.operand, ast.BinOp | ast.UnaryOp | ast.IfExp | ast.Compare):
        text = f"({text})"
    return (hit.module.replace(hit.operand, f"{text}.clamp(-1 + 1e-6, 1 - 1e-6)"),) if hit.why != _CLAMPED else ()


RULE = Rule(
    code="NP211",
    name="acos-domain",
    what="""
Finds `torch.acos`, `torch.asin` and `torch.atanh` of something that nothing keeps inside [-1, 1] (and `torch.acosh` of
something that nothing keeps above 1), in a loss or a
forward pass; and, in a loss, of something that is clamped to exactly [-1, 1].
""",
    why="""
A cosine computed in floating point is not always at most 1. Of 10,000 random unit vectors in float32, the product with
themselves is above 1 for about 19 %; acos(1.0000001) is NaN.

The slope of acos is -1 / √(1 - x²), infinite at ±1. `x.clamp(-1, 1)` fixes the value, but its gradient passes at
exactly 1, so two equal directions still have an infinite slope, and NaN one step further back. `1 - 1e-8` is 1 in
float32: an eps has to be at least 6e-8. `atan2(sin, cos)` has no such place.
""",
    bad="""
def angle_loss(a, b):
    cosine = (a * b).sum(dim=-1)
    return torch.acos(cosine).mean()
""",
    good="""
def angle_loss(a, b):
    cosine = (a * b).sum(dim=-1)
    return torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6)).mean()


def angle_loss_by_atan2(a, b):
    return torch.atan2(torch.linalg.cross(a, b).norm(dim=-1), (a * b).sum(dim=-1)).mean()
""",
    miss="""
class Head(nn.Module):
    def forward(self, cosine):
        return cosine.clamp(-1, 1).acos()  # outside a loss a clamp to exactly 1 is taken for meant
""",
    false_alarm="""
The operand is data that lies inside for certain, or nothing learned is behind it.
""",
    fix="unsafe",
    fix_note="It clamps to ±(1 - 1e-6): angles below 0.0014 radians become 0.0014, with a gradient of 0.",
    match=Match(_find, (ast.Call,), _INVERSE).of(_outside),
    where=not_aside,
    unless=(reported, lambda h: isinstance(h.operand, ast.Attribute) and h.operand.attr == "data"),
    doubt=(_elsewhere,),
    message=_message,
    help="clamp a little inside: torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6)), or use atan2",
    edit=_fix,
    about=lambda h: h.node,
)

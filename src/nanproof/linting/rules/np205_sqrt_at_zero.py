"""NP205: the slope of a square root at zero is infinite, and infinity times zero is NaN."""

from __future__ import annotations

import ast
import re

from ..gradients import enclosing
from ..guards import checked, small_constant
from ..matching import Hit, constant, guarded, in_loss, power, reported, training
from ..names import called_last, key_of
from ..rule import Change, Rule
from ..values import core, made_of, names_of, nodes_of, number, operation, short
from ..vanishing import is_constant, squared, to_itself, vanishes

# Coordinates, sizes of boxes and spectra of the input: nothing is learned before them.
_INPUT = re.compile(
    r"(^|_)(pos|position|coords?|xyz|points?|centers?\d?|corners?|box\w*|rois?|lwh|wh|d[xyz][at]?|src|line|"
    r"real_part|imag_part|re|im|wavs?\w*|audio|waveform|pos_diff)(_|$|\d)",
    re.I,
)
_WEIGHT = re.compile(r"weight|kernel|^w$|lengths?|lens|channel", re.I)
# Noise schedules are differences such as 1 - alpha; grids and windows are constants.
_SCHEDULE = re.compile(
    r"(^|_)(alphas?|betas?|sigmas?|sigs?|gammas?|snr|cumprod|prod|timesteps?|steps?(_t)?|t|t\d|s|tau|noise\w*|decay|rho|eta|a_?bar|ab|"
    r"at?|bias_correction\d?|beta\d)(_|$|\d)",
    re.I,
)
_FLAT = re.compile(r"sobel|scharr|prewitt|gradient|edge(?!_(index|attr|weight|type|vec))", re.I)
"""Filters that give exactly 0 wherever an image is flat."""
_TARGETS = re.compile(r"(^|_)(gt|target\w*|teacher\w*|label\w*|true|ref\w*|prior\w*)(_|$|\d)", re.I)


def _below(hit: Hit) -> bool:
    """Whether the root, or the root with an eps behind it, divides something: it is expected to be small."""
    module = hit.module
    found = operation(hit.node, module)
    if found is not None and (found.name.startswith("rsqrt") or (number(found.given(place=0), module) or 0) < 0):
        return True
    node: ast.AST = hit.node
    above = module.parent(node)
    while (isinstance(above, ast.BinOp) and isinstance(above.op, ast.Add)) or isinstance(above, ast.Attribute):
        node, above = above, module.parent(above)
    if isinstance(above, ast.Call) and called_last(above, module) in ("clamp", "add", "unsqueeze", "expand_as"):
        return True
    if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Div) and above.right is node:
        return True
    if not isinstance(above, ast.Assign) or not key_of(above.targets[0]):
        return False
    uses = module.uses(key_of(above.targets[0]), module.function(node))
    return any(_divides(use, hit) for use in uses)


def _divides(use: ast.AST, hit: Hit) -> bool:
    for above in hit.module.parents(use):
        if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Div):
            return any(n is use for n in ast.walk(above.right))
        if not isinstance(above, ast.BinOp | ast.Call | ast.Attribute | ast.Subscript):
            return False
    return False


def _differs(hit: Hit) -> bool:
    """Whether equal things are compared: a distance is 0 where they are, and so is 1 - cos² at an angle of 0."""
    if any(word in hit.why for word in ("difference", "clamped", "variance", "weighted")):
        return True
    if isinstance(core(hit.operand, hit.module), ast.BinOp):
        return True  # a magnitude, real² + imag², is 0 in silence
    parts = made_of(hit.operand, hit.module, limit=60)
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) for n in parts)


def _known(hit: Hit) -> bool:
    """Schedules, coordinates and weights by their names, and what was tested before."""
    module, operand, square = hit.module, hit.operand, "square" in hit.why
    names = {n.rpartition(".")[2] for n in names_of(operand, module) if not n.startswith("self")}
    if not square and names and all(_SCHEDULE.search(n) for n in names):
        return True
    parts = [operand, core(operand, module)]
    near = {key_of(n).rpartition(".")[2] for e in parts for n in nodes_of(e, indices=False)} - {"", "self"}
    near = {n for n in near if n not in module.aliases and n not in hit.keys} or near
    known = (_INPUT, _WEIGHT) if square else (_INPUT, _WEIGHT, _SCHEDULE)
    if near and all(any(k.search(n) for k in known) for n in near) and not in_loss(hit):
        return True
    keys = hit.keys | {key_of(n) for n in ast.walk(operand)} - {""}
    return checked(keys, hit.node, module)


def _unlikely(hit: Hit) -> bool:
    """Nothing in sight says that zero comes: no activation, no pair with itself, no eps, no difference in a loss."""
    module = hit.module
    nodes = list(made_of(hit.operand, module, limit=80, indices=False))
    names = {key_of(n).rpartition(".")[2] for n in nodes} - {"", "self", *module.aliases}
    if names and all(_TARGETS.search(n) for n in names):
        return True  # nothing is learned there
    differences = [n for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub)]
    if any(to_itself(d) for d in differences) or _rectified(hit) or _of_filters(hit):
        return False  # of all pairs, each has the distance 0 from itself
    reduced = operation(core(hit.operand, module), module)
    name = reduced.name if reduced is not None else ""
    along = reduced is not None and name in ("sum", "mean") and (reduced.args or reduced.given("dim", "axis"))
    if not in_loss(hit):
        return not (along and _expected(hit))
    if _expected(hit) or hit.why == "a square" or any(w in hit.why for w in ("clamped", "variance", "weighted")):
        return False
    if name == "add":  # distances, and what filters make of a flat image
        return not (differences or any(isinstance(n, ast.Call) and module.operation(n) is None for n in nodes))
    return not (along and (differences or _below(hit)))


def _of_filters(hit: Hit) -> bool:
    """The magnitude of an image's slopes."""
    functions = [f.name for f in enclosing(hit.node, hit.module)]
    klass = hit.module.klass(hit.node)
    return any(_FLAT.search(n) for n in [*functions, *([klass.name] if klass is not None else [])])


def _rectified(hit: Hit) -> bool:
    """What an activation gives out may be zero everywhere."""
    calls = [p for p in made_of(hit.operand, hit.module, limit=80) if isinstance(p, ast.Call)]
    return any(re.search(r"relu|activation|^act", called_last(c, hit.module), re.I) for c in calls)


def _expected(hit: Hit) -> bool:
    """An eps outside the root, ``sqrt(s) + eps``: zero was thought of; and 1 - x², which is 0 where x is 1."""
    module, at = hit.module, core(hit.operand, hit.module)
    if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Sub) and number(at.left, module) == 1:
        return squared(at.right, module) and in_loss(hit)
    node: ast.AST = hit.node
    above = module.parent(node)
    if isinstance(above, ast.Assign) and key_of(above.targets[0]):
        uses = module.uses(key_of(above.targets[0]), module.function(node))
        return any(_raised(module.parent(u), u, hit) for u in uses)
    return _raised(above, node, hit)


def _raised(above: ast.AST | None, node: ast.AST, hit: Hit) -> bool:
    if not isinstance(above, ast.BinOp) or not isinstance(above.op, ast.Add):
        return False
    return small_constant(above.right if above.left is node else above.left, hit.module)


def _fix(hit: Hit) -> tuple[Change, ...]:
    module, operand = hit.module, hit.operand
    if isinstance(operand, ast.Call) and called_last(operand, module) in ("clamp", "clip", "clamp_min"):
        low = [k.value for k in operand.keywords if k.arg == "min"] or operand.args[-1:]
        zero = [n for n in low if number(n, module) == 0]
        return (module.replace(zero[0], "1e-12"),) if zero else ()
    return (module.replace(operand, f"{module.source(operand)} + 1e-12"),) if short(operand, module) else ()


RULE = Rule(
    code="NP205",
    name="sqrt-at-zero",
    what="""
Finds, in a loss or a forward pass, the square root of something that can be exactly zero: a square, a sum or mean of
squares, a variance, a difference, or a value clamped to zero. Powers of 0.5 count as roots. Outside a loss it is an
info, except behind an activation, with an eps outside the root, and for distances of things from themselves.
""",
    why="""
The derivative of √x is 1 / (2√x): infinite at 0. The chain rule multiplies it with the derivative of what is inside,
and for a square that is 0 at the same place: ∞ · 0 is NaN. So the distance between two equal points,
`((a - b) ** 2).sum().sqrt()`, is a harmless 0 whose gradient is NaN. With
`torch.sqrt(d.clamp(min=0))` as the distances among 64 random points of 16 dimensions, all 1024 gradients are NaN,
because each point has the distance 0 from itself.

What does not help: an eps outside the root, `torch.sqrt(s) + 1e-8`, because the slope inside stays infinite; and
`clamp(min=0)`, because its gradient passes at exactly 0. What helps: an eps under the root. With 1e-12 the slope is at
most 5e5; in float16, 1e-12 is 0, so compute the root in float32 or use a larger eps. `x.norm()` and `torch.cdist` have
a gradient of 0 at 0, and `ops.safe_norm` too.
""",
    bad="""
def distance_loss(a, b):
    return torch.sqrt(((a - b) ** 2).sum(dim=-1)).mean()
""",
    good="""
def distance_loss(a, b):
    return ops.safe_norm(a - b, dim=-1).mean()


def distance_loss_with_eps(a, b):
    return torch.sqrt(((a - b) ** 2).sum(dim=-1) + 1e-12).mean()
""",
    miss="""
def centerness_loss(left, right):
    return torch.sqrt(left.amin(-1) / left.amax(-1) * right.amin(-1) / right.amax(-1)).mean()
""",
    false_alarm="""
Nothing learned is under the root, or the value cannot be zero. Noise schedules, grids, random numbers and detached
tensors are left alone where they can be recognized.
""",
    fix="unsafe",
    fix_note="It adds `1e-12` under the root, or raises the bound of the clamp to it: a root of 0 becomes 1e-6.",
    words=("sqrt", ".5", "1/2", "1 / 2"),
    match=power(lambda e: abs(e) == 0.5, "sqrt", "sqrt_", "rsqrt", "rsqrt_").of(
        lambda h: vanishes(h.operand, h.module)
    ),
    where=training,
    unless=(
        guarded,
        reported,
        _known,
        lambda h: is_constant(h.operand, h.module),
        constant,
        lambda h: not (in_loss(h) or _below(h) or _differs(h) or _of_filters(h)),
    ),
    doubt=(_unlikely,),
    message=lambda h: f"the square root of {h.why} has an infinite slope at zero, so its gradient there is NaN",
    help="add an eps under the root: torch.sqrt(x + 1e-12); an eps outside it, or clamp(min=0), does not help",
    edit=_fix,
    about=lambda h: h.node,
)

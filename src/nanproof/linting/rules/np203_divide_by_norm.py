"""NP203: a vector divided by its norm is 0 / 0 when the vector is zero."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import gradients
from ..flow import has_argument
from ..matching import Hit, Match, asked_about_parts, constant, guarded, outside_loss, quotient, reported, training
from ..names import called_last, key_of
from ..numerics import boolean, named_mask
from ..rule import Change, Rule
from ..values import core, cores, made_of, number, operation, scalar
from ..vanishing import squared, to_itself

if TYPE_CHECKING:
    from ..source import Module

_NORMS = {"norm", "vector_norm", "matrix_norm"}
# Directions of rays, axes and random projections are long by construction; optimizers rescale updates.
_LONG = re.compile(
    r"ray|(^|_)(dirs?|directions?|axis|axes|up|light|camera|cam|view\w*|grad\w*|update|noise|gaussian|proj\w*|basis|"
    r"eps|step|delta_w|right|forward|normals?|router\w*|top)(_|$|\d)",
    re.I,
)
_ZEROS = {"relu", "relu_", "dropout", "masked_fill", "masked_fill_", "clamp", "embedding", "scatter_add", "grad"}
_DIRECTIONS = {"eigh", "eig", "svd", "qr", "svd_lowrank"}
_RANDOM = {"randn", "rand", "randn_like", "rand_like", "normal", "linspace", "arange", "eye", "meshgrid", "hann_window"}


def _find(node: ast.AST, module: Module) -> Iterator[Hit]:
    """A division by a norm, or by a product of norms; the operand is the vector."""
    for hit in quotient().find(node, module):
        for factor in _factors(hit.operand, module):
            for at in cores(factor, module):
                if (vector := _normed(at, module)) is not None:
                    yield Hit(node, vector, module, over=hit.over, within=factor)
                    break


def _factors(node: ast.expr, module: Module, depth: int = 0) -> list[ast.expr]:
    """The factors of a divisor: ``a.norm() * b.norm()`` has two."""
    at = core(node, module)
    if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Mult) and depth < 8:
        return [*_factors(at.left, module, depth + 1), *_factors(at.right, module, depth + 1)]
    return [node]


def _normed(at: ast.expr, module: Module) -> ast.expr | None:
    """What a norm is of: ``x.norm(dim=1)``, ``torch.linalg.norm(x)``, ``(x ** 2).sum().sqrt()``."""
    found = operation(at, module)
    if found is None or found.operand is None:
        return None
    if found.name in _NORMS:
        return found.operand
    if found.name == "sqrt" or (found.name == "pow" and number(found.given(place=0), module) == 0.5):
        inner = operation(core(found.operand, module), module)
        if inner and inner.name == "sum" and inner.operand is not None and squared(inner.operand, module):
            return inner.operand
    return None


def _long(hit: Hit) -> bool:
    """Whether the vector is never short: by its name, drawn at random, a weight, or what a layer gives out."""
    module, at = hit.module, core(hit.operand, hit.module)
    if any(_LONG.search(key.rpartition(".")[2]) or key.startswith("self.") for key in hit.keys):
        return True
    made = {called_last(p, module) for p in made_of(at, module, limit=60) if isinstance(p, ast.Call)}
    return key_of(at).startswith("self.") or bool(made & _RANDOM)


def _capped(hit: Hit) -> bool:
    """``minimum(1, c / norm)``, ``(c / norm).clamp(max=1)``: a number over zero is infinite, and cut off."""
    node, module = hit.node, hit.module
    if not isinstance(node, ast.BinOp) or not scalar(node.left, module):
        return False
    above = module.parent(node)
    above = module.parent(above) if isinstance(above, ast.Attribute) else above
    if not isinstance(above, ast.Call):
        return False
    last = called_last(above, module).rstrip("_")
    given = len(above.args) > 1 or any(k.arg == "max" for k in above.keywords)
    return last in ("minimum", "clamp_max") or (last in ("min", "clamp", "clip") and given)


def _vanishing(hit: Hit) -> bool:
    """Whether something in sight makes whole vectors zero: a ReLU, a mask, dropout, a gradient, x[:, None] - x."""
    module = hit.module
    for at in cores(hit.operand, module):
        found = operation(at, module)
        if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Sub):
            return to_itself(at)
        if found is not None and found.name in ("mul", "multiply") and found.args:
            sides = [s for s in (found.operand, found.args[0]) if s is not None]
            if any(boolean(s, module) or named_mask(key_of(s).rpartition(".")[2]) for s in sides):
                return True
        if isinstance(at, ast.Call) and called_last(at, module) in _ZEROS:
            return True
        if isinstance(at, ast.Attribute) and at.attr == "grad":
            return True
    return False


def _doubtful(hit: Hit) -> bool:
    """A direction of something that does not vanish in sight, or of nothing learned."""
    ratio = hit.over is not None and hit.module.source(hit.operand) not in hit.module.source(hit.over)
    if ratio and not outside_loss(hit):
        return False  # an error over the norm of the target
    return not (_vanishing(hit) and (gradients.learned(hit.operand, hit.module) or not outside_loss(hit)))


def _chosen(hit: Hit) -> bool:
    """``x[mask]`` was selected by somebody who knew; the argument of a lambda comes from where nobody can look."""
    module, at = hit.module, core(hit.operand, hit.module)
    if isinstance(at, ast.Subscript) and boolean(at.slice, module):
        return True
    if isinstance(at, ast.Subscript) and key_of(at.value):
        made = [getattr(b.owner, "value", None) for b in module.flow.bindings(module.function(at), key_of(at.value))]
        if any(isinstance(m, ast.Call) and called_last(m, module) in _DIRECTIONS for m in made):
            return True
    names = [n for n in ast.walk(hit.operand) if isinstance(n, ast.Name)]
    lambdas = [p for p in module.parents(hit.operand) if isinstance(p, ast.Lambda)]
    return any(has_argument(scope, n.id) for scope in lambdas for n in names)


def _fix(hit: Hit) -> tuple[Change, ...]:
    """``x / x.norm(dim=d, keepdim=True)`` becomes ``F.normalize(x, dim=d)``; elsewhere the norm gets a floor."""
    module, factor, text = hit.module, hit.outer, hit.module.source(hit.operand)
    found = module.operation(factor)
    if (
        isinstance(hit.node, ast.BinOp)
        and found is not None
        and hit.over is not None
        and module.source(hit.over) == text
    ):
        dim, keeps, order = found.given("dim"), found.given("keepdim"), found.given("p", "ord", place=0)
        kept = isinstance(keeps, ast.Constant) and keeps.value is True and len(found.args) < 2
        if dim is not None and kept and (order is None or number(order, module) == 2):
            name, needed = module.spell("torch.nn.functional.normalize")
            return (module.replace(hit.node, f"{name}({text}, dim={module.source(dim)})"), *needed)
    floor = isinstance(factor, ast.Call | ast.Name)
    return (module.replace(factor, f"{module.source(factor)}.clamp(min=1e-6)"),) if floor else ()


RULE = Rule(
    code="NP203",
    name="divide-by-norm",
    what="""
Finds a vector that is divided by its norm, `x / x.norm(dim=-1, keepdim=True)`, when nothing keeps the norm from zero
and something in sight makes vectors zero (a ReLU, a mask, dropout, all differences within one set). Without that, it is
an info.
""",
    why="""
A zero vector has the norm 0, and 0 / 0 is NaN, in the value and in the gradient. Zero vectors are made by ReLU, by
dropout, by padding, by masked pooling, by an embedding row for padding, by the difference of equal points, and by
underflow: in float16 the square of anything below 1.7e-4 is 0.

An eps added to the norm keeps the value finite, but the slope at zero is 1 / eps: with `+ 1e-8` it is 1e8 in float32,
and in float16 `1e-8` itself is 0. `F.normalize` divides by max(norm, 1e-12); in half precision give it a larger eps.
`ops.normalize` gives the zero vector 0 with a gradient of 0.
""",
    bad="""
class ContrastiveLoss(nn.Module):
    def forward(self, a, b):
        a = torch.relu(a)
        a = a / a.norm(dim=-1, keepdim=True)
        return a @ b.t()
""",
    good="""
class ContrastiveLoss(nn.Module):
    def forward(self, a, b):
        return F.normalize(torch.relu(a), dim=-1) @ b.t()
""",
    miss="""
class Contrastive(nn.Module):
    def length(self, a):
        return a.norm(dim=-1, keepdim=True)

    def forward(self, a, b):
        return a / self.length(a) @ b.t()  # the norm is in another function
""",
    false_alarm="""
The vector cannot be zero, such as a unit vector plus noise. Directions of rays, random projections and weights are left
alone; what a layer or an encoder gives out is an info.
""",
    fix="unsafe",
    fix_note="""
`x / x.norm(dim=d, keepdim=True)` becomes `F.normalize(x, dim=d)`; any other norm gets a floor of 1e-6. Vectors shorter
than that are no longer brought to length 1.
""",
    default=False,
    words=("norm", "sqrt", "0.5"),
    match=Match(_find, (ast.Div,)),
    where=training,
    unless=(guarded, reported, _capped, asked_about_parts, constant, _chosen, _long),
    doubt=(_doubtful,),
    message=lambda h: f"a division by the norm of {h.said('a vector')} is NaN when the vector is zero",
    help="use torch.nn.functional.normalize, or keep the norm away from zero with .clamp(min=1e-6)",
    edit=_fix,
    about=lambda h: core(h.outer, h.module),
)

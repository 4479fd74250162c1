"""NP203: a vector divided by its norm is 0 / 0 when the vector is zero."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import has_argument, key_of
from ..gradients import constant
from ..guards import checked, guarded
from ..numerics import QUOTIENTS, boolean, division, named_mask
from ..purpose import in_loss, is_network, only_logged, trains
from ..rule import Change, Found, Rule
from ..values import called_last, core, cores, made_of, number, operation, scalar, short, trail
from ..vanishing import squared

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


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    parts = division(node, module)
    if parts is None:
        return
    numerator, denominator = parts
    for factor in _factors(denominator, module):
        vector = _vector(factor, module)
        if vector is None or not trains(node, module) or _safe(node, factor, vector, module):
            continue
        if not in_loss(node, module) and not _may_vanish(vector, module):
            continue
        said = short(vector, module) or "a vector"
        yield Found(
            node=node,
            message=f"a division by the norm of {said} is NaN when the vector is zero",
            help="use torch.nn.functional.normalize, or keep the norm away from zero with .clamp(min=1e-6)",
            edits=_fix(node, numerator, factor, vector, module),
            about=core(factor, module),
        )
        return


def _factors(node: ast.expr, module: Module, depth: int = 0) -> list[ast.expr]:
    """The factors of a divisor: ``a.norm() * b.norm()`` has two."""
    at = core(node, module)
    if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Mult) and depth < 8:
        return [*_factors(at.left, module, depth + 1), *_factors(at.right, module, depth + 1)]
    return [node]


def _vector(node: ast.expr, module: Module) -> ast.expr | None:
    """What the norm is of, if this is one: ``x.norm(dim=1)``, ``torch.linalg.norm(x)``, ``(x ** 2).sum().sqrt()``."""
    return next((v for at in cores(node, module) if (v := _normed(at, module)) is not None), None)


def _normed(at: ast.expr, module: Module) -> ast.expr | None:
    found = operation(at, module)
    if found is None or found.operand is None:
        return None
    name, first, rest = found.name, found.operand, found.args
    if name in _NORMS:
        return first
    if name == "sqrt" or (name == "pow" and rest and number(rest[0], module) == 0.5):
        inner = operation(core(first, module), module)
        if inner and inner.name == "sum" and inner.operand is not None and squared(inner.operand, module):
            return inner.operand
    return None


def _safe(node: ast.AST, factor: ast.expr, vector: ast.expr, module: Module) -> bool:
    if guarded(factor, module) or only_logged(node, module) or _capped(node, module):
        return True
    keys = {key_of(t) for e in (factor, vector) for t in trail(e, module)} - {""}
    asked = keys | {key_of(n) for e in (factor, vector, core(factor, module)) for n in ast.walk(e)} - {""}
    if checked(asked, node, module) or constant(vector, module) or _chosen(vector, module):
        return True
    if any(_LONG.search(key.rpartition(".")[2]) for key in keys):
        return True
    if _dense(vector, module):
        return True
    held = core(vector, module)
    made = {called_last(p, module) for p in made_of(held, module, limit=60) if isinstance(p, ast.Call)}
    return bool(made & _RANDOM)


def _capped(node: ast.AST, module: Module) -> bool:
    """``minimum(1, c / norm)``, ``(c / norm).clamp(max=1)``: a number over zero is infinite, and cut off."""
    if not isinstance(node, ast.BinOp) or not (scalar(node.left, module) or number(node.left, module)):
        return False
    above = module.parent(node)
    above = module.parent(above) if isinstance(above, ast.Attribute) else above
    if not isinstance(above, ast.Call):
        return False
    last = called_last(above, module).rstrip("_")
    given = len(above.args) > 1 or any(k.arg == "max" for k in above.keywords)
    return last in ("minimum", "clamp_max") or (last in ("min", "clamp", "clip") and given)


def _may_vanish(vector: ast.expr, module: Module) -> bool:
    """Whether something in sight makes whole vectors zero: a difference, a ReLU, a mask, dropout, a gradient."""
    for at in cores(vector, module):
        found = operation(at, module)
        if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Sub):
            return True
        if found is not None and found.name in ("mul", "multiply") and found.args:
            sides = [s for s in (found.operand, found.args[0]) if s is not None]
            if any(boolean(s, module) or named_mask(key_of(s).rpartition(".")[2]) for s in sides):
                return True
        if isinstance(at, ast.Call) and called_last(at, module) in _ZEROS:
            return True
        if isinstance(at, ast.Attribute) and at.attr == "grad":
            return True
        klass = module.klass(at)
        if isinstance(at, ast.Name) and has_argument(module.function(at), at.id) and klass is not None:
            return is_network(klass, module)  # handed in: nobody here knows what it is
    return False


def _chosen(vector: ast.expr, module: Module) -> bool:
    """``x[mask]`` was selected by somebody who knew; the argument of a lambda comes from where nobody can look."""
    at = core(vector, module)
    if isinstance(at, ast.Subscript) and boolean(at.slice, module):
        return True
    if isinstance(at, ast.Subscript) and key_of(at.value):
        made = [getattr(b.owner, "value", None) for b in module.flow.bindings(module.function(at), key_of(at.value))]
        if any(isinstance(m, ast.Call) and called_last(m, module) in _DIRECTIONS for m in made):
            return True
    names = [n for n in ast.walk(vector) if isinstance(n, ast.Name)]
    lambdas = [p for p in module.parents(vector) if isinstance(p, ast.Lambda)]
    return any(has_argument(scope, n.id) for scope in lambdas for n in names)


def _dense(vector: ast.expr, module: Module) -> bool:
    """What a layer or an encoder gives out, and what is a weight itself, is never exactly zero."""
    if any(key_of(t).startswith("self.") for t in trail(vector, module)):
        return True
    at = core(vector, module)
    for _ in range(12):
        if isinstance(at, ast.Attribute | ast.Subscript) and not key_of(at):
            at = core(at.value, module)
    if key_of(at).startswith("self."):
        return True
    return isinstance(at, ast.Call) and not module.operation(at) and not module.called(at)


def _fix(node: ast.AST, numerator: ast.expr, factor: ast.expr, vector: ast.expr, module: Module) -> tuple[Change, ...]:
    """``x / x.norm(dim=d, keepdim=True)`` becomes ``F.normalize(x, dim=d)``; elsewhere the norm gets a floor."""
    text = module.source(vector)
    if isinstance(node, ast.BinOp) and isinstance(factor, ast.Call) and module.source(numerator) == text:
        found = module.operation(factor)
        dims = _dims(found.args, found.keywords, module) if found else None
        if dims is not None:
            name, needed = module.spell("torch.nn.functional.normalize")
            return (module.replace(node, f"{name}({text}, dim={dims})"), *needed)
    if isinstance(factor, ast.Call | ast.Name):
        return (module.replace(factor, f"{module.source(factor)}.clamp(min=1e-6)"),)
    return ()


def _dims(rest: list[ast.expr], keywords: dict[str, ast.expr], module: Module) -> str | None:
    """The dimension of an L2 norm that keeps it; None for any other norm."""
    keeps = keywords.get("keepdim")
    order = keywords.get("p", keywords.get("ord", rest[0] if rest else None))
    dim = keywords.get("dim")
    if dim is None or len(rest) > 1 or not (isinstance(keeps, ast.Constant) and keeps.value is True):
        return None
    if order is not None and number(order, module) != 2:
        return None
    return module.source(dim)


RULE = Rule(
    code="NP203",
    name="divide-by-norm",
    what="""
Finds a vector that is divided by its norm, `x / x.norm(dim=-1, keepdim=True)`, when nothing keeps the norm from
zero: in a loss, and elsewhere where something in sight makes vectors zero (a difference, a ReLU, a mask, dropout).
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
        a = a / a.norm(dim=-1, keepdim=True)
        return a @ b.t()
""",
    good="""
class Contrastive(nn.Module):
    def forward(self, a, b):
        return F.normalize(a, dim=-1) @ b.t()
""",
    miss="""
class Contrastive(nn.Module):
    def length(self, a):
        return a.norm(dim=-1, keepdim=True)

    def forward(self, a, b):
        return a / self.length(a) @ b.t()  # the norm is in another function
""",
    false_alarm="""
The vector cannot be zero, such as a unit vector plus noise. What a layer or an encoder gives out, directions of rays,
random projections and weights are left alone.
""",
    fix="unsafe",
    fix_note="""
`x / x.norm(dim=d, keepdim=True)` becomes `F.normalize(x, dim=d)`; any other norm gets a floor of 1e-6. Vectors shorter
than that are no longer brought to length 1.
""",
    nodes=(ast.BinOp, ast.AugAssign, ast.Call),
    calls=QUOTIENTS,
    words=("norm", "sqrt", "0.5"),
    check=check,
)

"""What can be exactly zero: squares and their sums, variances, differences; and what no training goes through."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from .guards import lower_bound, small_constant
from .names import called_last, key_of
from .values import SAME, core, cores, made_of, number, operation, scalar, unpacked

if TYPE_CHECKING:
    from .source import Module

_CONSTANT = {"arange", "linspace", "meshgrid", "randn", "rand", "randint", "ones", "full", "hann_window", "eigh",
             "eigvalsh", "svd", "tensor", "as_tensor", "fftfreq", "logspace", "rand_like", "randn_like"}  # fmt: skip


_PRODUCTS = {"matmul", "mm", "bmm", "einsum"}


def squared(node: ast.expr, module: Module, depth: int = 0) -> bool:
    """Whether an expression is a square, so that it reaches zero with a slope of zero."""
    at = core(node, module)
    found = operation(at, module)
    if found is None or depth > 8:
        return False
    name, first, rest, _ = found
    if name in ("square", "square_"):
        return True
    if name == "pow" and rest:
        return number(rest[0], module) in (2.0, 4.0) and not _shifted_off_zero(first, module)
    if name in ("mul", "multiply") and first is not None and rest:
        same = ast.dump(first) == ast.dump(rest[0]) and not scalar(first, module)
        return same or squared(first, module, depth + 1) or squared(rest[0], module, depth + 1)
    if name == "div" and first is not None and rest:
        return squared(first, module, depth + 1)
    return False


def _shifted_off_zero(base: ast.expr | None, module: Module) -> bool:
    """``(x + eps) ** 2``: what is 0 by symmetry is not 0 here."""
    at = core(base, module) if base is not None else None
    if not (isinstance(at, ast.BinOp) and isinstance(at.op, ast.Add)):
        return False
    return any(small_constant(s, module) and (number(s, module) or 0.0) < 0.1 for s in (at.left, at.right))


def vanishes(node: ast.expr, module: Module, depth: int = 0) -> str:
    """Why an operand can be exactly zero, in words, or ""."""
    return next((why for at in cores(node, module) if (why := _vanishes(at, module, depth))), "")


def _vanishes(at: ast.expr, module: Module, depth: int) -> str:
    if isinstance(at, ast.Call) and _is_mse(at, module):
        return "a mean of squares"
    found = operation(at, module)
    if found is None or found.operand is None or depth > 6:
        return ""
    name, first, rest = found.name, found.operand, found.args
    if squared(at, module):
        return "a square"
    if name in ("sum", "mean", "nansum", "nanmean") and squared(first, module):
        return f"a {'mean' if 'mean' in name else 'sum'} of squares"
    if name == "var":
        return "a variance"
    if isinstance(at, ast.Call) and called_last(at, module) in ("clamp", "clip", "clamp_min", "clamp_"):
        return "a value clamped to zero" if lower_bound(at, module) == 0 else ""
    if name in ("add", "mul", "div", "sub") and rest:
        return _vanishing_pair(name, first, rest[0], module, depth + 1)
    if (
        name in ("matmul", "mm", "bmm", "conv1d", "conv2d")
        and rest
        and any(squared(e, module) or _adds_squares(e, module) for e in (first, rest[0]))
    ):
        return "a weighted sum of squares"
    if name in ("sum", "mean"):
        return vanishes(first, module, depth + 1)
    return ""


def _is_mse(call: ast.Call, module: Module) -> bool:
    """``F.mse_loss(…)``, and a call of an ``nn.MSELoss`` kept in a name or in self."""
    layer = call.func if isinstance(call.func, ast.Call) else module.value(call.func)
    made = module.called(layer) if isinstance(layer, ast.Call) else ""
    return module.called(call) == "torch.nn.functional.mse_loss" or made == "torch.nn.MSELoss"


def _vanishing_pair(name: str, left: ast.expr, right: ast.expr, module: Module, depth: int) -> str:
    if name == "add":
        if any(_minus_product(e, module) for e in (left, right)):
            return "a difference"  # x² + y² - 2xy: rounding brings it below zero
        if not (vanishes(left, module, depth) and vanishes(right, module, depth)) or _scaled(left, right, module):
            return ""
        return "a sum of squares"
    if name == "div":
        return vanishes(left, module, depth)
    if name == "mul":
        return vanishes(left, module, depth) or vanishes(right, module, depth)
    if scalar(left, module) and scalar(right, module):
        return ""
    return "a difference"


def _adds_squares(node: ast.expr, module: Module) -> bool:
    found = operation(core(node, module), module)
    return found is not None and found.name == "sum" and found.operand is not None and squared(found.operand, module)


def _minus_product(node: ast.expr, module: Module) -> bool:
    """``-2 * x @ y.T``, ``einsum(…) * -2``: what is taken off in a squared distance."""
    found = operation(core(node, module), module)
    if found is None or found.name not in ("mul", "multiply") or found.operand is None or not found.args:
        return False
    for factor, other in ((found.operand, found.args[0]), (found.args[0], found.operand)):
        at = core(other, module)
        product = isinstance(at, ast.BinOp) and isinstance(at.op, ast.MatMult)
        product = product or (isinstance(at, ast.Call) and called_last(at, module) in _PRODUCTS)
        if (number(factor, module) or 0) < 0 and product:
            return True
    return False


def to_itself(difference: ast.BinOp) -> bool:
    """``x[:, None] - x[None]``: all pairs, each with itself among them."""
    sides = [{key_of(n) for n in ast.walk(s)} - {""} for s in (difference.left, difference.right)]
    return bool(sides[0]) and sides[0] == sides[1]


def _scaled(left: ast.expr, right: ast.expr, module: Module) -> bool:
    """``(x - y) ** 2 + c ** 2``: beside a difference, the square of a given number is what keeps the root smooth."""
    bases = [found.operand if (found := operation(core(e, module), module)) else None for e in (left, right)]
    kinds = [type(core(b, module)) if b is not None else None for b in bases]
    given = any(
        isinstance(b, ast.Name | ast.Attribute) and isinstance(core(b, module), ast.Name | ast.Attribute)
        for b in bases
        if b is not None
    )
    return ast.BinOp in kinds and given


def is_constant(operand: ast.expr, module: Module) -> bool:
    """Whether nothing here is learned: made from sizes, drawn at random, detached, from NumPy.

    One such part is enough, as arguments beside it are mostly centres and widths; but not if a layer or an unknown
    function was applied to it.
    """
    plain = False
    for part in made_of(operand, module, limit=300, indices=False):
        if isinstance(part, ast.Call):
            name, last = module.called(part), called_last(part, module)
            if last in _CONSTANT or last == "detach" or name.partition(".")[0] in ("numpy", "math"):
                plain = True
            elif module.operation(part) is None and last not in SAME and name not in ("float", "int", "len", "max"):
                return False
        elif key_of(part):
            plain = plain or any(last in _CONSTANT for last in unpacked(part, module))
    return plain

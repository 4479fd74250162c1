"""What can be exactly zero: squares and their sums, variances, differences; and what no training goes through."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from .guards import small_constant
from .names import called_last, key_of, word_set
from .values import SAME, core, made_of, number, operation, scalar, unpacked

if TYPE_CHECKING:
    from .source import Module

_CONSTANT = word_set(
    """arange linspace meshgrid randn rand randint ones full hann_window eigh eigvalsh svd tensor as_tensor fftfreq
    logspace rand_like randn_like"""
)


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


def to_itself(difference: ast.BinOp) -> bool:
    """``x[:, None] - x[None]``: all pairs, each with itself among them."""
    sides = [{key_of(n) for n in ast.walk(s)} - {""} for s in (difference.left, difference.right)]
    return bool(sides[0]) and sides[0] == sides[1]


def is_constant(operand: ast.expr, module: Module) -> bool:
    """Whether nothing here is learned: made from sizes, drawn at random, detached, from NumPy.

    One such part is enough, as arguments beside it are mostly centres and widths; but not if a layer or an unknown
    function was applied to it.
    """
    plain = False
    for part in made_of(operand, module, limit=300, indices=False):
        if isinstance(part, ast.Call):
            name, last = module.called(part), called_last(part, module)
            if last in ("tensor", "as_tensor") and part.args and key_of(part.args[0]):
                continue  # what it is given says whether it is learned
            if last in _CONSTANT or last == "detach" or name.partition(".")[0] in ("numpy", "math"):
                plain = True
            elif module.operation(part) is None and last not in SAME and name not in ("float", "int", "len", "max"):
                return False
        elif key_of(part):
            plain = plain or any(last in _CONSTANT for last in unpacked(part, module))
    return plain

"""NP307: a small constant that is zero, or makes no difference, in the format in which it is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..names import called_last, word_set
from ..purpose import aside
from ..rule import Change, Found, Rule
from ..source import Module
from ..training import calls_in, in_tests, keyword
from ..values import number
from ..weights import dtype_of

_HALF_TINY = 2.0**-25
"""What is smaller than this is 0 in float16; 1 minus it is 1 in float32."""
_NEAR_ONE = word_set(
    """log1p logit atanh arctanh binary_cross_entropy erfinv icdf ndtri acos asin arccos arcsin BCELoss"""
)
_LIGHT = word_set(
    """pow matmul softmax sigmoid relu clamp amax transpose reshape sum mean norm abs square sqrt exp var std
    squeeze unsqueeze view"""
)


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module) or not module.uses_torch:
        return
    if "half" in module.text or "float16" in module.text:
        for sum_ in module.nodes(ast.BinOp):
            yield from _added(sum_, module)
    for call in module.calls("clamp", "clamp_", "clip", "clamp_min", "normalize"):
        yield from _clamped(call, module)


def _added(node: ast.BinOp, module: Module) -> Iterator[Found]:
    """``x.half() + 1e-8``."""
    if not isinstance(node.op, ast.Add):
        return
    for small, other in ((node.right, node.left), (node.left, node.right)):
        value = number(small, module)
        if value and 0 < value < _HALF_TINY and _is_half(module, other):
            yield Found(
                node=node,
                message=f"`{module.source(small)}` is 0 in float16, so `{module.source(node)}` adds nothing",
                help="compute this in float32, or use at least 6e-5 (torch.finfo(torch.float16).tiny)",
                edits=_fix(module, small, "1e-4"),
            )


def _clamped(node: ast.Call, module: Module) -> Iterator[Found]:
    found = module.operation(node)
    if found is None:
        return
    name, operand, rest, keywords = found
    if operand is None:
        return
    low = keywords.get("min") or (rest[0] if rest and name != "normalize" else None)
    if name == "normalize":
        eps = keywords.get("eps") or (rest[2] if len(rest) > 2 else None)
        size = number(eps, module) if eps is not None else 1e-12
        if size is not None and size < _HALF_TINY and _is_half(module, operand):
            yield Found(
                node=node,
                message=f"the eps of `{module.source(node)}` ({size:g}) is 0 in float16: a zero vector becomes NaN",
                help="normalize in float32, or give eps=1e-4",
            )
        return
    size = number(low, module) if low is not None else None
    if size is not None and 0 < size < _HALF_TINY and low is not None and _is_half(module, operand):
        yield Found(
            node=node,
            message=f"`{module.source(low)}` is 0 in float16, so this clamp lets 0 pass",
            help="clamp in float32, or use at least 6e-5 (torch.finfo(torch.float16).tiny)",
            edits=_fix(module, low, "1e-4"),
        )
    high = keywords.get("max") or (rest[1] if len(rest) > 1 else None)
    bound = number(high, module) if high is not None else None
    if (
        bound is not None
        and high is not None
        and 1 - _HALF_TINY < bound < 1
        and _needs_gap(module, node)
        and not aside(node, module)
    ):
        yield Found(
            node=node,
            message=f"`{module.source(high)}` is 1.0 in float32: the clamp lets 1 pass, where the rest breaks",
            help="use 1 - 1e-6 (the next float32 below 1 is 1 - 6e-8)",
            edits=_fix_high(module, high),
        )


def _needs_gap(module: Module, node: ast.Call) -> bool:
    """Whether the function goes on to something that is infinite, or steep, at 1; and not in float64."""
    scope = module.function(node)
    if "float64" in module.text or "double" in module.text:
        return False
    for call in calls_in(scope):
        name = called_last(call, module)
        if name in _NEAR_ONE:
            return True
        if name in ("log", "sqrt") and any(_one_minus(n) for n in ast.walk(call)):
            return True
    return False


def _one_minus(node: ast.AST) -> bool:
    """``1 - p``, but not ``1 - 1e-8``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub) or not _is_one(node.left):
        return False
    return not isinstance(node.right, ast.Constant)


def _is_one(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1


def _is_half(module: Module, node: ast.AST, depth: int = 3) -> bool:
    """Whether an expression is surely a float16 tensor."""
    if depth and isinstance(node, ast.Name):
        held = module.origins(node)
        return bool(held) and all(_is_half(module, one, depth - 1) for one in held)
    if isinstance(node, ast.BinOp):
        return any(_is_half(module, s, depth) for s in (node.left, node.right))
    if not isinstance(node, ast.Call):
        return False
    dtype = keyword(node, "dtype")
    if dtype is not None:
        return dtype_of(module, dtype) == "float16"
    if not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "half" and not node.args:
        return True
    if node.func.attr == "to" and any(dtype_of(module, a) == "float16" for a in node.args):
        return True
    inside = node.args[0] if module.called(node) and node.args else node.func.value
    return node.func.attr in _LIGHT and _is_half(module, inside, depth)


def _fix(module: Module, small: ast.expr, text: str) -> tuple[Change, ...]:
    return (module.replace(small, text),) if isinstance(small, ast.Constant) else ()


def _fix_high(module: Module, high: ast.expr) -> tuple[Change, ...]:
    if isinstance(high, ast.BinOp) and isinstance(high.right, ast.Constant) and _is_one(high.left):
        return (module.replace(high.right, "1e-6"),)
    return (module.replace(high, "1 - 1e-6"),) if isinstance(high, ast.Constant) else ()


RULE = Rule(
    code="NP307",
    name="eps-vanishes-in-dtype",
    what="Finds an eps that does nothing in the format in which it is used: a constant below 3e-8 added to, or "
    "used as a lower bound of, something that is explicitly float16; `F.normalize` of float16 with its default "
    "eps; and `clamp(max=1 - 1e-8)` in float32 before a logarithm of 1 − x, `logit`, `atanh`, `acos` or binary "
    "cross entropy.",
    why="The smallest positive float16 is 6e-8, so `torch.zeros(1).half() + 1e-8` is 0.0, and `F.normalize` of a "
    "float16 zero vector is [nan, nan], as its eps of 1e-12 is 0. In float32 the next number below 1 is 1 − 6e-8, "
    "so `torch.tensor(1.0).clamp(1e-8, 1 - 1e-8)` is 1.0, and `log(1 - p)` of it is −inf.",
    bad="""import torch

def unit(x):
    x = x.half()
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)
""",
    good="""import torch

def unit(x):
    x = x.float()
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)
""",
    miss="""def normalize(x, eps=1e-8):  # float16 only when the caller's model is
    return x / (x.norm(dim=-1, keepdim=True) + eps)
""",
    false_alarm="The tensor is float16 only in a branch that is not taken, or the value can never reach the bound.",
    fix="unsafe",
    fix_note="The constant becomes 1e-4 for float16 and 1e-6 below 1 for float32, which changes results near the "
    "bound.",
    default=False,
    nodes=(ast.Module,),
    words=("e-",),
    check=check,
)

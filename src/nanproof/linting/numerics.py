"""What an operand means: a quotient, a sum over a mask, a square, a probability, a shifted exponent."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from .names import Operation, called_last, dotted, key_of, word_set
from .values import core, cores, made_of, operation

if TYPE_CHECKING:
    from .source import Module

_MASKS = re.compile(
    r"mask|valid|keep(?!dim)|(\b|_)pos(itives?)?(\b|_)|indicator|(\b|_)is_|nonpad|non_pad|active|present|visible", re.I
)
_PROBABILITIES = re.compile(r"(^|_)(probs?|probabilit(y|ies)|posteriors?|likelihoods?)(_|$|\d)", re.I)
_LOG_PROBABILITIES = re.compile(r"(^|_|\.)(lprobs|log_?probs|logps|probs_list)$", re.I)
"""Of classes, so never above zero: their exponentials do not overflow. One log_prob may be that of a density."""
QUOTIENTS = frozenset({"div", "div_", "divide", "divide_", "true_divide", "true_divide_"})
"""The names of calls that divide."""
_LOGICAL = (ast.BitAnd, ast.BitOr, ast.BitXor)
_COMPARES = word_set("""eq ne gt lt ge le isfinite isnan isinf bool isin isclose logical_and logical_or logical_not""")


def division(node: ast.AST, module: Module) -> tuple[ast.expr, ast.expr] | None:
    """Numerator and denominator of ``a / b``, ``a /= b``, ``torch.div(a, b)`` and ``a.div(b)``."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
        return (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    if isinstance(node, ast.Call):
        found = module.operation(node)
        if found and found.name in QUOTIENTS and found.operand is not None and found.args:
            return found.operand, found.args[0]
    return None


def summed(node: ast.expr, module: Module) -> ast.expr | None:
    """What is added up or counted: ``m.sum(1)``, ``torch.sum(m)``, ``m.count_nonzero()``, ``len(m.nonzero())``.

    Names and shapes are followed.
    """
    return next((found for at in cores(node, module) if (found := _summed(at, module)) is not None), None)


def _summed(at: ast.expr, module: Module) -> ast.expr | None:
    if isinstance(at, ast.Subscript) and isinstance(at.value, ast.Attribute) and at.value.attr == "shape":
        return _counted(at.value.value, module)
    if not isinstance(at, ast.Call):
        return None
    name, last = module.called(at), called_last(at, module)
    if name == "float" and at.args:
        return summed(at.args[0], module)
    if name == "len" and at.args:
        return _counted(at.args[0], module)
    if last == "size" and isinstance(at.func, ast.Attribute) and at.args:
        return _counted(at.func.value, module)
    if last not in ("sum", "count_nonzero", "nansum"):
        return None
    if isinstance(at.func, ast.Attribute) and not name:
        return at.func.value if module.operation(at) or last != "sum" else None
    return at.args[0] if name.startswith("torch.") and at.args else None


_REDUCES = re.compile(r"(^|_)(sum|mean)(_|$)")


def reduction(node: ast.AST, module: Module) -> Operation | None:
    """A sum or a mean, also by a function that is only named so.

    ``reduce_sum(x, dim)``, ``reduce(x, "b n -> b", "sum")``.
    """
    found = module.operation(node)
    if found is not None:
        return found if found.name in ("sum", "mean") else None
    if not isinstance(node, ast.Call) or not node.args or isinstance(node.args[0], ast.Starred):
        return None
    last = called_last(node, module)
    if last == "reduce" and len(node.args) == 3 and isinstance(node.args[2], ast.Constant):
        kind = str(node.args[2].value)
        return Operation(kind, node.args[0], [node.args[1]], {}) if kind in ("sum", "mean") else None
    named = _REDUCES.search(last) if isinstance(node.func, ast.Name) else None
    keywords = {k.arg: k.value for k in node.keywords if k.arg}
    return Operation(named[2], node.args[0], node.args[1:], keywords) if named else None


def _counted(node: ast.expr, module: Module) -> ast.expr | None:
    """The mask whose true places are listed: ``m.nonzero()``, ``torch.nonzero(m)``."""
    at = core(node, module)
    if isinstance(at, ast.Call) and called_last(at, module) == "nonzero":
        found = module.operation(at)
        return found.operand if found else None
    return None


def probability(node: ast.expr, module: Module) -> Operation | None:
    """The sigmoid or softmax that an expression is, layers such as ``self.softmax = nn.Softmax(1)`` included."""
    return next((found for at in cores(node, module) if (found := _probability(at, module)) is not None), None)


def _probability(at: ast.expr, module: Module) -> Operation | None:
    if not isinstance(at, ast.Call):
        return None
    found = module.operation(at)
    if found and found.name in ("sigmoid", "softmax") and found.operand is not None:
        return found
    layer = at.func if isinstance(at.func, ast.Call) else module.value(at.func)
    if isinstance(layer, ast.Call) and at.args:
        kind = module.called(layer)
        if kind in ("torch.nn.Sigmoid", "torch.nn.Softmax"):
            keywords = {k.arg: k.value for k in layer.keywords if k.arg}
            return Operation(kind.rpartition(".")[2].lower(), at.args[0], list(layer.args), keywords)
    return None


def named_probability(node: ast.expr) -> bool:
    """``probs``, ``action_prob``, ``posterior``: a tensor whose name says that it is a probability."""
    text = dotted(node.value if isinstance(node, ast.Subscript) else node).rpartition(".")[2]
    return bool(_PROBABILITIES.search(text)) and "log" not in text.lower()


def named_mask(text: str) -> bool:
    return bool(_MASKS.search(text))


def boolean(node: ast.expr, module: Module, depth: int = 0) -> bool:
    """Whether an expression holds only 0 and 1: a comparison, a logical combination, or a cast of one."""
    at = core(node, module)
    if isinstance(at, ast.Compare):
        return True
    if isinstance(at, ast.UnaryOp):
        return isinstance(at.op, ast.Invert | ast.Not)
    if isinstance(at, ast.BinOp) and depth < 12:
        sides = [boolean(side, module, depth + 1) for side in (at.left, at.right)]
        return any(sides) if isinstance(at.op, _LOGICAL) else all(sides) and isinstance(at.op, ast.Mult)
    if isinstance(at, ast.Call) and called_last(at, module) in ("any", "all") and depth < 12:
        found = module.operation(at)
        inner = found.operand if found else at.func.value if isinstance(at.func, ast.Attribute) else None
        return inner is not None and boolean(inner, module, depth + 1)
    return isinstance(at, ast.Call) and called_last(at, module) in _COMPARES


def shifted(node: ast.expr, module: Module) -> bool:
    """Whether its exponential is safe: the largest value was subtracted, ``x - x.max(…)``, or log-probabilities."""
    for part in made_of(node, module, limit=200):
        found = operation(part, module)
        if found is not None and found.name == "sub" and found.args:
            for inner in made_of(found.args[0], module, limit=60):
                if isinstance(inner, ast.Call) and called_last(inner, module) in (
                    "max",
                    "amax",
                    "logsumexp",
                    "maximum",
                ):
                    return True
                if "max" in dotted(inner).lower():
                    return True
        if _LOG_PROBABILITIES.search(key_of(part)):
            return True
        if isinstance(part, ast.Call) and called_last(part, module) in ("log_softmax", "logsigmoid", "logsumexp"):
            return True
    return False


def softmaxed(part: ast.AST, module: Module, written_into: str = "") -> bool:
    """Whether a softmax in the same function is taken of this part, or of the name that it was written into."""
    scope = module.function(part)
    for call in module.calls("softmax", "log_softmax"):
        found = module.operation(call)
        operand = found.operand if found else call.args[0] if call.args else None
        if operand is None or module.function(call) is not scope:
            continue
        for inner in made_of(operand, module, limit=300):
            if inner is part or (written_into and key_of(inner) == written_into):
                return True
    return False

"""What names stand for: imports and their aliases followed, function and method forms of an operation seen as one."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .source import Module

# Namespaces whose functions are operations on tensors; the first is where a name from `import *` is looked up first.
NAMESPACES = ("torch", "torch.nn.functional", "torch.special", "torch.linalg", "torch.Tensor", "torch.fft")


def word_set(text: str, *, in_place: bool = False) -> frozenset[str]:
    """The words of a text, with `add_` beside `add` if the operations work in place, too."""
    names = frozenset(text.split())
    return names | {f"{name}_" for name in names} if in_place else names


# Methods of tensors that take no argument: with one they belong to something else (`logger.log(loss)`).
UNARY = word_set(
    """abs acos acosh angle asin asinh atan atanh bfloat16 ceil clone cos cosh deg2rad detach digamma double erf erfc
    erfinv exp exp2 expm1 float floor frac half isfinite isinf isnan item lgamma log log10 log1p log2 neg negative
    numel reciprocal relu rsqrt sgn sigmoid sign sin sinh sqrt square tan tanh trunc""",
    in_place=True,
)
METHODS = UNARY | word_set(
    """add addmm all amax amin any argmax argmin atan2 backward baddbmm bmm clamp clamp_max clamp_min clip
    cosine_similarity cpu cross cuda cumprod cumsum diagonal diff dist div divide dot einsum eq expand fill flatten
    floor_divide fmod gather ge gt hypot index_add index_fill index_select kthvalue le lerp log_softmax logaddexp
    logcumsumexp logit logsumexp lt masked_fill masked_scatter masked_select matmul max maximum mean median min minimum
    mm mul multiply nan_to_num nanmean nansum ne new_full new_ones new_tensor new_zeros nonzero norm permute pow prod
    quantile remainder renorm reshape round scatter scatter_add softmax sort squeeze std std_mean sub subtract sum to
    topk transpose tril triu true_divide type type_as unique unsqueeze var var_mean view where xlogy""",
    in_place=True,
)

# Receivers that are never tensors, by the last part of their name.
_NO_TENSORS = word_set(
    """accelerator cls cmath console cp df engine experiment fabric jax jnp json log logger logging math mlflow mx np
    numpy opt optimizer os pbar random re run scaler scheduler self sys tf torch tracker trainer wandb writer"""
)
_BUILTINS = frozenset(dir(builtins))


class Operation(NamedTuple):
    """One operation on tensors, in whatever form it is written: ``torch.sum(x, 1)``, ``x.sum(dim=1)``, ``a * b``."""

    name: str
    operand: ast.expr | None
    args: list[ast.expr]
    """What is given beside the operand, by place."""
    keywords: dict[str, ast.expr]

    def given(self, *names: str, place: int | None = None) -> ast.expr | None:
        """The argument with one of these names, or the one at this place."""
        by_name = next((self.keywords[n] for n in names if n in self.keywords), None)
        return by_name if by_name is not None or place is None or place >= len(self.args) else self.args[place]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` as it is written, or "" when it is anything but names and dots.

    >>> dotted(ast.parse("torch.nn.functional.softmax", mode="eval").body)
    'torch.nn.functional.softmax'
    """
    if isinstance(node, ast.Name):
        return node.id
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    parts.append(node.id)
    return ".".join(reversed(parts))


def imported(nodes: Iterable[ast.AST]) -> tuple[dict[str, str], list[str]]:
    """What each imported name stands for, and the modules imported with a star.

    >>> tree = ast.parse("import torch.nn.functional as F, os.path; from torch import log as ln; from math import *")
    >>> imported(tree.body)
    ({'F': 'torch.nn.functional', 'os': 'os', 'ln': 'torch.log'}, ['math'])
    """
    names: dict[str, str] = {}
    stars: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    names[alias.asname] = alias.name
                else:
                    root = alias.name.partition(".")[0]
                    names[root] = root
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name == "*":
                    stars.append(base)
                else:
                    names[alias.asname or alias.name] = f"{base}.{alias.name}" if node.module else base + alias.name
    return names, stars


def is_builtin(name: str) -> bool:
    return name in _BUILTINS


def function_form(name: str, call: ast.Call) -> Operation | None:
    """``torch.log(x)``, ``F.softmax(x, dim=1)`` and the like, by the resolved name of what is called."""
    space, _, last = name.rpartition(".")
    if space not in NAMESPACES or not last or last[0].isupper():
        return None
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    if call.args:
        return Operation(last, call.args[0], call.args[1:], keywords)
    return Operation(last, keywords.pop("input", None), [], keywords)


def method_form(call: ast.Call, root: str) -> Operation | None:
    """``x.log()``, ``x.softmax(1)``: what has a tensor's method and a receiver that may be a tensor."""
    func = call.func
    if not isinstance(func, ast.Attribute) or func.attr not in METHODS:
        return None
    if func.attr in UNARY and call.args:
        return None
    receiver = func.value
    if root in _NO_TENSORS and (isinstance(receiver, ast.Name) or root != "self"):
        return None
    if isinstance(receiver, ast.Attribute) and receiver.attr.lstrip("_") in _NO_TENSORS:
        return None
    if isinstance(receiver, ast.Constant | ast.JoinedStr | ast.List | ast.Dict | ast.Set | ast.ListComp | ast.Tuple):
        return None
    if isinstance(receiver, ast.Call) and dotted(receiver.func) == "super":
        return None
    return Operation(func.attr, receiver, call.args, {k.arg: k.value for k in call.keywords if k.arg})


def key_of(node: ast.AST) -> str:
    """What a name or an attribute of self is filed under."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        return f"self.{node.attr}"
    return ""


def written(node: ast.AST) -> str:
    """The dotted text of a thing, whichever element of it is meant.

    >>> written(ast.parse("self.optimizers[0]", mode="eval").body)
    'self.optimizers'
    """
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
        return written(node.func)  # self.optimizers()
    return dotted(node)


def last_name(call: ast.Call) -> str:
    """``clip_grad_norm_`` for ``torch.nn.utils.clip_grad_norm_(...)``."""
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def called_last(call: ast.Call, module: Module) -> str:
    """The last part of what is called, method or function: "sum" for ``torch.sum(x)`` and ``x.sum()``."""
    if name := module.called(call):
        return name.rpartition(".")[2]
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")

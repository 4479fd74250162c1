"""NP217: -1e9 does not fit into float16."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..names import called_last, key_of
from ..numerics import softmaxed
from ..rewrite import fill_with_lowest
from ..rule import Found, Rule
from ..values import made_of, number, scalar

if TYPE_CHECKING:
    from ..source import Module

_LARGEST = 65504.0
_MASKS = re.compile(r"mask|pad|valid|adj", re.I)


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    if module.is_test:
        return
    if isinstance(node, ast.Call):
        yield from _filled(node, module)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _MASKS.search(module.source(node)):
        yield from _added(node, module)


def _half(module: Module) -> bool:
    """Whether this file trains in float16: a loss scaler, autocast to it, or a trainer told so."""
    facts = module.facts
    if "bfloat16" in facts.autocast_dtypes and not facts.scaler:
        return False
    return facts.scaler or bool({"float16", "default"} & facts.autocast_dtypes) or bool(facts.half and facts.trainer)


def _made_half(scores: ast.expr, module: Module) -> bool:
    """Whether the scores themselves are computed from something cast to float16."""
    parts = [p for p in made_of(scores, module, limit=120) if isinstance(p, ast.Call)]
    return any(called_last(p, module) == "half" and not p.args for p in parts)


def _too_large(node: ast.expr | None, module: Module) -> float | None:
    value = number(node, module)
    return value if value is not None and -math.inf < value < -_LARGEST else None


def _filled(node: ast.Call, module: Module) -> Iterator[Found]:
    """``scores.masked_fill(mask, -1e9)``, ``torch.where(mask, scores, -1e9)``."""
    found = module.operation(node)
    if found is None or found.operand is None:
        return
    given = [*found.args, *found.keywords.values()]
    filler = given[1] if len(given) == 2 else None
    value = _too_large(filler, module)
    if value is None or filler is None or not (_half(module) or _made_half(found.operand, module)):
        return
    if found.name not in ("masked_fill", "masked_fill_", "where"):
        return
    function = found.name == "where" and bool(module.called(node))  # torch.where(mask, scores, filler)
    scores, mask = (given[0], found.operand) if function else (found.operand, given[0])
    if found.name == "where" and not softmaxed(node, module) and not _masks(mask):
        return
    if _in_float(scores, module) or scalar(scores, module):
        return
    yield Found(
        node=node,
        message=f"{value:g} does not fit into float16, whose lowest number is -65504: this raises or becomes -inf",
        help="use torch.finfo(scores.dtype).min",
        edits=fill_with_lowest(scores, filler, module),
        safe=softmaxed(node, module),
    )


def _added(node: ast.BinOp, module: Module) -> Iterator[Found]:
    """``(1 - mask) * -1e9``, which is added to the scores."""
    for constant, other in ((node.left, node.right), (node.right, node.left)):
        value = _too_large(constant, module)
        if value is None or not isinstance(other, ast.expr):
            continue
        if _masks(other) and _half(module) and not _in_float(other, module):
            yield Found(
                node=node,
                message=f"{value:g} is -inf in float16, whose lowest number is -65504; a row masked as a whole is NaN",
                help="use torch.finfo(scores.dtype).min, or masked_fill with it",
            )
            return


def _masks(node: ast.expr) -> bool:
    return any(_MASKS.search(key_of(n)) for n in ast.walk(node))


def _in_float(node: ast.expr, module: Module) -> bool:
    """Whether the scores are float32 for certain."""
    for part in made_of(node, module, limit=200):
        if isinstance(part, ast.Call) and called_last(part, module) == "float" and not part.args:
            return True
        if isinstance(part, ast.Attribute) and part.attr in ("float32", "float64"):
            return True
    return False


RULE = Rule(
    code="NP217",
    name="mask-constant-overflow",
    what="""
Finds masks made with a constant below -65504, such as `masked_fill(mask, -1e9)`, in a project that uses float16.
""",
    why="""
The lowest float16 number is -65504. `masked_fill(mask, -1e9)` on a float16 tensor raises "value cannot be converted
to type c10::Half without overflow", and under autocast the scores of a matrix product are float16 although nobody
wrote so. `(1 - mask) * -1e9` does not raise: it is -inf, and the softmax of a row that is masked as a whole is NaN.
`torch.finfo(scores.dtype).min` is right in every dtype. bfloat16 has the range of float32 and is not affected.
""",
    bad="""
def attend(scores, mask, values):
    scores = scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ values


def predict(model, batch):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(batch)
""",
    good="""
def attend(scores, mask, values):
    scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ values


def predict(model, batch):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(batch)
""",
    miss="""
NEGATIVE = {"mask": -1e9}


def attend(scores, mask, values):
    return scores.masked_fill(mask == 0, NEGATIVE["mask"]).softmax(-1) @ values


def predict(model, batch):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(batch)
""",
    false_alarm="""
This part of the program never runs in float16. Scores that are converted with `.float()` before are left alone.
""",
    fix="safe",
    fix_note="""
The constant of a `masked_fill` becomes `torch.finfo(scores.dtype).min`. It is safe before a softmax, where both leave a
weight of 0; elsewhere it is marked unsafe. Masks that are added are left to you: the sum of two very low numbers may
overflow.
""",
    nodes=(ast.Call, ast.BinOp),
    calls=frozenset({"masked_fill", "masked_fill_", "where"}),
    check=check,
)

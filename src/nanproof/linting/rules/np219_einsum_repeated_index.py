"""NP219: an index that stands twice in one operand of an einsum takes the diagonal."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..names import key_of
from ..rule import Found, Rule

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    name = module.called(node)
    if module.is_test or name.partition(".")[0] in ("numpy", "jax", "tensorflow"):
        return
    words = name.startswith("einops.")
    for equation in _equations(node, module):
        text = str(equation.value)
        if index := _repeated(text, words):
            yield Found(
                node=equation,
                message=f'"{text}" takes only the diagonal: {index} stands twice in one operand and is '
                "kept in the result",
                help=f"give the second {index} a letter of its own to multiply matrices: bij,bjd->bid",
            )


def _equations(node: ast.Call, module: Module) -> list[ast.Constant]:
    """The equation: written here, or every text that a name may hold."""
    found: list[ast.Constant] = []
    for given in [
        *node.args[:1],
        *node.args[-1:],
        *(k.value for k in node.keywords if k.arg in ("equation", "pattern")),
    ]:
        held = [given] if isinstance(given, ast.Constant) else module.values(given) if key_of(given) else []
        for text in held:
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and text not in found:
                found.append(text)
    return found


def _repeated(equation: str, words: bool) -> str:
    """The index that stands twice in one of several operands and once in the result.

    >>> [_repeated(e, words=False) for e in ("bnn,bnd->bnd", "bii->bi", "bij,bjd->bid")]
    ['n', '', '']
    """
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if not arrow or len(operands) < 2:
        return ""
    result = _indices(right, words)
    for position, operand in enumerate(operands):
        indices = _indices(operand, words)
        elsewhere = {i for p, other in enumerate(operands) if p != position for i in _indices(other, words)}
        for index in indices:
            if indices.count(index) > 1 and index in result and index in elsewhere:
                return index
    return ""


def _indices(operand: str, words: bool) -> list[str]:
    if words:
        return [w for w in operand.split() if w != "..."]
    return [c for c in operand if c.isalpha()]


RULE = Rule(
    code="NP219",
    name="einsum-repeated-index",
    what="""
Finds an einsum of several operands in which an index stands twice in one of them and is kept in the result, such as
`"bnn,bnd->bnd"`. The equation may be held by a name; `einops.einsum` is read too.
""",
    why="""
An index that is repeated within one operand means its diagonal. `"nn,nd->nd"` multiplies row n of the second operand
with the single number m[n, n]: of [[1, 2], [3, 4]] only 1 and 4 are used, and rows of ones come out as 1 and 4 instead
of the 3 and 7 of the matrix product `"nm,md->nd"`. The shapes fit, so nothing is reported, but the rest of the matrix
gets no gradient and never learns. Where the matrix was meant to mix streams or nodes, they never mix.
""",
    bad="""
def mix(weights, streams):
    return torch.einsum("bnn,bnd->bnd", weights, streams)
""",
    good="""
def mix(weights, streams):
    return torch.einsum("bnm,bmd->bnd", weights, streams)
""",
    miss="""
def mix(weights, streams):
    return torch.einsum("bnn,bnd->bd", weights, streams)  # a sum along the diagonal: may be meant
""",
    false_alarm="""
The diagonal is meant. Taking it first says so: `weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * streams`. A single
operand, `"bii->bi"`, is left alone.
""",
    nodes=(ast.Call,),
    calls=frozenset({"einsum", "contract"}),
    check=check,
)

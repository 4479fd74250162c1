"""NP225: a summed loss is divided by a count that can be zero."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..guards import checked, guarded
from ..numerics import QUOTIENTS, division
from ..purpose import only_logged, trains
from ..rule import Found, Rule
from ..training import loss_like
from ..values import core, cores, number, trail

if TYPE_CHECKING:
    from ..source import Module

_COUNT = re.compile(
    r"(^|_)(num|n|total|count|sum)_?(of_)?(valid|label(ed|led)?|pos(itives?)?|fg|foreground|loss|masked|target|active|"
    r"non_?pad|trainable|response|completion|assistant|supervised|matched)s?(_?(tokens?|samples?|pixels?|anchors?|boxes|"
    r"elements?|labels?|points?|count))?$|^(valid|pos|fg|label)_?(count|num|tokens)$|^n_?(pos|valid)$",
    re.I,
)


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    parts = division(node, module)
    if parts is None:
        return
    above, below = parts
    key = key_of(below)
    last = key.rpartition(".")[2]
    if not key or not _COUNT.search(last) or key.startswith("self.") or not trains(node, module):
        return
    if not _loss(above, node, module) or guarded(below, module) or only_logged(node, module):
        return
    keys = {key_of(t) for t in trail(below, module)} - {""}
    if checked(keys, node, module) or _bounded(below, module):
        return
    yield Found(
        node=node,
        message=f"the loss is 0 / 0 = NaN for a batch in which {last} is 0",
        help=f"divide by at least 1: max({last}, 1), or {last}.clamp(min=1) if it is a tensor",
        about=node,
    )


def _loss(above: ast.expr, node: ast.AST, module: Module) -> bool:
    """Whether a sum of losses stands above: called a loss, or made with reduction="sum"."""
    owner = module.statement(node)
    stored = getattr(owner, "targets", [getattr(owner, "target", None)])
    names = [key_of(t) for t in [*trail(above, module), *stored] if t is not None]
    if any(loss_like(n) for n in names if n):
        return True
    at = core(above, module)
    given = {k.arg: k.value for k in at.keywords} if isinstance(at, ast.Call) else {}
    return isinstance(given.get("reduction"), ast.Constant) and given["reduction"].value == "sum"  # type: ignore[attr-defined]


def _bounded(below: ast.expr, module: Module) -> bool:
    """A size, or a maximum with a number: never zero where there is data."""
    for at in cores(below, module):
        name = module.called(at) if isinstance(at, ast.Call) else ""
        if name in ("max", "len") or number(at, module) is not None:
            return True
        if isinstance(at, ast.Subscript) and isinstance(at.value, ast.Attribute) and at.value.attr == "shape":
            return True
        if isinstance(at, ast.Call) and isinstance(at.func, ast.Attribute) and at.func.attr in ("numel", "size", "get"):
            return True
        if isinstance(at, ast.BoolOp):
            return True
    return False


RULE = Rule(
    code="NP225",
    name="loss-over-count",
    what="""
Finds a summed loss that is divided by the number of labels, positives or valid tokens, `loss / num_label_tokens`, when
nothing keeps that number from 0.
""",
    why="""
A batch without a single label comes with packing, long prompts that are cut, filters, and images without objects. The
sum is 0, the count is 0, and 0 / 0 is NaN in the loss and in every gradient.
""",
    bad="""
def lm_loss(logits, labels, num_label_tokens):
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss / num_label_tokens
""",
    good="""
def lm_loss(logits, labels, num_label_tokens):
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss / max(num_label_tokens, 1)
""",
    false_alarm="The caller has made sure that there is a label; an assertion before the division says so.",
    nodes=(ast.BinOp, ast.AugAssign, ast.Call),
    calls=QUOTIENTS,
    check=check,
)

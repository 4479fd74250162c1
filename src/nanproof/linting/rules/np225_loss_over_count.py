"""NP225: a summed loss is divided by a count that can be zero."""

from __future__ import annotations

import ast
import re

from ..guards import guarded
from ..masks import CHOSEN, words
from ..matching import Hit, asked, of_loss, quotient, reported, training
from ..names import key_of
from ..numerics import summed
from ..rule import Rule
from ..values import cores, number, trail

_COUNT = re.compile(
    r"(^|_)(num|n|total|count|sum)_?(of_)?(valid|label(ed|led)?|pos(itives?)?|fg|foreground|loss|masked|target|active|"
    r"non_?pad|trainable|response|completion|assistant|supervised|matched)s?(_?(tokens?|samples?|pixels?|anchors?|boxes|"
    r"elements?|labels?|points?|count))?$|^(valid|pos|fg|label)_?(count|num|tokens)$|^n_?(pos|valid)$|^num_items_in_batch$",
    re.I,
)


def _count(hit: Hit) -> ast.expr | None:
    """The count that divides: by itself, or per process."""
    for at in trail(hit.operand, hit.module):
        one = at.left if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Div) else at
        name = key_of(one)
        if isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Constant):
            name = str(one.slice.value)  # inputs["num_items_in_batch"]
        if _COUNT.search(name) and not name.startswith("self."):
            return one
    return None


def _of_weights(hit: Hit) -> bool:
    """A sum of something that is not called labels, positives or valid places."""
    mask = summed(hit.operand, hit.module)
    return mask is not None and not any(CHOSEN.search(w) for w in words(mask, hit.module))


def _bounded(hit: Hit) -> bool:
    """A size, or a maximum with a number: never zero where there is data."""
    for at in cores(hit.operand, hit.module):
        if isinstance(at, ast.BoolOp) or number(at, hit.module) is not None:
            return True
        if isinstance(at, ast.Subscript) and isinstance(at.value, ast.Attribute) and at.value.attr == "shape":
            return True
        if isinstance(at, ast.Call):
            method = at.func.attr if isinstance(at.func, ast.Attribute) else ""
            if hit.module.called(at) in ("max", "len") or method in ("numel", "size", "get"):
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
    match=quotient().of(_count),
    where=training,
    unless=(lambda h: not of_loss(h), lambda h: guarded(h.operand, h.module), reported, asked, _bounded),
    doubt=(_of_weights,),
    message=lambda h: f"the loss is 0 / 0 = NaN for a batch in which {h.said('the count')} is 0",
    help="divide by at least 1: max(n, 1), or n.clamp(min=1) if it is a tensor",
    about=lambda h: h.node,
)

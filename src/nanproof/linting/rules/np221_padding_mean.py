"""NP221: a mean over everything that is not padding; off by default."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..rule import Found, Rule
from .np201_masked_mean_empty import means

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    yield from means(node, module, padding=True)


RULE = Rule(
    code="NP221",
    name="padding-mean",
    what="""
Finds a mean over a whole batch in which the mask leaves out padding only, `(x * mask).sum() / mask.sum()` with a mask
made from lengths. NP201 has the other masks.
""",
    why="""
It is 0 / 0 when every sequence of the batch is empty. That is rare: a filter that leaves nothing of a batch, a rank
that got no data. The rule is off by default.
""",
    bad="""
def mel_loss(error, mel_mask):
    return (error * mel_mask).sum() / mel_mask.sum()
""",
    good="""
def mel_loss(error, mel_mask):
    return (error * mel_mask).sum() / mel_mask.sum().clamp(min=1)
""",
    false_alarm="No batch is ever empty, on any rank, after any filter.",
    fix="unsafe",
    fix_note="`.clamp(min=1)` is added to the count; fractional weights would change.",
    default=False,
    nodes=(ast.Div,),
    words=("sum(", "count_nonzero", "nonzero(", "mean("),
    check=check,
)

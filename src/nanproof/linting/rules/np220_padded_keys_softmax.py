"""NP220: attention whose keys are all padding; off by default."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..rule import Found, Rule
from .np216_fully_masked_softmax import rows

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.Call | ast.Assign, module: Module) -> Iterator[Found]:
    yield from rows(node, module, padding=True)


RULE = Rule(
    code="NP220",
    name="padded-keys-softmax",
    what="""
Finds attention scores that are filled with -inf where keys are padding, the same for every query. NP216 has the masks
that leave out more than padding.
""",
    why="""
When a sequence is empty, all its keys are padding and softmax of a row of -inf is NaN. Most datasets have no empty
sequence, which is why the rule is off by default; retrieved passages, dialogue history, boxes and neighbors often do.
""",
    bad="""
class Attention(nn.Module):
    def forward(self, q, k, v, key_padding_mask):
        scores = q @ k.transpose(-2, -1)
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        return scores.softmax(-1) @ v
""",
    good="""
class Attention(nn.Module):
    def forward(self, q, k, v, key_padding_mask):
        scores = q @ k.transpose(-2, -1)
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v
""",
    false_alarm="No sequence is ever empty, and no rank gets an empty batch.",
    fix="unsafe",
    fix_note="It fills with `torch.finfo(scores.dtype).min`, so that a row masked as a whole becomes uniform.",
    default=False,
    nodes=(ast.Call, ast.Assign),
    calls=frozenset({"masked_fill", "masked_fill_"}),
    words=("softmax",),
    check=check,
)

"""NP216: the softmax of a row that is masked as a whole is NaN."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..numerics import softmaxed
from ..rewrite import fill_with_lowest
from ..rule import Found, Rule
from ..values import called_last, made_of, number, short

if TYPE_CHECKING:
    from ..source import Module

_PADDING = re.compile(r"pad|valid|length|(^|_)lens?(_|$)|src_mask|key_mask|node_mask|token_mask|seq_mask|attn_?mask|"
                      r"attention_mask|^mask$|^masks$|_mask$", re.I)  # fmt: skip
_SURE = re.compile(r"pad|valid|length|(^|_)lens?(_|$)|key_mask|token_mask|seq_mask", re.I)
_TRIANGLE = re.compile(
    r"causal|tril|triu|subsequent|future|look_?ahead|triangular|bias|window|diag|eye|self_mask", re.I
)
_MENDS = {"nan_to_num", "nan_to_num_", "isnan", "isinf", "isfinite", "masked_softmax"}


def check(node: ast.Call | ast.Assign, module: Module) -> Iterator[Found]:
    filled = _filled(node, module)
    if filled is None or module.is_test:
        return
    scores, mask, filler = filled
    if number(filler, module) != -math.inf or not _padding(mask, module):
        return
    in_place = isinstance(node, ast.Assign) or called_last(node, module).endswith("_")
    if not softmaxed(node, module, key_of(scores) if in_place else "") or _mended(node, module):
        return
    yield Found(
        node=node,
        message=f"softmax gives NaN for a row that {short(mask, module) or 'the mask'} fills with -inf from end to end",
        help="fill with torch.finfo(scores.dtype).min, or set such rows to 0 afterwards (ops.masked_softmax does)",
        edits=fill_with_lowest(scores, filler, module),
    )


def _filled(node: ast.Call | ast.Assign, module: Module) -> tuple[ast.expr, ast.expr, ast.expr] | None:
    """Scores, mask and filler of ``scores.masked_fill(mask, -inf)`` and of ``scores[mask] = -inf``."""
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        return (target.value, target.slice, node.value) if isinstance(target, ast.Subscript) else None
    found = module.operation(node)
    if found is None or found[0].rstrip("_") != "masked_fill" or found[1] is None:
        return None
    given = [*found[2], *found[3].values()]
    return (found[1], given[0], given[1]) if len(given) == 2 else None


def _padding(mask: ast.expr, module: Module) -> bool:
    """Whether a mask says what is padding, which can be everything; a triangle always keeps the diagonal."""
    words = [key_of(n) or getattr(n, "attr", "") for n in made_of(mask, module, limit=80)]
    words += [called_last(n, module) for n in made_of(mask, module, limit=80) if isinstance(n, ast.Call)]
    text = [w for w in words if w]
    if any(_TRIANGLE.search(w) for w in text):
        return False
    return any(_SURE.search(w) for w in text) or _argument_mask(mask, module)


def _argument_mask(mask: ast.expr, module: Module) -> bool:
    """``mask == 0`` with a mask handed in from outside, in a file that builds no triangle itself."""
    names = [key_of(n).rpartition(".")[2] for n in ast.walk(mask) if key_of(n)]
    if not any(_PADDING.search(n) for n in names):
        return False
    return bool(re.search(r"pad_mask|padding|pad_idx|pad_token|lengths", module.text)) and not _TRIANGLE.search(
        module.text
    )


def _mended(node: ast.AST, module: Module) -> bool:
    """Whether the function looks after such rows: NaN replaced, or rows without anything to attend to found."""
    scope = module.function(node)
    for part in ast.walk(scope):
        if isinstance(part, ast.Call) and called_last(part, module) in _MENDS:
            return True
        if isinstance(part, ast.Call) and called_last(part, module) in ("all", "any") and (part.args or part.keywords):
            return True
    return False


RULE = Rule(
    code="NP216",
    name="fully-masked-softmax",
    what="""
Finds scores that a padding mask fills with -inf before a softmax, where nothing looks after rows that are masked from
end to end. Causal masks are left alone: they always keep the diagonal.
""",
    why="""
A row of -inf has the largest value -inf, and softmax computes exp(-inf - (-inf)): NaN, for the whole row. The NaN is
multiplied with the values, enters the residual stream, and reaches every token that attends there in the next layer.
Rows are masked as a whole when a sequence is empty, when padding stands on the left and a causal mask is added, or when
the query itself is padding.

With `torch.finfo(dtype).min` such a row becomes uniform: useless, but finite, and its output is not used. Setting the
row to 0 is cleaner; `ops.masked_softmax` does that, with a gradient of 0.
""",
    bad="""
import torch.nn as nn


class Pooling(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x, pad_mask):
        scores = self.score(x).squeeze(-1)
        scores = scores.masked_fill(pad_mask, float("-inf"))
        return (scores.softmax(-1).unsqueeze(-1) * x).sum(1)
""",
    good="""
import torch.nn as nn
from nanproof import ops


class Pooling(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x, pad_mask):
        weights = ops.masked_softmax(self.score(x).squeeze(-1), ~pad_mask)
        return (weights.unsqueeze(-1) * x).sum(1)
""",
    miss="""
import torch
import torch.nn as nn


class Attention(nn.Module):
    def forward(self, scores, adjacency):
        scores = torch.where(adjacency > 0, scores, float("-inf"))  # a node without neighbours
        return scores.softmax(-1)
""",
    false_alarm="""
No sequence is ever empty and padding stands on the right: then every row keeps at least one place.
""",
    fix="unsafe",
    fix_note="It fills with `torch.finfo(scores.dtype).min`, so that a row masked as a whole becomes uniform.",
    nodes=(ast.Call, ast.Assign),
    calls=frozenset({"masked_fill", "masked_fill_"}),
    words=("softmax",),
    check=check,
)

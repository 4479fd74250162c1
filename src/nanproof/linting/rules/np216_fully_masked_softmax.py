"""NP216: the softmax of a row that is masked as a whole is NaN."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import has_argument
from ..masks import is_causal, is_padding, of_both_sides, words
from ..names import called_last, key_of
from ..numerics import named_mask, softmaxed
from ..purpose import aside, is_network
from ..rewrite import fill_with_lowest
from ..rule import Found, Rule
from ..values import core, cores, made_of, number, short

if TYPE_CHECKING:
    from ..source import Module

_CHOICES = re.compile(r"valid|legal|allowed|avail|action_mask|adj|neighbou?r|^masks?$", re.I)
_HANDED = re.compile(r"key_padding|attn_mask|attention_mask|src_mask|tgt_mask", re.I)
_TRIANGLE = re.compile(
    r"causal|tril|triu|subsequent|future|look_?ahead|triangular|bias|window|diag|eye|self_mask", re.I
)
_MENDS = {"nan_to_num", "nan_to_num_", "isnan", "isinf", "isfinite", "masked_softmax"}


def check(node: ast.Call | ast.Assign, module: Module) -> Iterator[Found]:
    filled = _filled(node, module)
    if filled is None or number(filled[2], module) != -math.inf or aside(node, module):
        return
    scores, mask, filler = filled
    sided = of_both_sides(mask, module) or _intersects(mask, module)
    keys = not sided and (_of_keys(mask, module) or _attends(scores, module) or _queried(node, module))
    if not sided and is_causal(mask, module):
        return
    if not (sided or _may_cover(mask, module) or is_padding(mask, module) or _handed(mask, module)):
        return
    in_place = isinstance(node, ast.Assign) or called_last(node, module).endswith("_")
    if key_of(scores) in {key_of(n) for n in ast.walk(mask)} - {""} or _mended(node, module):
        return  # a mask made by comparing the scores themselves keeps the largest of them
    if not softmaxed(node, module, key_of(scores) if in_place else ""):
        return
    yield Found(
        node=node,
        message=f"softmax gives NaN for a row that {short(mask, module) or 'the mask'} fills with -inf from end to end",
        help="fill with torch.finfo(scores.dtype).min, or set such rows to 0 afterwards (ops.masked_softmax does)",
        edits=fill_with_lowest(scores, filler, module),
        info=not sided
        and (not _in_layer(node, module) or (keys and (is_padding(mask, module) or _of_keys(mask, module)))),
    )


def _in_layer(node: ast.AST, module: Module) -> bool:
    """Elsewhere it is sampling more often than training."""
    klass = module.klass(node)
    return klass is not None and is_network(klass, module)


def _handed(mask: ast.expr, module: Module) -> bool:
    """Whether the caller hands in a mask, of which nothing says that it keeps something in every row."""
    names = [n for n in made_of(mask, module, limit=60) if isinstance(n, ast.Name)]
    handed = any(has_argument(module.function(n), n.id) and named_mask(n.id) for n in names)
    return handed and not any(_TRIANGLE.search(w) for w in words(mask, module))


def _filled(node: ast.Call | ast.Assign, module: Module) -> tuple[ast.expr, ast.expr, ast.expr] | None:
    """Scores, mask and filler of ``scores.masked_fill(mask, -inf)`` and of ``scores[mask] = -inf``."""
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        return (target.value, target.slice, node.value) if isinstance(target, ast.Subscript) else None
    found = module.operation(node)
    if found is None or found.name.rstrip("_") != "masked_fill" or found.operand is None:
        return None
    given = [*found.args, *found.keywords.values()]
    return (found.operand, given[0], given[1]) if len(given) == 2 else None


def _of_keys(mask: ast.expr, module: Module) -> bool:
    """Whether a mask is that of padded keys, the same for every query: ``pad[:, None, None, :]``."""
    if of_both_sides(mask, module):
        return False
    for part in made_of(mask, module, limit=80):
        if isinstance(part, ast.Call) and called_last(part, module) in ("unsqueeze", "unsqueeze_"):
            return True
        if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Tuple):
            blanks = [e for e in part.slice.elts if isinstance(e, ast.Constant) and e.value is None]
            if len(blanks) > 1:
                return True
    return any(_HANDED.search(w) for w in words(mask, module))


def _attends(scores: ast.expr, module: Module) -> bool:
    """Whether the scores are those of every query with every key."""
    for part in made_of(scores, module, limit=120):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult):
            return True
        if isinstance(part, ast.Call) and called_last(part, module) in ("matmul", "bmm", "einsum", "baddbmm"):
            return True
    return False


def _queried(node: ast.AST, module: Module) -> bool:
    """Whether a query stands beside what is attended to: more than one thing and its mask are handed in."""
    scope = module.function(node)
    return isinstance(scope, ast.FunctionDef) and len(scope.args.args) > 3


def _may_cover(mask: ast.expr, module: Module) -> bool:
    if is_padding(mask, module):
        return not is_causal(mask, module) or of_both_sides(mask, module)
    return _chosen(mask, module) or _intersects(mask, module)


def _intersects(mask: ast.expr, module: Module) -> bool:
    """``(a | b) & keep``: what two masks leave together may be nothing."""
    for at in cores(mask, module):
        inner = core(at.operand, module) if isinstance(at, ast.UnaryOp) else at
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.BitAnd):
            return not any(_TRIANGLE.search(w) for w in words(mask, module)) and any(
                re.search(r"(?i)keep|visible|valid|block|same|segment|doc", w) for w in words(mask, module)
            )
    return False


def _chosen(mask: ast.expr, module: Module) -> bool:
    """Whether a mask chooses what is allowed, which may be nothing: valid boxes, legal actions, neighbors."""
    names = [key_of(n).rpartition(".")[2] for n in ast.walk(mask) if key_of(n)]
    if not any(_CHOICES.search(n) for n in names) or any(_TRIANGLE.search(w) for w in words(mask, module)):
        return False
    return not _TRIANGLE.search(_around(mask, module))


def _around(node: ast.AST, module: Module) -> str:
    """The text of the function, or of the method and its class's name."""
    scope = module.function(node)
    return module.text if isinstance(scope, ast.Module) else module.source(scope)


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
class Pooling(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x, pad_mask):
        weights = ops.masked_softmax(self.score(x).squeeze(-1), ~pad_mask)
        return (weights.unsqueeze(-1) * x).sum(1)
""",
    miss="""
class Attention(nn.Module):
    def forward(self, scores, adjacency):
        scores = torch.where(adjacency > 0, scores, float("-inf"))  # a node without neighbors
        return scores.softmax(-1)
""",
    false_alarm="""
No sequence is ever empty and padding stands on the right: then every row keeps at least one place.
""",
    fix="unsafe",
    fix_note="It fills with `torch.finfo(scores.dtype).min`, so that a row masked as a whole becomes uniform.",
    default=False,
    nodes=(ast.Call, ast.Assign),
    calls=frozenset({"masked_fill", "masked_fill_"}),
    words=("softmax",),
    check=check,
)

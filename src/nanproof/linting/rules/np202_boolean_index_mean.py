"""NP202: the mean of a selection is NaN when nothing is selected."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..guards import checked
from ..masks import CHOSEN, defaults_to_ones, is_padding, words
from ..names import Operation, called_last, key_of, word_set
from ..numerics import boolean, named_mask
from ..purpose import counts_hits, in_loss, only_logged, trains
from ..rule import Change, Found, Rule
from ..values import core, cores, made_of, names_of, number, scalar, short, trail

if TYPE_CHECKING:
    from ..source import Module

_LOSSES = word_set(
    """mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss binary_cross_entropy
    binary_cross_entropy_with_logits kl_div gaussian_nll_loss poisson_nll_loss"""
)
_LAYERS = word_set(
    """MSELoss L1Loss SmoothL1Loss HuberLoss CrossEntropyLoss NLLLoss BCELoss BCEWithLogitsLoss KLDivLoss
    GaussianNLLLoss"""
)
_CALLS = {"mean", *_LOSSES}
_ELEMENTWISE = word_set(
    """abs square pow exp log sqrt neg relu softplus logsigmoid sigmoid tanh clamp log1p expm1 float to mul add sub
    div"""
)
_PLACES = {"arange", "eye", "tril", "triu", "ones"}
_INDICES = re.compile(
    r"ind(ex|ices|s)?$|idx|ids$|(^|_)(i|j|k|rows?|cols?|positions?|order|perm)$|(^|_)(train|val|test)_mask", re.I
)


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    if called_last(node, module) in _LAYERS:
        for call, operation in _criterion(node, module):
            yield from _judge(call, operation, module)
    elif found := module.operation(node):
        yield from _judge(node, found, module)


def _judge(node: ast.Call, found: Operation, module: Module) -> Iterator[Found]:
    if found.operand is None:
        return
    name, first, rest, keywords = found.name, found.operand, found.args, found.keywords
    if name == "mean":
        dims = [*rest, *(v for k, v in keywords.items() if k in ("dim", "axis"))]
        if dims and number(dims[0], module) != 0:
            return  # along another dimension an empty selection gives an empty tensor, not NaN
    elif any(_reduces_otherwise(k, v) for k, v in keywords.items()):
        return
    selection = _selection(first, module)
    if selection is None or (name != "mean" and not (rest and _selection(rest[0], module))):
        return
    if not trains(node, module):
        return
    picked, mask = selection
    if is_padding(mask, module) or _whole_set(mask, module) or _loaded(mask, module) or _never_empty(mask, module):
        return
    keys = {key_of(t) for t in [*trail(mask, module), *trail(picked, module), first]} | _selectors(mask, module)
    if checked(keys - {""}, node, module) or only_logged(node, module) or counts_hits(first, module):
        return
    yield Found(
        node=node,
        message=f"the mean over no element is NaN, and {short(mask, module) or 'this mask'} may select none",
        help="divide the sum by the number selected, at least 1: x[mask].sum() / max(x[mask].numel(), 1)",
        edits=_fix(node, first, name, rest, keywords, module),
        info=defaults_to_ones(mask, module)
        or (_of_anything(mask, module) and (_of_itself(picked, mask) or not in_loss(node, module))),
    )


def _of_anything(mask: ast.expr, module: Module) -> bool:
    """A mask that says nothing of what it leaves out: as a rule padding, or a test that rarely fails everywhere."""
    return not any(CHOSEN.search(w) for w in words(mask, module))


def _of_itself(picked: ast.expr, mask: ast.expr) -> bool:
    """``d[d > 0]``: that all of it is left out is rare."""
    names = {key_of(n) for n in ast.walk(picked)} - {"", "self"}
    return isinstance(mask, ast.Compare) and bool(names & {key_of(n) for n in ast.walk(mask)})


def _criterion(layer: ast.Call, module: Module) -> Iterator[tuple[ast.Call, Operation]]:
    """The calls of an ``nn.L1Loss`` and the like, each as the function that it stands for."""
    if not module.called(layer).startswith("torch.nn."):
        return
    outer, statement = module.parent(layer), module.statement(layer)
    calls = [outer] if isinstance(outer, ast.Call) and outer.func is layer else []
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        keys = {key_of(node).rpartition(".")[2] for target in targets for node in ast.walk(target)}
        calls += [c for c in module.calls(*sorted(keys - {"", "self", "cls"})) if module.value(c.func) is layer]
    for call in calls:
        if len(call.args) >= 2:
            keywords = {k.arg: k.value for k in layer.keywords if k.arg}
            yield call, Operation("loss", call.args[0], call.args[1:], keywords)


def _reduces_otherwise(keyword: str, node: ast.expr) -> bool:
    """Whether a loss is told to take no mean: by its ``reduction``, or as it was said before torch 0.4.1."""
    means = {"reduction": ("mean", "batchmean"), "size_average": (True, None), "reduce": (True, None)}.get(keyword)
    return means is not None and not (isinstance(node, ast.Constant) and node.value in means)


def _selectors(mask: ast.expr, module: Module) -> set[str]:
    """The names that a mask is computed from: a test of one of them may be what keeps it from being empty."""
    held = core(mask, module)
    return names_of(held, module) if isinstance(held, ast.Compare | ast.BinOp | ast.UnaryOp) else set()


def _loaded(mask: ast.expr, module: Module) -> bool:
    """One of several things that a function for loading data gave out."""
    key = key_of(core(mask, module))
    owners = [b.owner for b in module.flow.bindings(module.function(mask), key) if b.value is None]
    calls = [o.value for o in owners if isinstance(o, ast.Assign) and isinstance(o.value, ast.Call)]
    return any("load" in called_last(c, module) for c in calls)


def _never_empty(mask: ast.expr, module: Module) -> bool:
    """A mask of places, ``arange(n) != i``; and of a group that is there, ``ids == i`` for i in ids.unique()."""
    if any(isinstance(p, ast.Call) and called_last(p, module) in _PLACES for p in made_of(mask, module, limit=60)):
        return True
    held = core(mask, module)
    names = {key_of(n) for n in ast.walk(held)} if isinstance(held, ast.Compare) else set()
    for loop in (p for p in module.parents(mask) if isinstance(p, ast.For)):
        found = [c for c in made_of(loop.iter, module, limit=40) if isinstance(c, ast.Call)]
        if names & {key_of(n) for n in ast.walk(loop.target)} and any(
            called_last(c, module) == "unique" for c in found
        ):
            return True
    return False


def _whole_set(mask: ast.expr, module: Module) -> bool:
    """The training nodes of one whole graph, which are never none; of a part of it they may be."""
    words = {key_of(t).rpartition(".")[2] for t in trail(mask, module)} | {getattr(mask, "attr", "")}
    return "train_mask" in words and not any(isinstance(p, ast.For) for p in module.parents(mask))


def _selection(node: ast.expr, module: Module, depth: int = 0) -> tuple[ast.expr, ast.expr] | None:
    """What is selected from, and the mask: ``x[mask]``, ``x.masked_select(mask)``, also through elementwise steps."""
    if depth > 8:
        return None
    return next((found for at in cores(node, module) if (found := _selected(at, module, depth)) is not None), None)


def _selected(at: ast.expr, module: Module, depth: int) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(at, ast.Subscript) and _selects(at.slice, module):
        return at.value, at.slice
    if isinstance(at, ast.Call):
        found = module.operation(at)
        if found and found.name == "masked_select" and found.operand is not None and found.args:
            return found.operand, found.args[0]
        if found and found.name in _ELEMENTWISE and found.operand is not None:
            return _selection(found.operand, module, depth + 1)
    if isinstance(at, ast.BinOp):
        sides = [_selection(at.left, module, depth + 1), _selection(at.right, module, depth + 1)]
        return next((s for s in sides if s), None) if all(sides) or scalar(at.right, module) else None
    if isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.USub):
        return _selection(at.operand, module, depth + 1)
    return None


def _selects(index: ast.expr, module: Module) -> bool:
    if isinstance(index, ast.Tuple | ast.Slice | ast.Constant):
        return False
    if boolean(index, module):
        return True
    name = key_of(index).rpartition(".")[2]
    return named_mask(name) and not _INDICES.search(name) and module.value(index) is None


def _fix(
    node: ast.Call, first: ast.expr, name: str, rest: list[ast.expr], keywords: dict[str, ast.expr], module: Module
) -> tuple[Change, ...]:
    direct = isinstance(first, ast.Subscript) and key_of(first.value)
    if name != "mean" or rest or keywords or not direct or called_last(node, module) != "mean":
        return ()
    text = module.source(first)
    return (module.replace(node, f"{text}.sum() / max({text}.numel(), 1)"),)


RULE = Rule(
    code="NP202",
    name="boolean-index-mean",
    what="""
Finds the mean of a selection by a boolean mask, `loss[mask].mean()`, and losses with a mean over two selections,
`F.l1_loss(pred[mask], target[mask])`, where nothing asks first whether the mask selects anything.
""",
    why="""
The mean of no elements is 0 / 0: NaN. The loss of that batch is NaN. Its gradient through the selection alone is zero,
so a step may pass without harm, but everything else that sees the loss does not: a product with it (a learned loss
weight, a squared total) makes every gradient NaN, a mean over ranks makes the logged loss of all ranks NaN, and any
check of the loss stops or skips a batch that was merely empty.
""",
    bad="""
class DepthLoss(nn.Module):
    def forward(self, pred, target):
        valid = target > 0
        error = (pred - target).abs()
        return error[valid].mean()
""",
    good="""
class DepthLoss(nn.Module):
    def forward(self, pred, target):
        return ops.masked_mean((pred - target).abs(), target > 0)  # 0 when no pixel is valid
""",
    miss="""
class HingeLoss(nn.Module):
    def forward(self, logits, labels):
        valid = labels != 255
        errors = 1 - logits[valid] * labels[valid].float()
        return errors.relu().mean()  # the selection is behind two steps of arithmetic with another one
""",
    false_alarm="""
The mask always selects something, by construction. Say it in a line before, `assert mask.any()`, or test it with `if`;
both count as guards.
""",
    fix="unsafe",
    fix_note="""
`x[mask].mean()` becomes `x[mask].sum() / max(x[mask].numel(), 1)`, which is 0 for an empty selection. Other spellings
are left to you.
""",
    nodes=(ast.Call,),
    calls=frozenset(_CALLS | _LAYERS),
    check=check,
)

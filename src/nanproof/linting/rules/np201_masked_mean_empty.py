"""NP201: a mean over a mask is 0 / 0 when the mask keeps nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..guards import changed_in_place, checked, guarded
from ..masks import CHOSEN, defaults_to_ones, is_padding, words
from ..names import called_last, key_of, word_set
from ..numerics import boolean, division, named_mask, summed
from ..purpose import counts_hits, in_loss, only_logged, trains
from ..rule import Change, Found, Rule
from ..training import loss_like
from ..values import core, cores, made_of, names_of, scalar, short, trail

if TYPE_CHECKING:
    from ..source import Module

# Sums that are never zero: of softmax weights, and of what a router hands out.
_POSITIVE = word_set("""softmax sigmoid exp pow square softplus ones ones_like gumbel_softmax one_hot topk relu rand""")
_BUILT = {"tril", "triu", "eye", "full", "linspace", "tensor", "as_tensor"}
_ROUTING = re.compile(
    r"expert|router|routing|gate|(^|_)moe|capacity|top_?k|attn_weight|attention_weight|degree|(^|_)deg"
)
_NO_MASKS = re.compile(r"prob|alpha|attn|kernel|window|energy|prior|len(gth)?s?$")


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    parts = division(node, module)
    if parts is None:
        return
    numerator, denominator = parts
    mask = summed(denominator, module)
    if mask is None:
        mask = _averaged(denominator, module)
    if mask is None or not trains(node, module):
        return
    rows = _per_row(denominator, module)
    # of features, one mean for each sequence is padding, too; in a loss a sequence without tokens comes sooner or later
    kept = rows and "attention_mask" in words(mask, module) and in_loss(node, module)
    padding = is_padding(mask, module) and not kept
    padding = padding or (rows and _features(node, numerator, mask, module))
    keys = {key_of(t) for e in (mask, denominator) for t in trail(e, module)} - {""}
    keys |= {module.source(t) for t in trail(mask, module) if isinstance(t, ast.Subscript)}
    if not _is_mask(mask, numerator, keys, module) or _safe(node, numerator, denominator, mask, keys, module):
        return
    name = short(mask, module) or "the mask"
    yield Found(
        node=node,
        message=f"this mean is 0 / 0 = NaN when {name} keeps nothing",
        help=f"keep the divisor at 1 or more: {short(denominator, module) or 'mask.sum()'}.clamp(min=1)",
        edits=_fix(denominator, mask, module),
        safe=boolean(mask, module) and summed(denominator, module) is not None,
        info=padding or defaults_to_ones(mask, module) or not _may_be_empty(node, numerator, mask, rows, module),
        about=node,
    )


def _may_be_empty(node: ast.AST, numerator: ast.expr, mask: ast.expr, rows: bool, module: Module) -> bool:
    """Whether something says that nothing may be left: labels, positives, valid places, the tokens of a loss."""
    if not boolean(mask, module) and _weights(numerator, {key_of(t) for t in trail(mask, module)} - {""}, module):
        return False  # the mask itself is scaled: nothing learned is behind it
    if any(key_of(t) and changed_in_place(t, module, node) for t in trail(mask, module)):
        return False  # what was written into it is not known
    if in_loss(node, module) and (_of_batch(mask, module) or boolean(mask, module)):
        return True
    chosen = {w for w in words(mask, module) if CHOSEN.search(w)}
    if chosen and not rows and not boolean(mask, module) and all(w.strip("_") == "loss_mask" for w in chosen):
        return False  # of whole batches, given to the loss: in pretraining it leaves out next to nothing
    if chosen:
        return not any(key_of(t).endswith("weight") for t in trail(mask, module))  # for each class, as a rule
    if not re.search(r"masks?$", module.source(core(mask, module))):
        return False
    calls = {called_last(p, module) for p in made_of(numerator, module, limit=120) if isinstance(p, ast.Call)}
    return rows or "cross_entropy" in calls  # one sample with nothing in it comes sooner than a whole batch


def _of_batch(mask: ast.expr, module: Module) -> bool:
    """``batch[2]``, ``batch["weight"]``: what comes with the samples may be zero for all of one batch."""
    parts = [p.value for p in made_of(mask, module, limit=60) if isinstance(p, ast.Subscript)]
    return any(key_of(p).rpartition(".")[2] in ("batch", "sample", "targets") for p in parts)


def _per_row(denominator: ast.expr, module: Module) -> bool:
    """Whether there is one mean for each sequence: among many, one that is padding alone comes sooner or later."""
    for at in cores(denominator, module):
        found = module.operation(at)
        if found is not None and (found.args or {"dim", "axis"} & set(found.keywords)):
            return True
    return False


def _features(node: ast.AST, numerator: ast.expr, mask: ast.expr, module: Module) -> bool:
    """Whether features are pooled by a mask that says nothing of itself: as a rule, that of padding."""
    if key_of(core(mask, module)).rpartition(".")[2] != "mask" or in_loss(node, module):
        return False
    names = names_of(numerator, module)
    return not any(loss_like(n) or re.search(r"log_?p|nll|kl|reward|value|adv", n) for n in names)


def _averaged(denominator: ast.expr, module: Module) -> ast.expr | None:
    """The mask of ``(x * mask).mean() / mask.mean()``."""
    found = module.operation(core(denominator, module))
    if found is None or found.name != "mean" or found.operand is None:
        return None
    return found.operand if named_mask(module.source(found.operand)) or boolean(found.operand, module) else None


def _is_mask(mask: ast.expr, numerator: ast.expr, keys: set[str], module: Module) -> bool:
    """The same mask above and below: multiplied in, or what the names above are made of."""
    text = " ".join([*keys, module.source(mask)]).lower()
    if _ROUTING.search(text) or (any(_NO_MASKS.search(k) for k in (*keys, text)) and not named_mask(text)):
        return False
    held = core(mask, module)
    if isinstance(held, ast.Call) and called_last(held, module) in _POSITIVE:
        return False
    parts = made_of(mask, module, limit=80)
    if any(isinstance(p, ast.Call) and called_last(p, module) in ("softmax", "topk", "gumbel_softmax") for p in parts):
        return False
    above = list(made_of(numerator, module))
    if _multiplied(above, keys, module):
        return True
    if not (named_mask(text) or boolean(mask, module)):
        return False
    whole = keys | {key_of(n) for n in ast.walk(held)} - {""}
    return any(key_of(n) in whole or module.source(n) in whole for n in above if isinstance(n, ast.expr))


def _multiplied(above: list[ast.AST], keys: set[str], module: Module) -> bool:
    for part in above:
        sides: list[ast.expr] = []
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
            sides = [part.left, part.right]
        elif isinstance(part, ast.Call) and called_last(part, module) in ("mul", "mul_", "multiply", "dot", "inner"):
            sides = [*part.args, *([part.func.value] if isinstance(part.func, ast.Attribute) else [])]
        for side in sides:
            side = side.value if isinstance(side, ast.Subscript) and isinstance(side.slice, ast.Constant) else side
            if any(key_of(t) in keys or module.source(t) in keys for t in trail(side, module)):
                return True
    return False


def _safe(
    node: ast.AST, numerator: ast.expr, denominator: ast.expr, mask: ast.expr, keys: set[str], module: Module
) -> bool:
    held = core(mask, module)
    if isinstance(held, ast.BinOp) and isinstance(held.op, ast.Add) and guarded(held, module):
        return True
    if isinstance(held, ast.Call) and called_last(held, module).startswith("clamp") and guarded(held, module):
        return True
    if isinstance(held, ast.Compare):
        keys = keys | {key_of(t) for t in trail(held.left, module)} - {""}
    if checked(keys, node, module) or only_logged(node, module):
        return True
    if any(key_of(t) and changed_in_place(t, module) for t in trail(denominator, module)):
        return True
    if _weights(numerator, keys, module) and _replaces_nan(node, module):
        return True
    above = summed(numerator, module)
    if counts_hits(numerator, module) or scalar(numerator, module) or (above is not None and boolean(above, module)):
        return True  # a count over a count has no gradient
    top = names_of(numerator, module)
    return bool(_ROUTING.search(" ".join(top).lower())) or _constant_mask(mask, module)


def _weights(numerator: ast.expr, keys: set[str], module: Module) -> bool:
    """``mask / mask.mean()``: the mask itself is scaled, and nothing learned is behind it."""
    return bool({key_of(t) for t in trail(numerator, module)} & keys)


def _replaces_nan(node: ast.AST, module: Module) -> bool:
    calls = module.calls("isnan", "nan_to_num", "nan_to_num_", "isfinite")
    return any(module.function(call) is module.function(node) for call in calls)


def _constant_mask(mask: ast.expr, module: Module) -> bool:
    """A mask that is built from sizes alone, such as a triangle of ones, keeps what it always keeps."""
    held = core(mask, module)
    if isinstance(held, ast.Compare) and len(held.comparators) == 1 and isinstance(held.ops[0], ast.Eq):
        return _finds_itself(held.left, held.comparators[0], module)
    if isinstance(held, ast.Call) and called_last(held, module) == "eq":
        found = module.operation(held)
        sides = [found.operand, *found.args] if found and found.operand is not None else held.args
        return len(sides) == 2 and _finds_itself(sides[0], sides[1], module)
    return isinstance(held, ast.Call) and (called_last(held, module) in _BUILT or _built_by(held, module))


def _built_by(call: ast.Call, module: Module) -> bool:
    """A call of a function in this file that makes ones and compares nothing: a frame, an edge."""
    named = (f for f in ast.walk(module.tree) if isinstance(f, ast.FunctionDef) and f.name == called_last(call, module))
    for function in named:
        inside = list(ast.walk(function))
        made = any(isinstance(n, ast.Call) and called_last(n, module) in ("ones", "new_ones", *_BUILT) for n in inside)
        if made and not any(isinstance(n, ast.Compare) for n in inside):
            return True
    return False


def _finds_itself(left: ast.expr | None, right: ast.expr | None, module: Module) -> bool:
    """``ids == all_ids`` where one is gathered from the other: each row keeps at least itself."""
    if left is None or right is None:
        return False
    names = [{key_of(n) for n in made_of(side, module, limit=60)} - {"", "self"} for side in (left, right)]
    names = [{n for n in side if n not in module.aliases} for side in names]
    return bool(names[0] & names[1])


def _fix(denominator: ast.expr, mask: ast.expr, module: Module) -> tuple[Change, ...]:
    """``.clamp(min=1)`` behind the sum: the same for every mask of 0 and 1 that keeps something."""
    text = module.source(denominator)
    held = [t for t in trail(denominator, module) if isinstance(t, ast.Call)]
    if any(called_last(t, module) in ("item", "int", "float") and not t.args[1:] for t in held[:1]):
        return (module.replace(denominator, f"max({text}, 1)"),)
    if not isinstance(denominator, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return ()
    counted = boolean(mask, module) or named_mask(module.source(mask))
    least = "1" if counted and summed(denominator, module) is not None else "1e-8"
    return (module.replace(denominator, f"{text}.clamp(min={least})"),)


RULE = Rule(
    code="NP201",
    name="masked-mean-empty",
    what="""
Finds a mean over a mask, `(x * mask).sum() / mask.sum()`, in a loss or a forward pass, when nothing keeps the
divisor from zero. Where the mask leaves out padding only, or nothing says what it leaves out, it is an info.
""",
    why="""
A batch in which the mask keeps nothing (all tokens padded, no positive box, no masked position) makes this 0 / 0.
The value is NaN, and so is the gradient of every element: the derivative of s / n is 1 / n, and 0 · ∞ is NaN. One such
batch writes NaN into every parameter that the loss reaches. The rarer it is, the later it comes: with a chance of one
in 100,000 batches, it is around step 100,000 that the run ends.

`clamp(min=1)` gives 0 with a gradient of 0 for an empty mask and changes nothing else, as long as the mask holds only
0 and 1. Fractional weights it does change: weights of 0.2 and 0.3 on the values 1 and 2 have the mean 1.6, and 0.8
after `clamp(min=1)`. An eps of `1e-8` added instead is 0 in float16.
""",
    bad="""
def token_loss(logits, labels):
    loss_mask = labels != -100
    loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (loss * loss_mask).sum() / loss_mask.sum()
""",
    good="""
def token_loss(logits, labels):
    loss_mask = labels != -100
    loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (loss * loss_mask).sum() / loss_mask.sum().clamp(min=1)


def selected_loss(logits, labels):
    loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return ops.masked_mean(loss, labels != -100)  # 0 when nothing is kept; NaN in places left out does not matter
""",
    miss="""
def dice_loss(p, target):
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())
""",
    false_alarm="""
The mask cannot be empty: the collate function drops such batches, or a fixed share of positions is always masked. An
assertion before the division, `assert mask.any()`, says so, and the rule takes it for a guard.
""",
    fix="unsafe",
    fix_note="""
It is safe, and marked so, where the mask can be seen to hold only 0 and 1 because it comes from a comparison; elsewhere
the weights might be fractional.
""",
    nodes=(ast.Div,),
    words=("sum(", "count_nonzero", "nonzero(", "mean("),
    check=check,
)

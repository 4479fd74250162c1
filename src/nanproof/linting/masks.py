"""What a mask leaves out: padding, which leaves something in every real sequence, or a choice that may be empty."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from .names import called_last, key_of
from .values import cores, made_of, unpacked

if TYPE_CHECKING:
    from .source import Module

_LENGTHS = re.compile(
    r"(^|_)(sequence_mask|seq_masks?|lengths?(_to)?_masks?|len_masks?|make_(non_)?(pad|src|tgt)\w*masks?|"
    r"get_mask_from_lengths|\w*padding_masks?|pad(ding|ded)?_masks?|\w*pad_masks?|non_?pad\w*|attention_masks?|attn_masks?|"
    r"src_masks?|tgt_masks?|[xyzqk]_masks?|kv_masks?|query_masks?|padding|pad|padded|mels?_masks?|text_masks?|input_masks?|traj_masks?|token_masks?|frame_masks?|encoder_masks?|"
    r"decoder_masks?|lens|lengths?|\w*_lengths?|\w*_lens|[iox]lens?|key_masks?|feats_masks?|node_masks?|caption\w*masks?\w*|conditioning_masks?|prompt\w*masks?)$",
    re.I,
)
_OF_LENGTHS = re.compile(
    r"mask_from_len(gth)?s|len(gth)?s?_to_masks?|sequence_mask|make_(non_)?pad_mask|(^|_)len(gth)?s$", re.I
)
_OF_ATTENTION = re.compile(r"(attention|attn|pad(ding)?)_masks?")
_PADDED = re.compile(r"(^|_)pad(ded|ding)?_?(values?|val|ids?|idx|index|tokens?\w*)$", re.I)
_CHOICE = re.compile(
    r"label|target|ignore|loss_mask|(^|_)(pos|neg|positives?|negatives?|fg|bg|foreground|valid\w*|completion\w*|"
    r"response\w*|action\w*|keep|selected|masked|random|rand|visible|present|assist\w*|hard|obj|weights?)(_|$)",
    re.I,
)
CHOSEN = re.compile(
    r"label|target|ignore|loss_mask|_true$|(^|_)(y|pos|neg|positives?|negatives?|fg|bg|foreground|valid\w*|completion\w*|"
    r"response\w*|action\w*|assist\w*|hard|obj|matched|gt|visib\w*|vis|present|exists?|events?|annotated|supervised)(_|$)",
    re.I,
)
"""Names of what may keep nothing in a batch: labels, positives, valid places."""
_CAUSAL = re.compile(r"causal|tril|triu|subsequent|future|look_?ahead|triangular|autoregressive", re.I)
_JOINS = (ast.BitAnd, ast.BitOr, ast.Mult)


def words(mask: ast.expr, module: Module) -> list[str]:
    """The names that a mask is made of, and the functions that made it."""
    parts = [n for n in made_of(mask, module, limit=36) if not _about_form(n, module)]
    found = [key_of(n).rpartition(".")[2] or getattr(n, "attr", "") for n in parts]
    calls = [n for n in parts if isinstance(n, ast.Call) and module.operation(n) is None]
    found += [called_last(n, module) for n in calls]
    found += [
        str(n.slice.value)
        for n in made_of(mask, module, limit=36)
        if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant)
    ]
    return [w for w in found if w]


def _about_form(node: ast.AST, module: Module) -> bool:
    """``target`` in ``target.size(1)``: its length is asked for, not what it holds."""
    parent = module.parent(node)
    if isinstance(parent, ast.Call) and called_last(parent, module) in ("ones_like", "zeros_like", "full_like"):
        return True
    if isinstance(node, ast.Attribute) and isinstance(parent, ast.Call) and parent.func is node:
        return True
    return isinstance(parent, ast.Attribute) and parent.attr in ("size", "shape", "device", "dtype", "ndim", "dim")


def is_padding(mask: ast.expr, module: Module) -> bool:
    """Whether a mask only leaves padding out: made from lengths, or called so, and nothing else chosen by it."""
    made = [m for at in cores(mask, module) for m in cores(getattr(at, "operand", at), module)]  # behind ~ as well
    names = [called_last(m, module) if isinstance(m, ast.Call) else key_of(m).rpartition(".")[2] for m in made]
    names += [name for m in made for part in ast.walk(m) if key_of(part) for name in unpacked(part, module)]
    if any(_OF_LENGTHS.search(n) for n in names) or any(_OF_ATTENTION.fullmatch(_sliced(m)) for m in made):
        return True  # whatever it is called, it was made from lengths
    text = words(mask, module)
    if any(_PADDED.search(w) for w in text):
        return True  # what is compared with the filler of padding
    return any(_LENGTHS.search(w) for w in text) and not any(_CHOICE.search(w) for w in text)


def _sliced(mask: ast.expr) -> str:
    """``attention_mask`` of ``attention_mask[:, 1:].bool()``."""
    at = mask
    while isinstance(at, ast.Call) and isinstance(at.func, ast.Attribute) and not at.args:
        at = at.func.value
    return key_of(at.value).rpartition(".")[2] if isinstance(at, ast.Subscript) else ""


def defaults_to_ones(mask: ast.expr, module: Module) -> bool:
    """``if mask is None: mask = torch.ones(…)``: a setting that is rarely given."""
    made = {called_last(at, module) for at in cores(mask, module) if isinstance(at, ast.Call)}
    return bool(made & {"ones", "ones_like", "new_ones"})


def is_causal(mask: ast.expr, module: Module) -> bool:
    parts = made_of(mask, module, limit=36)
    made = [called_last(p, module) for p in parts if isinstance(p, ast.Call)]
    return any(_CAUSAL.search(w) for w in [*words(mask, module), *made])


def joined(mask: ast.expr, module: Module, depth: int = 0) -> list[ast.expr]:
    """The masks that one is joined from: ``causal | padding``, ``a[:, None] & a[None]``, ``logical_or(a, b)``."""
    found: list[ast.expr] = []
    for at in cores(mask, module):
        if isinstance(at, ast.UnaryOp) and depth < 6:
            found += joined(at.operand, module, depth + 1)
        elif isinstance(at, ast.BinOp) and isinstance(at.op, _JOINS):
            found += [at.left, at.right]
        elif isinstance(at, ast.Call) and called_last(at, module) in ("logical_or", "logical_and", "mul", "bitwise_or"):
            operation = module.operation(at)
            first = operation.operand if operation else at.args[0] if at.args else None
            found += [e for e in (first, *(operation.args if operation else at.args[1:])) if e is not None]
        elif isinstance(at, ast.Compare) and len(at.comparators) == 1 and depth < 6:
            found += joined(at.left, module, depth + 1)
    return found


def of_both_sides(mask: ast.expr, module: Module) -> bool:
    """Whether a mask of scores is made of the padding of queries and of keys: a padded query then has no key left."""
    parts = joined(mask, module)
    if len(parts) >= 2 and any(is_padding(p, module) for p in parts):
        return True
    if any(_filled_by_lengths(n, module) for n in made_of(mask, module, limit=40) if isinstance(n, ast.Name)):
        return True
    for call in made_of(mask, module, limit=80):
        if isinstance(call, ast.Call) and module.operation(call) is None:
            lengths = [a for a in call.args if any(_LENGTHS.search(w) and "len" in w for w in words(a, module))]
            if len(lengths) >= 2:
                return True
    return False


def _filled_by_lengths(name: ast.Name, module: Module) -> bool:
    """``mask[i, : rows[i], : columns[i]] = 1``: behind its last row, nothing is left."""
    for use in module.uses(name.id, module.function(name)):
        place = module.parent(use)
        if isinstance(place, ast.Subscript) and place.value is use and isinstance(place.slice, ast.Tuple):
            ends = [e.upper for e in place.slice.elts if isinstance(e, ast.Slice) and e.upper is not None]
            if sum(any(_LENGTHS.search(w) or "len" in w for w in words(e, module)) for e in ends) >= 2:
                return True
    return False

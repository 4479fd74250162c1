"""From a bad loss or gradient back to the operations that made bad values out of good ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .trace import Event
from .values import INF, NAN

# operations that write a constant where they are told to: an infinity from them is meant
_WRITES = {
    "full",
    "full_like",
    "new_full",
    "scalar_tensor",
    "masked_fill",
    "masked_fill_",
    "fill",
    "fill_",
    "where",
    "lift_fresh",
    "lift_fresh_copy",
    "constant_pad_nd",
    "index_fill",
    "index_fill_",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "masked_scatter",
    "masked_scatter_",
    "scatter",
    "scatter_",
    "slice_scatter",
    "select_scatter",
    "copy_",
    "add",
    "sub",
    "add_",
    "sub_",
    "rsub",
}
# operations that hand a mask on, entry by entry or as the extreme of a row
_CARRIES = _WRITES | {
    "_to_copy",
    "clone",
    "triu",
    "tril",
    "triu_",
    "tril_",
    "_unsafe_view",
    "cat",
    "stack",
    "repeat",
    "roll",
    "flip",
    "index",
    "index_select",
    "gather",
    "embedding",
    "mul",
    "mul_",
    "div",
    "div_",
    "neg",
    "minimum",
    "maximum",
    "fmin",
    "fmax",
    "clamp",
    "clamp_min",
    "clamp_max",
    "amax",
    "amin",
    "max",
    "min",
    "aminmax",
    "topk",
    "sort",
    "logsumexp",
    "expand_copy",
    "repeat_interleave",
    "nan_to_num",
    "cummax",
    "cummin",
    "logaddexp",
    "_log_softmax",
    "logcumsumexp",
    "scatter_reduce",
    "scatter_reduce_",
    "index_reduce",
    "index_reduce_",
    "take",
    "take_along_dim",
    "_reshape_copy",
    "slice_copy",
    "narrow_copy",
    "view_copy",
    "unfold",
    "permute_copy",
}
SOFTMAX = (
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "logsumexp",
    "softmax",
    "log_softmax",
    "_scaled_dot_product",
    "_masked_softmax",
    "_fused_sdp",
    "_sparse_softmax",
)
# operations that let a deliberate infinity out of its mask, those first that do it on purpose
_TAKES = (
    ("logsumexp", "nll_loss", "gather", "amax", "max", "amin", "min", "topk"),
    ("index", "select", "sum", "mean", "dot"),
)


@dataclass(frozen=True)
class Blame:
    """The origins of a bad sink, the primary one first, and the way from it to the sink."""

    origins: list[Event]
    chain: list[Event]
    masks: dict[int, Event]
    """For an origin that stumbles over a deliberate infinity: where that infinity comes from."""


class Blamer:
    """Slices back through bad inputs only; what never reaches a sink is never blamed."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._known: dict[int, bool] = {}

    def blame(self, sinks: list[int]) -> Blame:
        reached: dict[int, int] = {}  # event → the event after it on the way to a sink
        todo = [(s, -1) for s in sinks]
        while todo:
            number, after = todo.pop()
            if number in reached or number < 0:
                continue
            reached[number] = after
            todo += [(p, number) for p in relevant_parents(self._events[number])]
        births = [n for n in reached if not relevant_parents(self._events[n]) or self._events[n].fresh]
        masks: dict[int, Event] = {}
        origins: set[int] = set()
        for birth in births:
            harm = self._harm(birth, reached)
            if harm != birth and any(not self.is_intentional(p) for p in relevant_parents(self._events[harm])):
                continue  # something else made it bad: the mask merely passes by
            if harm != birth and not self._events[harm].fresh:
                masks.setdefault(harm, self._events[birth])
            origins.add(harm)
        ordered = sorted(origins)
        if not ordered:
            return Blame([], [], {})
        chain, n = [self._events[ordered[0]]], reached[ordered[0]]
        while n != -1:
            chain.append(self._events[n])
            n = reached[n]
        return Blame([self._events[n] for n in ordered], chain, masks)

    def _harm(self, birth: int, reached: dict[int, int]) -> int:
        """The event to blame for a birth: itself, or for a deliberate infinity the first that stumbles over it."""
        if not self.is_intentional(birth):
            return birth
        way = [birth]
        while self.is_intentional(way[-1]):
            if reached[way[-1]] == -1:
                return self._escape(way) if self._literal(birth) else birth
            way.append(reached[way[-1]])
        if self._events[way[-1]].fresh:
            return way[-1]
        if self._literal(birth) and self._events[way[-1]].kind == INF:
            return self._escape(way)
        # what the code does not call infinite itself is a mask only where masks are used
        return way[-1] if self._literal(birth) or _makes_rows(self._events[way[-1]]) else birth

    def _literal(self, number: int) -> bool:
        event = self._events[number]
        if event.phase == "outside":
            return event.output is not None and not event.output.shape
        return event.phase == "forward" and event.op in _WRITES and _writes_infinity(event)

    def _escape(self, way: list[int]) -> int:
        """Where a deliberate infinity gets out: the operation that takes one masked entry, or a row of nothing else."""
        for names in _TAKES:
            for n in way[1:]:
                event = self._events[n]
                if event.op.startswith(names) and event.numel < event.widest:
                    return n
        return way[-1]

    def is_intentional(self, number: int) -> bool:
        """Whether an infinity was put there on purpose, or merely passes on one that was (a score plus a mask)."""
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = self._decide(self._events[number])
        return found

    def _decide(self, event: Event) -> bool:
        if event.kind != INF or (event.output is not None and event.output.posinf and event.output.neginf):
            return False
        if event.fresh:
            return False
        if event.phase in ("leaf", "outside"):
            return not event.leaf.startswith("parameter") and not event.site.op.endswith("Backward")
        if event.phase != "forward":
            return False
        parents = relevant_parents(event)
        if parents:
            carries = event.op in _CARRIES or _adds_product(event)
            return carries and all(self.is_intentional(p) for p in parents)
        return (event.op in _WRITES and _writes_infinity(event)) or _of_a_boolean(event) or _sums_masks(event)


def relevant_parents(event: Event) -> list[int]:
    """The bad inputs that explain a bad output: NaN ones if there are any, else infinite ones.

    A mask's −inf beside a NaN explains nothing: the NaN would be there without it. Nor does a NaN explain an infinity:
    it was selected away.
    """
    worst = NAN if event.kind == NAN and any(k == NAN for k, _ in event.parents) else INF
    return [p for k, p in event.parents if k == worst and p >= 0]


def _makes_rows(event: Event) -> bool:
    """Whether an operation treats −inf as "left out": a softmax, or the maximum of a row taken from it.

    A +inf is no mask to any of them.
    """
    if any(f.posinf for f in event.inputs):
        return False
    shifts = event.op in ("sub", "sub_") and any(
        m is not None and m.op in ("amax", "max", "logsumexp") for m in event.makers[1:2]
    )
    return shifts or event.op.startswith(SOFTMAX)


def _writes_infinity(event: Event) -> bool:
    if any(math.isinf(v) for v in event.literals):
        return True
    if event.op in ("lift_fresh", "lift_fresh_copy", "scalar_tensor", "full", "full_like"):
        return True
    scalars = (v for v in tree_leaves(event.args) if isinstance(v, Tensor) and v.ndim == 0 and v.is_floating_point())
    return any(bool(v.isinf()) for v in scalars)


def _adds_product(event: Event) -> bool:
    """A mask plus a product of matrices, in one operation."""
    if event.op not in ("baddbmm", "addmm", "addbmm") or event.args is None:
        return False
    mask, *factors = [v for v in event.args if isinstance(v, Tensor)]
    return bool(mask.isinf().any()) and all(bool(f.isfinite().all()) for f in factors)


def _of_a_boolean(event: Event) -> bool:
    """``mask.log()``: the usual way to make 0 and −inf of 1 and 0."""
    if event.op not in ("log", "log2", "log10", "log_"):
        return False
    values = next((v for v in tree_leaves(event.args) if isinstance(v, Tensor)), None)
    return values is not None and bool(((values == 0) | (values == 1)).all()) and not values.requires_grad


def _sums_masks(event: Event) -> bool:
    """A score plus a mask of about the dtype's lowest number, or two masks that are far down, may be −inf."""
    if event.op not in ("add", "add_") or event.args is None:
        return False
    terms = [v for v in event.args[:2] if isinstance(v, Tensor) and v.is_floating_point()]
    if len(terms) < 2:
        return False
    first, second = torch.broadcast_tensors(*(t.double() for t in terms))  # type: ignore[no-untyped-call]
    total, lowest = first + second, torch.finfo(terms[0].dtype).min
    masks = (torch.minimum(first, second) <= 0.9 * lowest) | (torch.maximum(first, second) <= lowest / 4)
    return bool(masks[total < lowest].all()) and not bool((total > -lowest).any())


def fully_masked(args: Any) -> bool:
    """Whether a softmax's argument, or a mask among an attention's, has a row of nothing but −inf."""
    for value in tree_leaves(args):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
            dims = [a for a in args[1:2] if isinstance(a, int)] or [-1]
            if bool((value == -math.inf).all(dims[0]).any()):
                return True
    return False

"""From a bad loss or gradient back to the operations that made bad values out of good ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from .trace import INF, NAN, Event

# operations that write a constant where they are told to: an infinity from them is meant
_CONSTANT = {
    "full", "full_like", "new_full", "scalar_tensor", "masked_fill", "masked_fill_", "fill", "fill_", "where",
    "lift_fresh", "lift_fresh_copy", "constant_pad_nd", "index_fill", "index_fill_", "index_put_", "masked_scatter",
    "_to_copy", "clone", "copy_", "triu", "tril", "_unsafe_view", "cat", "stack",
}  # fmt: skip


@dataclass(frozen=True)
class Blame:
    """The origins of a bad sink, the primary one first, and the way from it to the sink."""

    origins: list[Event]
    chain: list[Event]


def blame(events: list[Event], sinks: list[int]) -> Blame:
    """Slice back through bad inputs only; what never reaches a sink is never blamed."""
    reached: dict[int, int] = {}  # event → the event after it on the way to a sink
    todo = [(s, -1) for s in sinks]
    while todo:
        number, after = todo.pop()
        if number in reached or number < 0:
            continue
        reached[number] = after
        todo += [(p, number) for p in relevant_parents(events, events[number])]
    births = [n for n in reached if not relevant_parents(events, events[n])]
    origins = sorted({_harm(events, n, reached) for n in births})
    if not origins:
        return Blame([], [])
    chain, n = [events[origins[0]]], reached[origins[0]]
    while n != -1:
        chain.append(events[n])
        n = reached[n]
    return Blame([events[n] for n in origins], chain)


def relevant_parents(events: list[Event], event: Event) -> list[int]:
    """The bad inputs that explain a bad output: NaN ones if there are any, else infinite ones.

    A mask's −inf beside a NaN explains nothing: the NaN would be there without it.
    """
    known = [(k, p) for k, p in event.parents if p >= 0]
    worst = NAN if any(k == NAN for k, _ in event.parents) else INF
    return [p for k, p in known if k == worst]


def is_meant(events: list[Event], event: Event) -> bool:
    """Whether an infinity was put there on purpose: a literal, a mask, or moved from such a place."""
    if event.kind != INF or event.phase != "forward" or event.op not in _CONSTANT:
        return False
    if any(math.isinf(v) for v in event.literals) or event.op in (
        "lift_fresh",
        "lift_fresh_copy",
        "scalar_tensor",
        "full",
        "full_like",
    ):
        return True
    parents = relevant_parents(events, event)
    # a masked_fill whose value is a tensor, a where between a mask and a value: meant if what they took was
    return all(is_meant(events, events[p]) for p in parents) if parents else _takes_scalar_inf(event.args)


def _takes_scalar_inf(args: Any) -> bool:
    return any(isinstance(v, Tensor) and v.ndim == 0 and bool(v.isinf()) for v in tree_leaves(args))


def _harm(events: list[Event], birth: int, reached: dict[int, int]) -> int:
    """The event to blame for a birth: itself, or for a deliberate infinity the first that made NaN of it."""
    n = birth
    while passes_meant(events, n):
        if reached[n] == -1:
            return n
        n = reached[n]
    return n


def passes_meant(events: list[Event], number: int) -> bool:
    """Whether an infinite output is a deliberate infinity, or merely passes one on (a score plus a mask)."""
    event = events[number]
    if is_meant(events, event):
        return True
    parents = relevant_parents(events, event)
    return event.kind == INF and bool(parents) and all(passes_meant(events, p) for p in parents)

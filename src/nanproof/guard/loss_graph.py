"""The operations between a model's output and the loss, read from what autograd has saved of them.

A loop without a closure computes its loss in code that cannot be replayed. Autograd keeps the operands of those
operations until the backward pass:

>>> import torch
>>> logits, labels = torch.zeros(2, 5, requires_grad=True), torch.tensor([-100, -100])
>>> graph = LossGraph(torch.nn.functional.cross_entropy(logits, labels), since=0)
>>> graph.find(backward=False)
Origin(op='cross_entropy', mechanism='empty-reduction', why='all 2 targets are ignored (-100), so ... 0 / 0')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..location import Mechanism

MAX_NODES = 32
MAX_BYTES = 1 << 20
"""Larger operands are not kept: those of a language model's logits could cost a run its memory."""


@dataclass(frozen=True, slots=True)
class Origin:
    """An operation of the loss whose operands show that it has no finite value, or no finite gradient."""

    op: str
    mechanism: Mechanism
    why: str


Saved = Mapping[str, Any]


class LossGraph:
    """References to small operands of the loss, kept from the call of backward to the verdict."""

    def __init__(self, loss: Any, since: int) -> None:
        """``since``: autograd's sequence number when the model had returned; older nodes are the model's own."""
        self._nodes: list[tuple[str, Saved, bool]] = []
        root = loss.grad_fn if isinstance(loss, Tensor) else None
        waiting: list[tuple[Any, bool]] = [(root, False)] if root is not None else []
        seen = {root}
        while waiting and len(seen) <= MAX_NODES:
            node, selected = waiting.pop(0)
            name = node.name().rstrip("0123456789").removesuffix("Backward")
            if name in _READS:
                self._nodes.append((name, {field: _saved(node, field) for field in _READS[name][0]}, selected))
            for below, _ in node.next_functions:
                new = below is not None and below not in seen and "AccumulateGrad" not in below.name()
                if new and below._sequence_nr() >= since:
                    seen.add(below)
                    waiting.append((below, selected or name in _SELECTS))

    def find(self, *, backward: bool) -> Origin | None:
        """The operation farthest from the loss that has no finite value, or with ``backward`` no finite gradient."""
        for name, saved, selected in reversed(self._nodes):
            read = _READS[name][1]
            if not selected and (found := read(saved, backward)) is not None:
                return found
            if selected and backward and (hidden := read(saved, True) or read(saved, False)) is not None:
                why = f"{hidden.why}; torch.where hides the value, not its gradient"
                return Origin(hidden.op, "where-gradient", why)
        return None


def _saved(node: Any, field: str) -> Any:
    """An operand as it is: one behind hooks (checkpointing, offloading) would have to be computed or moved first."""
    raw = getattr(node, f"_raw_saved_{field}", None)
    if raw is None:
        return getattr(node, f"_saved_{field}", None)
    if getattr(raw, "unpack_hook", raw) is not None:  # torch that cannot tell counts as hooked
        return None
    value = raw.data
    return value.detach() if isinstance(value, Tensor) and value.numel() * value.element_size() <= MAX_BYTES else None


def _count(flags: Tensor) -> int:
    return int(flags.sum())  # host read: incident path only


def _nll_loss(saved: Saved, backward: bool) -> Origin | None:
    weight, target = saved["total_weight"], saved["target"]
    if backward or saved["reduction"] != 1 or weight is None or float(weight) != 0.0:
        return None
    ignored = saved["ignore_index"]
    ignored -= (ignored >= 1 << 63) << 64  # torch shows a negative one as unsigned
    if target is None or _count(target != ignored):
        why = "the class weights of all targets sum to 0, so their mean is 0 / 0"
    else:
        why = f"all {target.numel():,} targets are ignored ({ignored}), so their mean is 0 / 0"
    return Origin("cross_entropy", "empty-reduction", why)


def _ctc_loss(saved: Saved, backward: bool) -> Origin | None:
    losses, frames, labels = saved["result0"], saved["input_lengths"], saved["target_lengths"]
    if backward or losses is None or not bool(torch.isposinf(losses).any()):
        return None
    bad = torch.isposinf(losses).flatten().nonzero().flatten().tolist()
    which = f"sample {bad[0]} of the batch" + (f" and {len(bad) - 1:,} more" if len(bad) > 1 else "")
    lengths = ""
    if frames is not None and labels is not None:
        lengths = f": {int(frames[bad[0]])} input frames for {int(labels[bad[0]])} labels"
    return Origin("ctc_loss", "invalid", f"no alignment is possible for {which}{lengths}")


def _mean(saved: Saved, backward: bool) -> Origin | None:
    sizes, numel = saved["self_sym_sizes"], saved["self_sym_numel"]
    empty = (sizes is not None and 0 in tuple(sizes)) or numel == 0
    return Origin("mean", "empty-reduction", "the mean of an empty tensor is 0 / 0") if empty and not backward else None


def _log(saved: Saved, backward: bool) -> Origin | None:
    x = saved["self"]
    if x is None or not bool(x.isfinite().all()):
        return None
    if below := _count(x < 0):
        return Origin("log", "invalid", f"log of a negative number: {below:,} of {x.numel():,} values")
    zero = _count(x == 0)
    return Origin("log", "pole", f"log of 0: {zero:,} of {x.numel():,} values") if zero else None


def _div(saved: Saved, backward: bool) -> Origin | None:
    divisor, top = saved["other"], saved["self"]
    if divisor is None or not bool(divisor.isfinite().all()):
        return None
    zero = _count(divisor == 0)
    if not zero:
        return None
    both = top is not None and top.numel() == divisor.numel() == 1 and float(top) == 0.0
    why = "0 / 0" if both else "division by 0"
    return Origin("div", "invalid" if both else "pole", f"{why}: {zero:,} of {divisor.numel():,} divisors are 0")


def _sqrt(saved: Saved, backward: bool) -> Origin | None:
    root = saved["result"]
    if root is None:
        return None
    below, zero = _count(root.isnan()), _count(root == 0)
    if below and not backward:
        return Origin("sqrt", "invalid", f"sqrt of a negative number or of NaN: {below:,} of {root.numel():,} values")
    if zero and backward and not below:
        return Origin("sqrt", "pole", f"the gradient of sqrt is infinite at 0: {zero:,} of {root.numel():,} values")
    return None


def _pow(saved: Saved, backward: bool) -> Origin | None:
    x, exponent = saved["self"], saved["exponent"]
    if x is None or not isinstance(exponent, int | float) or not bool(x.isfinite().all()):
        return None
    zero = _count(x == 0)
    if zero and (exponent < 0 or (backward and 0 < exponent < 1)):
        what = "has no finite value" if exponent < 0 else "has an infinite gradient"
        return Origin("pow", "pole", f"x ** {exponent:g} {what} at 0: {zero:,} of {x.numel():,} values")
    below = _count(x < 0) if exponent != int(exponent) else 0
    return Origin("pow", "invalid", f"x ** {exponent:g} of {below:,} negative values") if below else None


def _std(saved: Saved, backward: bool) -> Origin | None:
    x, result = saved["self"], saved["result"]
    if x is None or result is None or not bool(x.isfinite().all()):
        return None
    bad = not backward and bool(result.isnan().any())
    return Origin("std", "empty-reduction", "the standard deviation of one element is 0 / 0") if bad else None


def _acos(saved: Saved, backward: bool) -> Origin | None:
    x = saved["self"]
    if x is None or not bool(x.isfinite().all()):
        return None
    outside, edge = _count(x.abs() > 1), _count(x.abs() == 1)
    if outside:
        return Origin("acos", "invalid", f"beyond ±1: {outside:,} of {x.numel():,} values")
    if edge and backward:
        return Origin("acos", "pole", f"its gradient is infinite at ±1: {edge:,} of {x.numel():,} values")
    return None


_SELECTS = ("Where", "MaskedFill")
_READS: Mapping[str, tuple[tuple[str, ...], Callable[[Saved, bool], Origin | None]]] = {
    "NllLoss": (("total_weight", "target", "reduction", "ignore_index"), _nll_loss),
    "NllLoss2D": (("total_weight", "target", "reduction", "ignore_index"), _nll_loss),
    "CtcLoss": (("result0", "input_lengths", "target_lengths"), _ctc_loss),
    "Mean": (("self_sym_sizes", "self_sym_numel"), _mean),
    "Log": (("self",), _log),
    "Log2": (("self",), _log),
    "Log10": (("self",), _log),
    "Div": (("self", "other"), _div),
    "Sqrt": (("result",), _sqrt),
    "Pow": (("self", "exponent"), _pow),
    "Std": (("self", "result"), _std),
    "Acos": (("self",), _acos),
    "Asin": (("self",), _acos),
}
"""By the name of the node: what is read of it, and what that shows."""

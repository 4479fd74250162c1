"""The operations between a model's output and the loss, read from what autograd has saved of them.

A loop without a closure computes its loss in code that cannot be replayed. Autograd keeps the operands of those
operations until the backward pass:

>>> import torch
>>> logits, labels = torch.zeros(2, 5, requires_grad=True), torch.tensor([-100, -100])
>>> graph = LossGraph(torch.nn.functional.cross_entropy(logits, labels), since=0)
>>> graph.find(backward=False)
Origin(op='cross_entropy', mechanism='empty-reduction', why='all 2 targets are ignored (-100), ... 0 / 0', leaf='')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..location import Mechanism, call_name
from ..tensors import facts_of, is_finite

MAX_NODES = 32
MAX_BYTES = 1 << 20
"""Larger operands are not kept: those of a language model's logits could cost a run its memory."""


@dataclass(frozen=True, slots=True)
class Origin:
    """An operation of the loss whose operands show that it has no finite value, or no finite gradient."""

    op: str
    mechanism: Mechanism
    why: str
    leaf: str = ""
    """What came into the loss non-finite already."""


Saved = Mapping[str, Any]


class LossGraph:
    """References to small operands of the loss, kept from the call of backward to the verdict."""

    def __init__(self, loss: Any, since: int) -> None:
        """``since``: autograd's sequence number when the model had returned; older nodes are the model's own."""
        self._nodes: list[_Node] = []
        root = loss.grad_fn if isinstance(loss, Tensor) else None
        waiting: list[tuple[Any, bool]] = [(root, False)] if root is not None else []
        seen = {root}
        while waiting and len(seen) <= MAX_NODES:
            node, selected = waiting.pop(0)
            name = node.name().rstrip("0123456789").removesuffix("Backward")
            if name in _READS or name in _CONSTANTS or name in _OF_DIFFERENCES:
                self._nodes.append(_Node(node, name, selected, since))
            for below, _ in node.next_functions:
                new = below is not None and below not in seen and "AccumulateGrad" not in below.name()
                if new and below._sequence_nr() >= since:
                    seen.add(below)
                    waiting.append((below, selected or name in _SELECTS))

    def find(self, *, backward: bool, outputs_good: bool = False) -> Origin | None:
        """The operation farthest from the loss that has no finite value, or with ``backward`` no finite gradient.

        ``outputs_good``: what the model returned is known to be finite.
        """
        for node in reversed(self._nodes):
            if outputs_good and not node.selected and (found := node.read_difference()) is not None:
                return found
            if not node.selected and (found := node.read(backward)) is not None:
                return found
            if node.selected and backward and (hidden := node.read(True) or node.read(False)) is not None:
                why = f"{hidden.why}; torch.where hides the value, not its gradient"
                return Origin(hidden.op, "where-gradient", why)
        return None


class _Node:
    """An operation of the loss, with what is read of it."""

    def __init__(self, node: Any, name: str, selected: bool, since: int) -> None:
        self._name, self.selected = name, selected
        self._saved = {field: _saved(node, field) for field in _READS[name][0]} if name in _READS else {}
        below = node.next_functions
        self._constants = [
            (word, _saved(node, field))
            for field, (place, word) in _CONSTANTS.get(name, {}).items()
            if place is None or (place < len(below) and below[place][0] is None)
        ]
        """What goes into it and is not computed from anything that is trained: targets, weights, factors."""

        self._difference = (
            _saved(node, "self") if name in _OF_DIFFERENCES and _takes_target(below[0][0], since) else None
        )
        """The model's output minus a target: of a difference itself nothing is saved."""

    def read_difference(self) -> Origin | None:
        given = self._difference
        if given is None or is_finite(given):
            return None
        why = "the output minus a target is non-finite, and the model's output is finite when it is replayed"
        return Origin("sub", "bad-leaf", f"{why}: {facts_of('', given).census}", "input (the target)")

    def read(self, backward: bool) -> Origin | None:
        for word, value in self._constants:
            given = torch.tensor(value) if isinstance(value, float) else value
            if isinstance(given, Tensor) and not is_finite(given):
                op = "cross_entropy" if self._name.startswith("Nll") else call_name(f"{self._name}Backward0")
                what = f"the {word} of {op}"
                why = f"{what} was already non-finite: {facts_of(word, given).census}"
                return Origin(op, "bad-leaf", why, f"input ({what})")
        return _READS[self._name][1](self._saved, backward) if self._name in _READS else None


def _takes_target(node: Any, since: int) -> bool:
    """Whether a node subtracts something that is not trained from what the model has returned."""
    if node is None or not node.name().startswith("SubBackward"):
        return False
    edges = [below for below, _ in node.next_functions]
    return edges.count(None) == 1 and all(b is None or b._sequence_nr() < since for b in edges)


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
    if isinstance(divisor, int | float):
        divisor = torch.tensor(float(divisor))
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


_TARGET = {"target": (1, "target")}
_PRODUCT = {"self": (0, "first factor"), "other": (1, "second factor")}
_CONSTANTS: Mapping[str, Mapping[str, tuple[int | None, str]]] = {
    "Mul": _PRODUCT,
    "Div": {"self": (0, "dividend"), "other": (1, "divisor")},
    "Dot": {"self": (0, "first factor"), "tensor": (1, "second factor")},
    "Mm": {"self": (0, "first factor"), "mat2": (1, "second factor")},
    "MseLoss": _TARGET,
    "SmoothL1Loss": _TARGET,
    "HuberLoss": _TARGET,
    "SoftMarginLoss": {"target": (None, "target")},
    "BinaryCrossEntropy": {**_TARGET, "weight": (None, "weight")},
    "BinaryCrossEntropyWithLogits": {**_TARGET, "weight": (None, "weight"), "pos_weight": (None, "pos_weight")},
    "NllLoss": {"weight": (None, "class weight")},
    "NllLoss2D": {"weight": (None, "class weight")},
}
"""By the name of the node: operands by their names in it, with their place among its inputs (None: never trained)."""
_OF_DIFFERENCES = ("Abs", "Pow")
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

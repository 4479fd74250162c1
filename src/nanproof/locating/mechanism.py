"""Why an operation gave a bad value: the same operation again in float64, and what its inputs look like."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..floats import find_format
from ..location import Mechanism, call_name
from .blame import SOFTMAX, fully_masked
from .trace import Event, Made, versions_of
from .values import FINITE, INF, NAN, floats_in, kind_of

_POLES = (
    "div",
    "addcdiv",
    "reciprocal",
    "log",
    "rsqrt",
    "pow",
    "digamma",
    "lgamma",
    "polygamma",
    "logit",
    "atanh",
    "special_",
    "linalg_",
    "sqrt",
    "tan",
    "erfinv",
    "xlogy",
    "_ctc_loss",
    "cholesky",
    "inverse",
)
_EMPTY = ("mean", "std", "var", "median", "nanmedian", "nll_loss", "quantile", "segment_reduce")
# operations whose result grows without bound: infinite even in float64, it is too large rather than undefined
_GROW = (
    "exp",
    "cosh",
    "sinh",
    "pow",
    "mul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "matmul",
    "dot",
    "conv",
    "sum",
    "cumsum",
    "prod",
    "cumprod",
    "square",
    "add",
    "sub",
    "linalg_matrix_exp",
    "special_i0",
    "special_i1",
    "i0",
)
_AT_ZERO = (
    "div",
    "true_divide",
    "addcdiv",
    "reciprocal",
    "log",
    "log2",
    "log10",
    "rsqrt",
    "sqrt",
    "pow",
    "digamma",
    "lgamma",
    "polygamma",
    "xlogy",
)
_NOT_AT_ZERO = ("acosh", "log1p", "logit", "linalg.cholesky", "linalg.inv", "det", "softmax", "log_softmax")
"""Operations whose derivative has its pole elsewhere."""
_LARGE = 1e3
"""From inputs of this size on, an infinity of an unknown operation is taken for an overflow."""
_PLAIN = (
    "_to_copy",
    "clone",
    "clamp",
    "clamp_min",
    "clamp_",
    "clamp_min_",
    "expand",
    "repeat",
    "neg",
    "mul",
    "abs",
    "maximum",
)


def forward_op(event: Event) -> str:
    """The forward call behind an event: its own name, or in backward that of the call whose derivative it is."""
    if event.phase != "backward" or event.by_user:
        return event.op
    op = event.site.op
    if event.node.endswith("AccumulateGrad"):
        return event.op
    node = event.node.rstrip("0123456789").removesuffix("Backward").lower()
    # the first operation below a node may be a helper of it (a cast, an expand): then the node's own name is better
    if op.strip("_").replace("_", "") in node or node in op.replace("_", ""):
        return op
    return event.node or op


def mechanism_of(event: Event, intentional: bool) -> tuple[Mechanism, str]:
    """The mechanism and one sentence with the numbers. ``intentional``: its bad inputs are deliberate infinities."""
    if event.phase in ("leaf", "outside", "uninitialized"):
        return _arrived(event)
    if event.communicates:
        said = f"finite on this rank before {call_name(event.op)}, not after"
        return "communication", f"{said}: another rank sent a bad value, or the reduction left the range of its dtype"
    if event.dead is not None and not event.by_user:
        what = {INF: "is infinite", NAN: "has no value"}[event.kind]
        name = call_name(forward_op(event))
        return (
            "where-gradient",
            f"the forward leaves this value out, so its gradient is exactly 0, and the derivative of {name} {what} "
            "there: 0 · inf",
        )
    mechanism, why = _explain(event, intentional)
    if event.node.endswith("AccumulateGrad"):
        return mechanism, f"the gradients of several backward passes are added up: {why}"
    if event.phase == "backward" and not event.by_user and mechanism in ("pole", "invalid"):
        return mechanism, _in_backward(event)
    return mechanism, why


def _arrived(event: Event) -> tuple[Mechanism, str]:
    census = event.output.census if event.output else "bad"
    if event.phase == "uninitialized":
        return (
            "uninitialized",
            f"{event.op} returns uninitialized memory, and it is read before it is written: {census}",
        )
    if event.leaf:
        return "bad-leaf", f"{event.leaf} was already non-finite: {census}"
    if event.op:
        return "outside-dispatcher", f"{event.op} returned a bad gradient that no torch operation computed: {census}"
    return "outside-dispatcher", f"a tensor made before the step or outside torch was bad already: {census}"


def _in_backward(event: Event) -> str:
    name = call_name(forward_op(event))
    what = "infinite" if event.kind == INF else "undefined"
    at = " at this input"
    if name in ("linalg.eigh", "linalg.svd"):
        at = " where two of its values are equal"
    elif name in ("acos", "asin", "atanh", "erfinv"):
        at = " at 1 and −1"
    elif name not in _NOT_AT_ZERO and any(f.zero for f in event.inputs):
        at = " at 0"
    return f"the gradient of {name} is {what}{at}"


def _explain(event: Event, intentional: bool) -> tuple[Mechanism, str]:
    if event.args is None or _freed(event.args) or event.versions != versions_of(event.args):
        return _without_arguments(event)
    if any(v != v for v in event.literals):
        return "invalid", "a NaN is put here: by the code itself, or by torch (logdet of a negative determinant)"
    if event.op.startswith("_ctc_loss"):
        return "pole", "no alignment of the target fits into its input: likelihood 0, loss infinite"
    if intentional and event.op.startswith(SOFTMAX) and fully_masked(event.args):
        return "masked-row", "every entry of a row is −inf: softmax divides 0 by 0"
    if intentional and event.op in ("sub", "sub_") and event.kind == NAN:
        return "masked-row", "−inf minus −inf: the row's maximum is −inf because every entry is masked"
    if intentional and event.kind == INF:
        sign = "+" if any(f.posinf for f in event.inputs) else "−"
        return "pole", f"{call_name(event.op)} takes a value that was set to {sign}inf on purpose"
    if event.kind == NAN and not event.parents and event.op.startswith(_EMPTY):
        counted = "no label that counts" if event.op.startswith("nll_loss") else "too few elements"
        return "empty-reduction", f"{event.op} over {counted}: nothing is left to average"
    first, second = _operands(event)
    if first is not None and second is not None and event.kind == NAN:
        if event.op.startswith(("div", "true_divide")):
            return _division(event, first, second)
        if event.op.startswith("mul") and _any_pair(first, second):
            return "invalid", "0 · inf"
    if event.op.startswith(("linalg_vector_norm", "native_layer_norm")) and event.kind == NAN and not event.parents:
        return "invalid", f"{call_name(event.op)} of a constant has no value (0 / 0)"
    return _again_in_float64(event)


def _any_pair(first: Tensor, second: Tensor) -> bool:
    return bool((((first == 0) & second.isinf()) | ((second == 0) & first.isinf())).any())


def _division(event: Event, first: Tensor, second: Tensor) -> tuple[Mechanism, str]:
    """Tell the kinds of 0/0 apart by how the divisor was made."""
    if not bool(((first == 0) & (second == 0)).any()):
        return "invalid", "inf / inf" if bool((first.isinf() & second.isinf()).any()) else "the quotient has no value"
    makers = (*event.makers, None, None)
    above, below = makers[0], _behind(makers[1])
    divisor = event.args[1]
    if event.phase == "forward" and isinstance(divisor, Tensor) and not divisor.is_floating_point():
        summed = above is not None and (_behind(above) or above).op.startswith(("sum", "index_add", "scatter_add"))
        what = "the sum over nothing divided by a count of nothing" if summed else "divided by a count of 0"
        return "empty-reduction", f"0 / 0: {what}"
    if event.phase == "backward" or below is None:
        return "invalid", "0 / 0"
    if eps := vanished_eps(event):
        return "underflow", eps
    if _is_norm(below):
        return "invalid", "0 / 0: a vector of length zero is divided by its length"
    if below.op.startswith(("std", "var")) or (
        below.op == "sqrt" and any(b.op.startswith("var") for b in below.before)
    ):
        return "invalid", "0 / 0: a constant is divided by its standard deviation"
    if below.op.startswith(("sub", "amax", "max")):
        extremes = any(b.op.startswith(("amax", "max", "amin", "min")) for b in (below, *below.before))
        return "invalid", "0 / 0: maximum and minimum are equal" if extremes else "0 / 0: a difference of equal values"
    squares = any(b.op in ("pow", "square") or (b.op == "mul" and len(set(b.inputs)) == 1) for b in below.before)
    if below.op in ("sum", "mean") and squares and not below.whole_numbers and not _counts(below):
        return "invalid", "0 / 0: the divisor is the squared length of a zero vector"
    if below.op.startswith(("sum", "count_nonzero", "bincount", "index_add", "scatter_add", "mean")):
        totals = (
            above is not None
            and _behind(above) is not None
            and (_behind(above) or above).op.startswith(("sum", "index_add", "scatter_add"))
        )
        weights = below.learned and not below.whole_numbers and not _counts(below)
        if totals and weights:
            return "invalid", "0 / 0: the weights of a weighted mean sum to zero"
        if below.whole_numbers or totals or _counts(below):
            return "empty-reduction", "0 / 0: the sum over nothing divided by a count of nothing"
        return "invalid", "0 / 0: a row that sums to zero is divided by its sum"
    return "invalid", "0 / 0"


def _counts(made: Made) -> bool:
    """Whether a sum is over a mask that was cast or compared: it counts."""
    return any(
        (b.whole_numbers and not b.learned)
        or b.op in ("ne", "eq", "gt", "lt", "ge", "le", "logical_not", "bitwise_not")
        for b in made.before
    )


def _behind(made: Made | None) -> Made | None:
    """What really made a value: casts, clamps and an added eps are looked through."""
    for _ in range(4):
        if made is None or not made.before:
            return made
        if (
            made.op in _PLAIN
            or (made.op in ("add", "add_") and made.literals)
            or (made.op in ("add", "add_", "div", "div_") and len(made.inputs) == 1)
        ):
            made = made.before[0]
            continue
        return made
    return made


def _is_norm(made: Made) -> bool:
    squares = any(b.op == "sum" and any(c.op in ("pow", "mul", "square") for c in b.before) for b in made.before)
    return "norm" in made.op or (made.op in ("sqrt", "pow") and squares)


def vanished_eps(event: Event) -> str:
    """The sentence about an eps that is zero in the dtype of the operation; empty when there is none."""
    form = find_format(event.output.dtype) if event.output else None
    if form is None or form.bits > 16:
        return ""
    dtype = getattr(torch, event.output.dtype) if event.output else torch.float32
    for made in _ancestors(event.makers):
        for eps in made.literals:
            if 0 < abs(eps) < 1e-3 and float(torch.tensor(eps, dtype=dtype)) == 0:
                return f"eps {eps:g} is 0 in {event.output.dtype if event.output else ''}: it protects nothing"
    return ""


def _ancestors(makers: tuple[Made | None, ...], depth: int = 3) -> Iterator[Made]:
    for made in makers:
        if made is not None:
            yield made
            if depth and made.op in (*_PLAIN, "add", "add_", "sqrt", "pow", "sum", "linalg_vector_norm", "rsqrt"):
                yield from _ancestors(made.before, depth - 1)


def _again_in_float64(event: Event) -> tuple[Mechanism, str]:
    dtype = event.output.dtype if event.output else "?"

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, Tensor) and value.is_complex():
            return value.to(torch.complex128)
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    try:
        with torch.no_grad():
            wide = event.function(*tree_map(widen, event.args), **tree_map(widen, event.kwargs))
        results = floats_in(wide)
        if event.fresh:  # only what was made of finite values: what came in is no fault of this operation
            clean = [t.isfinite() for t in floats_in((event.args, event.kwargs))]
            results = [r[functools.reduce(torch.logical_and, clean).expand_as(r)] for r in results]
        kind = max([kind_of(t) for t in results] or [FINITE])
    except Exception as error:
        return "unknown", f"{event.op} could not be run again alone ({type(error).__name__})"
    largest = max((abs(v) for f in event.inputs for v in (f.finite_min, f.finite_max) if v is not None), default=0.0)
    name = call_name(event.op)
    first = event.fresh or not event.parents
    if kind == FINITE and first:
        form = find_format(dtype)
        limit = f" of {form.max:.5g}" if form else ""
        return "range-overflow", f"finite in float64, beyond {dtype}'s maximum{limit}; largest input {largest:.4g}"
    if kind == INF or event.kind == INF:
        op = event.op.strip("_")
        at_zero = op in _AT_ZERO and _has_zero(event)
        grows = op.startswith(_GROW) and not (at_zero and largest < _LARGE)
        if first and (grows or not (op.startswith(_POLES) or largest < _LARGE)):
            return "range-overflow", f"{name} overflows even float64; largest input {largest:.4g}"
        if op.startswith("linalg_"):
            return "pole", f"{name} of a singular matrix is infinite"
        return "pole", f"{name} at exactly zero is infinite" if at_zero else f"{name} has no finite value there"
    if not first:
        return "invalid", f"{name} of an infinite value has no value (inf − inf, 0 · inf)"
    lowest = min((f.finite_min for f in event.inputs if f.finite_min is not None), default=0.0)
    highest = max((f.finite_max for f in event.inputs if f.finite_max is not None), default=0.0)
    if 1 < largest < 1.01:  # acos, atanh, erfinv: printed as 1 it would explain nothing
        return "invalid", f"{name} is not defined beyond 1; its largest input is 1 + {largest - 1:.2g}"
    return "invalid", f"{name} is not defined there; inputs from {lowest:.4g} to {highest:.4g}"


def _freed(args: Any) -> bool:
    """FSDP takes the memory of gathered weights back after their use; reading them then would end the process."""
    local = (getattr(t, "_local_tensor", t) for t in floats_in(args))
    return any(t.layout == torch.strided and t.numel() and not t.untyped_storage().nbytes() for t in local)


def _without_arguments(event: Event) -> tuple[Mechanism, str]:
    """An in-place operation, inputs that were overwritten since, or evidence beyond the memory cap: the statistics."""
    name = call_name(event.op)
    if event.op.strip("_") in _AT_ZERO and event.kind == INF and any(f.zero for f in event.inputs):
        return "pole", f"{name} at exactly zero is infinite"
    grows = event.op.startswith(("exp", "mul", "add", "pow", "addmm", "baddbmm"))
    if grows and event.kind == INF and not event.parents:
        return "range-overflow", f"{name} left the range of {event.output.dtype if event.output else 'its dtype'}"
    if event.kind == NAN and event.op.startswith(("log", "sqrt", "div", "pow", "acos", "asin")):
        return "invalid", f"{name} is not defined there"
    return "unknown", ""


def _operands(event: Event) -> tuple[Tensor | None, Tensor | None]:
    args = event.args or ()
    values = [
        a if isinstance(a, Tensor) else torch.tensor(float(a)) if isinstance(a, int | float) else None for a in args[:2]
    ]
    values += [None] * (2 - len(values))
    first, second = values[0], values[1]
    if first is not None and second is not None:
        try:
            first, second = torch.broadcast_tensors(first, second)  # type: ignore[no-untyped-call]
        except RuntimeError:
            return None, None
    return first, second


def _has_zero(event: Event) -> bool:
    return 0.0 in event.literals or any(bool((t == 0).any()) for t in floats_in(event.args))

"""Why an operation gave a bad value: the same operation again in float64, and what its inputs look like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..floats import find_format
from .location import Mechanism
from .trace import FINITE, INF, NAN, Event, floats_in, kind_of

_POLES = (
    "div",
    "reciprocal",
    "log",
    "rsqrt",
    "pow",
    "digamma",
    "lgamma",
    "logit",
    "atanh",
    "special_",
    "linalg_",
    "sqrt",
)
_SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "softmax", "log_softmax", "_scaled_dot_product")
_REDUCTIONS = ("mean", "std", "var", "nll_loss", "native_batch_norm", "_native_batch_norm", "cumprod", "prod", "median")


def mechanism_of(event: Event, passes_on: bool) -> tuple[Mechanism, str]:
    """The mechanism and one sentence with the numbers. ``passes_on``: a deliberate infinity among the inputs."""
    if event.phase == "leaf":
        facts = event.output
        return "bad-leaf", f"{event.leaf} was bad on arrival: {facts.census}" if facts else ""
    if event.phase == "outside":
        return "outside-dispatcher", f"{event.op} returned a bad gradient that no torch operation computed"
    if event.dead_branch and not event.by_user:
        what = {INF: "is infinite", NAN: "has no value"}[event.kind]
        return (
            "where-gradient",
            f"the forward leaves this value out, so its gradient is exactly 0, and the derivative {what} there: "
            "0 · inf",
        )
    if event.args is None or _freed(event.args):
        return _without_arguments(event)
    if any(v != v for v in event.literals):
        return "invalid", "the code itself puts a NaN here"
    out = event.output
    dtype = out.dtype if out else "?"
    if event.op.startswith("_ctc_loss"):
        return "pole", "no alignment of the target fits into its input: likelihood 0, loss infinite"
    if event.op.startswith(_SOFTMAX) and event.kind == NAN and passes_on:
        return "masked-row", "every entry of a row is −inf: softmax divides 0 by 0"
    if event.op == "sub" and event.kind == NAN and passes_on:
        return "masked-row", "−inf minus −inf: the row's maximum is −inf because every entry is masked"
    if _reduces_nothing(event):
        return "empty-reduction", f"{event.op} over {_counted(event)}: nothing is left to average"
    first, second = _operands(event)
    if event.op.startswith(("div", "true_divide")) and first is not None and second is not None and event.kind == NAN:
        return _division(event, first, second)
    if event.op.startswith("mul") and first is not None and second is not None and event.kind == NAN:
        zero_times_inf = bool((((first == 0) & second.isinf()) | ((second == 0) & first.isinf())).any())
        if zero_times_inf:
            return "invalid", "0 · inf"
    return _again_in_float64(event, dtype)


def _division(event: Event, first: Tensor, second: Tensor) -> tuple[Mechanism, str]:
    if not bool(((first == 0) & (second == 0)).any()):
        return "invalid", "inf / inf" if bool((first.isinf() & second.isinf()).any()) else "the quotient has no value"
    counted = any(m in ("sum", "count_nonzero", "_to_copy") for m, _ in event.makers[1:2])
    if event.phase == "forward" and counted:
        return "empty-reduction", "0 / 0: the sum over nothing divided by a count of nothing"
    return "invalid", "0 / 0"


def _again_in_float64(event: Event, dtype: str) -> tuple[Mechanism, str]:
    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, Tensor) and value.is_complex():
            return value.to(torch.complex128)
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    try:
        with torch.no_grad():
            wide = event.function(*tree_map(widen, event.args), **tree_map(widen, event.kwargs))
        kind = max([kind_of(t) for t in floats_in(wide)] or [FINITE])
    except Exception as error:
        return "unknown", f"{event.op} could not be run again alone ({type(error).__name__})"
    largest = max((abs(v) for f in event.inputs for v in (f.finite_min, f.finite_max) if v is not None), default=0.0)
    if kind == FINITE and not event.parents:
        form = find_format(dtype)
        limit = f" of {form.max:.5g}" if form else ""
        return "range-overflow", f"finite in float64, beyond {dtype}'s maximum{limit}; largest input {largest:.4g}"
    zeros = _has_zero(event)
    if kind == INF or event.kind == INF:
        if event.op.startswith(_POLES) and zeros:
            return "pole", f"{event.op} at exactly zero is infinite"
        if not event.op.startswith(_POLES) and not event.parents:
            return "range-overflow", f"{event.op} overflows even float64; largest input {largest:.4g}"
        return "pole", f"{event.op} has no finite value there"
    if event.parents:
        return "invalid", f"{event.op} of an infinite value has no value (inf − inf, 0 · inf)"
    return "invalid", f"{event.op} is not defined there; inputs from {_lowest(event):.4g} to {largest:.4g}"


def _freed(args: Any) -> bool:
    """FSDP takes the memory of gathered weights back after their use; reading them then would end the process."""
    local = (getattr(t, "_local_tensor", t) for t in floats_in(args))
    return any(t.layout == torch.strided and t.numel() and not t.untyped_storage().nbytes() for t in local)


def _without_arguments(event: Event) -> tuple[Mechanism, str]:
    """An in-place operation, or evidence beyond the memory cap: judged from the statistics alone."""
    if event.op.startswith(("log", "div", "reciprocal", "rsqrt")) and event.kind == INF:
        return "pole", f"{event.op} at exactly zero is infinite"
    if (
        event.op.startswith(("exp", "mul", "add", "pow", "addmm", "baddbmm"))
        and event.kind == INF
        and not event.parents
    ):
        return "range-overflow", f"{event.op} left the range of {event.output.dtype if event.output else 'its dtype'}"
    if event.kind == NAN and event.op.startswith(("log", "sqrt", "div", "pow", "acos", "asin")):
        return "invalid", f"{event.op} is not defined there"
    return "unknown", ""


def _reduces_nothing(event: Event) -> bool:
    if event.kind != NAN or event.parents or not event.op.startswith(_REDUCTIONS):
        return False
    if event.op.startswith("nll_loss"):
        return True
    return event.op.startswith(("mean", "std", "var", "median"))


def _counted(event: Event) -> str:
    return "no label that counts" if event.op.startswith("nll_loss") else "too few elements"


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
    return any(bool((t == 0).any()) for t in floats_in(event.args))


def _lowest(event: Event) -> float:
    return min((f.finite_min for f in event.inputs if f.finite_min is not None), default=0.0)

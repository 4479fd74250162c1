"""The four dtypes of `nanproof.ops`: what each is computed in, and how small an eps may be there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UsageError
from ..floats import format_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What an operation must know of its dtype.

    ``steepest`` is the largest power of two that the dtype holds and whose square ``wide`` still holds: a
    gradient as large as that does not yet overflow a gradient norm. It bounds the slope next to a pole.
    """

    wide: torch.dtype
    eps: float
    steepest: float


def _numbers(dtype: torch.dtype, wide: torch.dtype) -> Numbers:
    held, room = format_of(dtype).max, format_of(wide).max
    steepest = 1.0
    while 2 * steepest <= held and 4 * steepest <= room / steepest:
        steepest *= 2
    return Numbers(wide=wide, eps=format_of(dtype).safe_eps, steepest=steepest)


# Built once, at import: the compiler then sees constants and does not trace the table of formats.
_TABLE = {
    torch.float64: _numbers(torch.float64, torch.float64),
    torch.float32: _numbers(torch.float32, torch.float32),
    torch.bfloat16: _numbers(torch.bfloat16, torch.float32),
    torch.float16: _numbers(torch.float16, torch.float32),
}


def numbers_of(x: Tensor, name: str) -> Numbers:
    """The numbers of ``x``'s dtype; an error that calls it ``name`` when it is not one of the four."""
    found = _TABLE.get(x.dtype)
    if found is None:
        raise UsageError(
            f"{name} is {x.dtype}, and this operation takes float64, float32, bfloat16 or float16",
            hint=f"convert it first, for example {name}.float()",
        )
    return found


def eps_for(dtype: torch.dtype | str) -> float:
    """The smallest eps that still means something in ``dtype``.

    >>> eps_for(torch.float32), eps_for(torch.float16)
    (1.1920928955078125e-07, 0.0078125)
    >>> torch.tensor(1e-8, dtype=torch.float16).item()  # the usual eps does not exist there
    0.0

    It is not lost when added to 1, and 1/eps², the slope of 1/x at eps, is finite.
    """
    found = _TABLE.get(dtype) if isinstance(dtype, torch.dtype) else None
    return found.eps if found else format_of(dtype).safe_eps


def positive_eps(eps: float | None, default: float, numbers: Numbers) -> float:
    """The eps that the caller gave, checked, or the default."""
    if eps is None:
        return default
    least = torch.finfo(numbers.wide).tiny
    if not least <= eps < float("inf"):
        raise UsageError(
            f"eps is {eps}, and the computation in {numbers.wide} needs at least {least:.2g}",
            hint="give a larger number, or leave it out",
        )
    return eps

"""`masked_mean`: a mean over what the mask keeps, also when it keeps nothing."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..errors import UsageError
from ._formats import numbers_of
from ._masks import dims_of, expanded, keep_of, size_of
from ._span import cast, scaled, sum_scale


def masked_mean(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    weights: Tensor | None = None,
    on_empty: Literal["zero", "raise"] = "zero",
) -> Tensor:
    """The mean of the elements that the mask keeps.

    >>> x = torch.tensor([1.0, 3.0, torch.nan], requires_grad=True)
    >>> masked_mean(x, torch.tensor([True, True, False])).item()
    2.0
    >>> empty = masked_mean(x, torch.zeros(3, dtype=torch.bool))
    >>> empty.backward()
    >>> empty.item(), x.grad
    (0.0, tensor([0., 0., 0.]))

    A mask that keeps nothing gives 0 with a gradient of zero, or with ``on_empty="raise"`` an error; asking
    for the error waits for the device. Sums are scaled where they would overflow: the mean of [max, max] is
    max. ``weights`` are constants of zero or more, Σwx / Σw; an element of weight 0 counts as masked.
    """
    numbers = numbers_of(x, "x")
    if on_empty not in ("zero", "raise"):
        raise UsageError(f"on_empty is {on_empty!r}", hint='use "zero" or "raise"')
    dims = dims_of(dim, x)
    size = size_of(dims, x)
    keep = keep_of(mask, x)
    if weights is not None:
        keep, weights = _weigh(weights, keep, x, dims, size)
    count = keep.sum(dims, keepdim=True)
    if on_empty == "raise":
        _refuse_empty(count)
    kept = cast(torch.where(keep, x, 0.0), numbers.wide)

    def mean(u: Tensor) -> Tensor:
        if weights is None:
            return u.sum(dims, keepdim=True) / count.clamp(min=1)
        share = weights.to(u.dtype)
        return (u * share).sum(dims, keepdim=True) / torch.where(count > 0, share.sum(dims, keepdim=True), 1.0)

    result = scaled(mean, kept, sum_scale(kept, dims, size)) if size else kept.sum(dims, keepdim=True)
    return cast(result, x.dtype) if keepdim else cast(result, x.dtype).squeeze(dims)


def _weigh(weights: Tensor, keep: Tensor, x: Tensor, dims: tuple[int, ...], size: int) -> tuple[Tensor, Tensor]:
    """What is kept once weights of zero are left out, and the weights relative to the largest."""
    if weights.requires_grad:
        raise UsageError("weights require a gradient, and they are constants here", hint="pass weights.detach()")
    weights = expanded(weights, x, "weights", "x")
    keep = keep & (weights != 0)
    weights = torch.where(keep, weights, 0.0).to(torch.promote_types(weights.dtype, torch.float32))
    if not size:
        return keep, weights
    # Relative to the largest, their sum lies between 1 and size: it can neither vanish nor overflow.
    largest = weights.abs().amax(dims, keepdim=True)
    return keep, weights / torch.where(largest > 0, largest, 1.0)


def _refuse_empty(count: Tensor) -> None:
    empty = int((count == 0).sum().item())  # host sync: only with on_empty="raise"
    if empty:
        raise UsageError(
            f"mask keeps nothing in {empty} of {count.numel()} means",
            hint='leave such batches out, or use on_empty="zero"',
        )

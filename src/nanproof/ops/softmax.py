"""`masked_softmax`: a softmax over what the mask keeps; a row that keeps nothing is 0."""

from __future__ import annotations

import torch
from torch import Tensor

from ._formats import numbers_of
from ._masks import keep_of
from ._span import cast


def masked_softmax(logits: Tensor, mask: Tensor | None = None, *, dim: int = -1) -> Tensor:
    """Softmax along ``dim`` over the elements that the mask keeps; 0 for the others.

    >>> logits = torch.tensor([[0.0, 0.0, torch.nan], [1.0, 2.0, 3.0]], requires_grad=True)
    >>> p = masked_softmax(logits, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    >>> p.detach()
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    >>> p[0, 0].backward()
    >>> logits.grad
    tensor([[ 0.2500, -0.2500,  0.0000],
            [ 0.0000,  0.0000,  0.0000]])

    A row that keeps nothing is all zeros and has a gradient of zero; torch.softmax over −Inf gives NaN.
    """
    numbers = numbers_of(logits, "logits")
    keep = keep_of(mask, logits, "logits")
    if not logits.numel():
        return logits.clone()
    lowest = torch.finfo(numbers.wide).min
    top = torch.where(keep, logits.detach().to(numbers.wide), lowest).amax(dim, keepdim=True)
    # Left-out places hold the maximum, not 0: exp(0 − top) can be Inf, and anomaly mode stops at its 0 · ∞.
    wide = torch.where(keep, cast(torch.where(keep, logits, 0.0), numbers.wide), top)
    powers = torch.where(keep, (wide - top).exp(), 0.0)
    total = powers.sum(dim, keepdim=True)
    return cast(powers / torch.where(total == 0, 1.0, total), logits.dtype)

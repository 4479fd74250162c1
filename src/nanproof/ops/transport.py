"""`log_sinkhorn` and `sinkhorn`: doubly stochastic matrices, in log space from beginning to end."""

from __future__ import annotations

from torch import Tensor

from ..errors import UsageError
from ._formats import numbers_of
from ._span import cast, drop_max


def _log_sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """The result in the format computed in."""
    numbers = numbers_of(logits, "logits")
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise UsageError(
            f"logits have shape {tuple(logits.shape)}, and Sinkhorn takes square matrices",
            hint="put the matrix into the last two dimensions",
        )
    if iterations < 1:
        raise UsageError(f"iterations is {iterations}", hint="give at least 1; 20 is usual")
    wide = cast(logits, numbers.wide)
    if not logits.numel():
        return wide
    # The first step undoes a constant per column. From here on no difference can overflow: each entry is at
    # most log n, and at most its own logsumexp.
    wide = drop_max(wide, -2)
    for _ in range(iterations):
        wide = wide - wide.logsumexp(-2, keepdim=True)
        wide = wide - wide.logsumexp(-1, keepdim=True)
    return wide


def log_sinkhorn(logits: Tensor, iterations: int = 20) -> Tensor:
    """The log of `sinkhorn`: rows and columns of exp(result) sum to 1.

    >>> import torch
    >>> log_sinkhorn(torch.tensor([[0.0, 1e30], [1e30, 0.0]]))
    tensor([[-1.0000e+30,  0.0000e+00],
            [ 0.0000e+00, -1.0000e+30]])

    Each iteration normalizes the columns, then the rows: rows sum to 1 exactly, columns in the limit. Entries
    of one column that lie more than the dtype's max apart are held at that distance, with their gradient.
    """
    return cast(_log_sinkhorn(logits, iterations), logits.dtype)


def sinkhorn(logits: Tensor, iterations: int = 20) -> Tensor:
    """The doubly stochastic matrix that Sinkhorn's iterations make of exp(logits), without that exp.

    >>> import torch
    >>> sinkhorn(torch.tensor([[0.0, 200.0], [199.0, 0.0]]))  # exp(200) is Inf in float32
    tensor([[0., 1.],
            [1., 0.]])

    Works on the last two dimensions. Rows sum to 1 exactly, columns in the limit of many iterations; logits far
    apart need more of them. See `log_sinkhorn`.
    """
    return cast(_log_sinkhorn(logits, iterations).exp(), logits.dtype)

"""Operations that stay finite, forward and backward, for every finite input.

>>> import torch
>>> from nanproof import ops
>>> x = torch.tensor([0.0, 1.0], requires_grad=True)
>>> ops.safe_sqrt(x).sum().backward()
>>> x.grad.isfinite().all().item()
True

Each takes float64, float32, bfloat16 or float16 and gives the same dtype back; the two half formats are
computed in float32. What holds for all of them:

- **Finite in, finite out**, in both passes. A value too large for the dtype becomes ±max, and its gradient
  stays that of the formula: it is neither cut to zero nor allowed to overflow.
- **The textbook where the textbook works.** Next to a pole the docstring says what happens instead.
- **A mask is a selection.** What it leaves out may be NaN or Inf and reaches neither pass.
- **Nothing is hidden.** A NaN or Inf that is not masked out makes the result NaN or Inf.

No call waits for the device, except ``masked_mean(..., on_empty="raise")``.
"""

from ._formats import eps_for
from .branch import select
from .loss import masked_cross_entropy, normalized_mse
from .mean import masked_mean
from .norm import normalize, rms_norm, safe_norm
from .pole import safe_div, safe_log, safe_sqrt
from .softmax import masked_softmax
from .transport import log_sinkhorn, sinkhorn

__all__ = [
    "eps_for",
    "log_sinkhorn",
    "masked_cross_entropy",
    "masked_mean",
    "masked_softmax",
    "normalize",
    "normalized_mse",
    "rms_norm",
    "safe_div",
    "safe_log",
    "safe_norm",
    "safe_sqrt",
    "select",
    "sinkhorn",
]

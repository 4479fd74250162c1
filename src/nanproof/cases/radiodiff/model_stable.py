"""The denoiser with attention scores that cannot grow. Everything that is not named here is the original's.

- Queries and keys have length √d before they meet (qk-norm), so that a score, divided by √d, is at most √d times a
  learned gain per head: the softmax can still become sharp, by the gain, but no longer by weights that drift.
- The gain is learned as a logarithm and held below 10: √d · 10 is far below every half format's maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import ops
from . import model


class ConditionalAttention(model.ConditionalAttention):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.log_gain = nn.Parameter(torch.zeros(heads, 1, 1))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        gain = self.log_gain.clamp(max=2.3).exp() * q.shape[-1] ** -0.5
        return torch.matmul(ops.rms_norm(q) * gain.to(q.dtype), ops.rms_norm(k).transpose(-1, -2))

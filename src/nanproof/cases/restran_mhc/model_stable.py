"""ResTran with an mHC that keeps the size of what it carries. Everything that is not named here is the original's.

- The read-out is convex (softmax). The original's sigmoids sum to n/2: with n = 4 each block doubles its input.
- The block has no shortcut of its own: the hyper-connection is the shortcut, and two of them double the input again.
- Mixing is ``bij,bjchw->bichw``. The original's ``bnn,bnchw->bnchw`` takes the diagonal: streams were scaled, by about
  1/n each, and never mixed; Sinkhorn's promise (rows that sum to 1) held for a matrix that was not used.
- The streams are carried from block to block. The original copies one map n times in every block and averages at its
  end: mixing equal copies does nothing, and the gate of the mixing gets no gradient.
- Sinkhorn runs in log space (`nanproof.ops.sinkhorn`): exp overflows float16 above 11.09, float32 above 88.7.
- The streams and their sums are float32, whatever autocast computes the convolutions in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import ops
from ...guard import tap
from . import model


class PlainBlock(model.BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)))


class HyperConnection(model.HyperConnection):
    def forward(self, streams: Tensor) -> Tensor:
        n = self.n
        pooled = tap("mhc.pooled", streams.mean((3, 4)).flatten(1))
        pre, post, res = torch.split(self.logits(pooled).float(), [n, n, n * n], -1)
        read = torch.softmax(self.alpha_pre * pre, -1)
        write = 2 * torch.sigmoid(self.alpha_post * post)
        mixing = ops.sinkhorn(self.alpha_res * res.view(-1, n, n), iterations=5)
        with torch.autocast(streams.device.type, enabled=False):
            h = torch.einsum("bn,bnchw->bchw", read, streams)
            mixed = torch.einsum("bij,bjchw->bichw", mixing, streams)
        out = tap("mhc.sublayer", self.block(tap("mhc.read_out", h, alpha_pre=self.alpha_pre)))
        written = tap("mhc.write_in", write[..., None, None, None] * out.float()[:, None], alpha_post=self.alpha_post)
        return tap("mhc.final", mixed + written, alpha_res=self.alpha_res)


class ResTran(model.ResTran):
    def __init__(self, *, channels: int, blocks: int, n: int, width: int, eps: float) -> None:
        super().__init__(channels=channels, blocks=blocks, n=n, width=width, eps=eps)
        self.n = n

    def connect(self, channels: int, n: int, eps: float) -> nn.Module:
        return HyperConnection(PlainBlock(channels), channels, n, eps)

    def features(self, images: Tensor) -> Tensor:
        streams: Tensor = self.stages(self.stem(images).float().unsqueeze(1).repeat(1, self.n, 1, 1, 1))
        return streams.mean(1)

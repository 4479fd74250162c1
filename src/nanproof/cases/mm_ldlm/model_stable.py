"""MM-LDLM with hyper-connections that cannot grow. Everything that is not named here is the original's.

- Mixing is doubly stochastic (Sinkhorn in log space): a product of such matrices has norm 1, whatever the depth.
- The read-out is convex (softmax) and the write-in is bounded (2 · sigmoid): a sublayer adds at most twice its output.
- `F.layer_norm` finds the variance about the mean, in two passes: no difference of two large squares.
- Gates start at zero (adaLN-Zero): depth adds nothing until it has something to add, so there is no noise to drown.
- Streams and weights are float32; autocast runs the matrix products in bfloat16. An update of 2⁻⁹ of a weight is lost
  in pure bfloat16 weights and is kept here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import ops
from . import model


class HyperConnections(nn.Module):
    """All connections of the model: convex read-out, doubly stochastic mixing, bounded write-in."""

    def __init__(self, streams: int, places: int) -> None:
        super().__init__()
        self.read = nn.Parameter(2.0 * torch.eye(streams).repeat(places // streams + 1, 1)[:places])
        self.mixing = nn.Parameter(4.0 * torch.eye(streams).repeat(places, 1, 1))
        self.write = nn.Parameter(torch.zeros(places, streams))

    def forward(self) -> tuple[Tensor, Tensor]:
        """The weights of reading and mixing, and of writing, at every place; each row of the former sums to 1."""
        mixing = ops.sinkhorn(self.mixing, iterations=4)
        return torch.cat([self.read.softmax(-1).unsqueeze(1), mixing], 1), 2 * torch.sigmoid(self.write)


class StableSublayer(model.Sublayer):
    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        shift, scale, gate = (modulation + self.table).unbind(2)
        return self.transform(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift) * gate


class JointAttention(StableSublayer, model.JointAttention):
    pass


class FeedForward(StableSublayer, model.FeedForward):
    pass


class MMDiT(model.Ends):
    """As the original's; the streams stay near 1 at any depth."""

    def __init__(self, *, width: int, heads: int, depth: int, streams: int) -> None:
        super().__init__(width)
        self.streams = streams
        pairs = [(JointAttention(width, heads), FeedForward(width)) for _ in range(depth)]
        self.sublayers = nn.ModuleList(sublayer for pair in pairs for sublayer in pair)
        self.connections = HyperConnections(streams, 2 * depth)

    def forward(self, text: Tensor, latents: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, the prediction, and the largest value in the streams."""
        x = torch.stack([self.embed_text(text), self.embed_latents(latents).float()], 1) + self.positions
        x = x.expand(self.streams, -1, -1, -1, -1)
        modulation = self.condition(times).float().view(len(text), 2, 3, 1, -1)
        for weights, write, sublayer in zip(*self.connections(), self.sublayers, strict=True):
            # in float32 whatever autocast says: the streams are where small contributions add up
            with torch.autocast(x.device.type, enabled=False):
                mixed = torch.mm(weights, x.flatten(1)).reshape(-1, *x.shape[1:])
            x = mixed[1:] + write.view(-1, 1, 1, 1, 1) * sublayer(mixed[0], modulation)
        h = F.layer_norm(x.mean(0), x.shape[-1:])
        return self.text_head(h[:, 0]), self.latent_head(h[:, 1]), x.detach().abs().amax()

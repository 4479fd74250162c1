"""MM-LDLM: a diffusion transformer over text and latent tokens, as it was when it died.

Every sublayer sits in a hyper-connection: the residual stream is several streams, which are mixed by a learned matrix
before each sublayer. Streams are S × B × 2 × T × D: streams, batch, text and latents, tokens, width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import LATENT, SYMBOLS, TOKENS


def layer_norm(x: Tensor) -> Tensor:
    """In float32, in one pass: E[x²] − E[x]²."""
    h = x.float()
    mean, mean_square = h.mean(-1, keepdim=True), h.square().mean(-1, keepdim=True)
    return ((h - mean) * torch.rsqrt(mean_square - mean.square() + 1e-6)).to(x.dtype)


class ModalityLinear(nn.Module):
    """One linear map for text tokens and another for latent tokens."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs).uniform_(-1, 1) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bmti,mio->bmto", x, self.weight)


class HyperConnection(nn.Module):
    """Reads one input for a sublayer out of the streams, mixes the streams, and writes the sublayer's output to each.

    Nothing bounds the mixing matrix: 64 of them in a row multiply.
    """

    def __init__(self, streams: int, place: int) -> None:
        super().__init__()
        read = torch.zeros(streams, 1)
        read[place % streams] = 1.0
        self.alpha = nn.Parameter(torch.cat([read, torch.eye(streams)], 1))
        self.beta = nn.Parameter(torch.ones(streams))

    def forward(self, x: Tensor, modulation: Tensor, sublayer: nn.Module) -> Tensor:
        mixed = torch.mm(self.alpha.t(), x.flatten(1)).reshape(-1, *x.shape[1:])
        written: Tensor = sublayer(mixed[0], modulation)
        return mixed[1:] + self.beta.view(-1, 1, 1, 1, 1) * written


class Sublayer(nn.Module):
    """Normalize, modulate by the diffusion times (adaLN), transform, gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2, 3, 1, width))

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        shift, scale, gate = (modulation + self.table).unbind(2)
        return self.transform(layer_norm(x) * (1 + scale) + shift) * (1 + gate)

    def transform(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class JointAttention(Sublayer):
    """Attention over text and latent tokens together, with normalized queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width)
        self.heads = heads
        self.qkv = ModalityLinear(width, 3 * width)
        self.out = ModalityLinear(width, width)

    def transform(self, h: Tensor) -> Tensor:
        batch, modalities, tokens, width = h.shape
        q, k, v = self.qkv(h).reshape(batch, modalities * tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = 4 * F.normalize(q, dim=-1), 4 * F.normalize(k, dim=-1)
        seen = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        out: Tensor = self.out(seen.transpose(1, 2).reshape(batch, modalities, tokens, width))
        return out


class FeedForward(Sublayer):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up = ModalityLinear(width, 2 * width)
        self.down = ModalityLinear(2 * width, width)

    def transform(self, h: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(h)))
        return out


class Ends(nn.Module):
    """What stands before and after the sublayers: embeddings, the diffusion times, and the heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed_text = nn.Embedding(SYMBOLS + 1, width)
        self.embed_latents = nn.Linear(LATENT, width)
        self.positions = nn.Parameter(0.5 * torch.randn(2, TOKENS, width))
        modulation = nn.Linear(width, 6 * width)
        self.condition = nn.Sequential(nn.Linear(2, width), nn.SiLU(), modulation)
        self.text_head = nn.Linear(width, SYMBOLS)
        self.latent_head = nn.Linear(width, LATENT)
        for last in (modulation, self.text_head):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)


class MMDiT(Ends):
    """Text logits and a prediction of the clean latents, from both modalities at their diffusion times."""

    def __init__(self, *, width: int, heads: int, depth: int, streams: int) -> None:
        super().__init__(width)
        self.streams = streams
        pairs = [(JointAttention(width, heads), FeedForward(width)) for _ in range(depth)]
        self.sublayers = nn.ModuleList(sublayer for pair in pairs for sublayer in pair)
        self.connections = nn.ModuleList(HyperConnection(streams, i) for i in range(2 * depth))

    def forward(self, text: Tensor, latents: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, the prediction, and the largest value in the streams."""
        x = torch.stack([self.embed_text(text), self.embed_latents(latents)], 1) + self.positions
        x = x.expand(self.streams, -1, -1, -1, -1)
        modulation = self.condition(times).view(len(text), 2, 3, 1, -1)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            x = connection(x, modulation, sublayer)
        h = layer_norm(x.sum(0))
        return self.text_head(h[:, 0]), self.latent_head(h[:, 1]), x.detach().abs().amax()

"""The latent diffusion model as its authors wrote it: a frozen encoder, and a denoiser that attends to the town.

`ConditionalAttention` holds what kills it: its scores are q·k without 1/√d and without any bound on q and k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .maps import BLOCK, SIDE, draw_maps

CHANNELS = 6
TOKENS = (SIDE // BLOCK) ** 2


class FrozenEncoder(nn.Module):
    """The first stage, trained beforehand: each patch of 4×4 cells becomes the six numbers that say most about it.

    A linear auto-encoder's optimum is known, the principal components, so it is computed instead of trained.
    """

    components: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        gain = draw_maps(256, torch.Generator().manual_seed(3)).gain
        patches = F.pixel_unshuffle(gain, BLOCK).permute(0, 2, 3, 1).reshape(-1, BLOCK**2)
        mean = patches.mean(0)
        components = torch.linalg.svd(patches - mean, full_matrices=False).Vh[:CHANNELS]
        self.register_buffer("mean", mean)
        self.register_buffer("components", components)

    def encode(self, gain: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(gain, BLOCK) - self.mean.view(1, -1, 1, 1)
        return torch.einsum("cp,bphw->bchw", self.components, patches)

    def decode(self, latent: Tensor) -> Tensor:
        patches = torch.einsum("cp,bchw->bphw", self.components, latent) + self.mean.view(1, -1, 1, 1)
        return F.pixel_shuffle(patches, BLOCK)


class ConditionalAttention(nn.Module):
    """Each place of the town (the condition) asks the features of the map."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.join = nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.out = nn.Linear(dim, dim)
        for layer in (self.q, self.k, self.v):
            nn.init.xavier_normal_(layer.weight)
        for wide in (self.join, self.mlp[0], self.mlp[2], self.out):
            assert isinstance(wide, nn.Linear)
            nn.init.kaiming_normal_(wide.weight)
        self.largest_score = 0.0

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2)

    def forward(self, town: Tensor, x: Tensor) -> Tensor:
        skip = self.norm(x + self.join(torch.cat([town, x], -1)))
        q, k, v = (self._split(layer(of)) for layer, of in ((self.q, town), (self.k, x), (self.v, skip)))
        scores = self.score(q, k)
        self.largest_score = scores.detach().abs().max().item()
        heard = (scores.softmax(-1) @ v).transpose(1, 2).reshape(town.shape)
        y = town + heard
        found: Tensor = skip + self.out(y + self.mlp(y))
        return found

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.heads, -1).transpose(1, 2)


class Denoiser(nn.Module):
    """From a noisy latent, its time and the town: the way back (C) and the noise, the two things it is made of."""

    def __init__(self, dim: int, heads: int, layers: int, attention: type[ConditionalAttention]) -> None:
        super().__init__()
        self.read = nn.Linear(CHANNELS, dim)
        self.read_town = nn.Linear(2 * BLOCK**2, dim)
        self.read_time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.place = nn.Parameter(torch.randn(1, TOKENS, dim) * 0.02)
        self.attention = nn.ModuleList(attention(dim, heads) for _ in range(layers))
        self.residual = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
            for _ in range(layers)
        )
        self.head_c, self.head_noise = (nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, CHANNELS)) for _ in range(2))

    def forward(self, x: Tensor, time: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        town = self.read_town(F.pixel_unshuffle(known, BLOCK).flatten(2).transpose(1, 2)) + self.place
        h = self.read(x.flatten(2).transpose(1, 2)) + self.place + self.read_time(time.log()[:, None] / 4)[:, None]
        for attention, residual in zip(self.attention, self.residual, strict=True):
            h = attention(town, h)
            h = h + residual(h)
        c, noise = (head(h).transpose(1, 2).reshape(x.shape) for head in (self.head_c, self.head_noise))
        # the best linear guess from x alone, for latents of variance 1, and the network's correction to it
        t = time.view(-1, 1, 1, 1)
        variance = (1 - t).square() + t
        return (
            (t - 1) / variance * x + (t / variance).sqrt() * c,
            t.sqrt() / variance * x + (1 - t) / variance.sqrt() * noise,
        )

    @property
    def largest_score(self) -> float:
        """The largest attention score of the last pass."""
        return max(a.largest_score for a in self.attention if isinstance(a, ConditionalAttention))

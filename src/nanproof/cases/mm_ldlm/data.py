"""Made text and its latents: what an autoencoder trained elsewhere would have given, made by a fixed random map.

A text is four tokens of four symbols. Its latents are four vectors of eight numbers, 32 in all, each a mixture of all
tokens, and as they come: mean 30, deviation about 25. ``l2t`` hides tokens and shows the latents; ``t2l`` shows the
text and noises the latents.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SYMBOLS, TOKENS, LATENT = 4, 4, 8
MASK = SYMBOLS  # the token that hides a symbol

Mode = Literal["l2t", "t2l"]


class Batch(NamedTuple):
    """Clean text and latents, and what the model sees of them; times are 0 for clean and 1 for destroyed."""

    text: Tensor
    latents: Tensor
    seen_text: Tensor
    seen_latents: Tensor
    mask: Tensor
    times: Tensor


class Steps(Dataset[Batch]):
    """The batch of every step, the same however the run came to it: a resumed run goes on as if it had never ended."""

    def __init__(self, size: int, mode: Mode, *, seed: int, rank: int, standardise: bool) -> None:
        self.size, self.mode, self.standardise = size, mode, standardise
        self.start = (seed * 1024 + rank) * 1_000_000

    def __getitem__(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(self.start + step)
        return draw_batch(self.size, self.mode, generator, standardise=self.standardise)

    def load(self, steps: range) -> DataLoader[Batch]:
        """The batches of these steps, in order."""
        return DataLoader(self, batch_size=None, sampler=steps)


@cache
def _maps() -> tuple[Tensor, Tensor]:
    fixed = torch.Generator().manual_seed(5)
    symbols = torch.randn(TOKENS, SYMBOLS, LATENT, generator=fixed)
    return symbols, torch.eye(TOKENS) + 0.5 * torch.randn(TOKENS, TOKENS, generator=fixed)


def draw_pairs(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random texts and their latents."""
    symbols, mixture = _maps()
    text = torch.randint(0, SYMBOLS, (size, TOKENS), generator=generator)
    return text, 30 + 20 * torch.einsum("ij,bjd->bid", mixture, symbols[torch.arange(TOKENS), text])


@cache
def latent_statistics() -> tuple[Tensor, Tensor]:
    """Mean and deviation of each latent dimension, from a sample of the training data."""
    _, latents = draw_pairs(4096, torch.Generator().manual_seed(6))
    return latents.mean(0), latents.std(0)


def draw_batch(size: int, mode: Mode, generator: torch.Generator, *, standardise: bool = False) -> Batch:
    """A batch of one mode."""
    text, latents = draw_pairs(size, generator)
    if standardise:
        mean, deviation = latent_statistics()
        latents = (latents - mean) / deviation
    time = torch.rand(size, generator=generator)
    noise = torch.randn(latents.shape, generator=generator)
    hidden = torch.rand(text.shape, generator=generator) < time[:, None]
    if mode == "l2t":
        times = torch.stack([time, torch.zeros(size)], 1)
        seen_text, seen_latents = torch.where(hidden, MASK, text), latents
    else:
        times = torch.stack([torch.zeros(size), time], 1)
        spread = 1.0 if standardise else 25.0
        seen_text, seen_latents = text, torch.lerp(latents, spread * noise, time[:, None, None])
        hidden = torch.zeros_like(hidden)
    return Batch(text=text, latents=latents, seen_text=seen_text, seen_latents=seen_latents, mask=hidden, times=times)

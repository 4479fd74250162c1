"""Made licence plates: four glyphs of eleven on a noisy strip of 8 × 24 pixels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

GLYPHS, LETTERS = 11, 4
CLASSES = GLYPHS + 1  # class 0 is the blank of CTC
HEIGHT, WIDTH = 8, 24


@cache
def _shapes() -> Tensor:
    fixed = torch.Generator().manual_seed(7)
    return (torch.rand(CLASSES, 4, 4, generator=fixed) > 0.5).float()


def draw_plates(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images and their letters, 1 to 11."""
    letters = torch.randint(1, CLASSES, (size, LETTERS), generator=generator)
    images = 0.1 * torch.randn(size, 1, HEIGHT, WIDTH, generator=generator)
    for place in range(LETTERS):
        left = 1 + place * 6
        images[:, 0, 2:6, left : left + 4] += _shapes()[letters[:, place]]
    return images, letters


def read_plates(log_probs: Tensor) -> list[list[int]]:
    """What the network reads: the likeliest class at each place, without repeats and blanks."""
    found = []
    for path in log_probs.argmax(-1).tolist():
        before = [0, *path[:-1]]
        found.append([c for c, last in zip(path, before, strict=True) if c not in (0, last)])
    return found

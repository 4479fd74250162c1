"""Radio maps made on the spot: how strong a transmitter is received everywhere in a town of random buildings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SIDE = 16
BLOCK = 4


class Maps(NamedTuple):
    """A batch of towns: what is known of them (buildings, transmitter) and the map that belongs to it."""

    known: Tensor
    """(batch, 2, SIDE, SIDE): 1 where a building stands; 1 at the transmitter."""
    gain: Tensor
    """(batch, 1, SIDE, SIDE), from 0 (nothing is heard) to 1."""


def draw_maps(count: int, generator: torch.Generator) -> Maps:
    """Log-distance path loss around the transmitter; inside a building a fifth of it comes through.

    >>> maps = draw_maps(2, torch.Generator().manual_seed(0))
    >>> maps.known.shape, maps.gain.shape
    (torch.Size([2, 2, 16, 16]), torch.Size([2, 1, 16, 16]))
    """
    place = torch.randint(2, SIDE - 2, (count, 2), generator=generator)
    lots = torch.rand(count, SIDE // BLOCK, SIDE // BLOCK, generator=generator) > 0.7
    buildings = lots.float().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    distance = torch.hypot(
        (rows - place[:, 0, None, None]).float(),
        (columns - place[:, 1, None, None]).float(),
    )
    gain = (1 - torch.log1p(distance) / 3.2) * (1 - 0.8 * buildings)
    return Maps(torch.stack([buildings, (distance < 1).float()], 1), gain[:, None])

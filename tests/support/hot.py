"""Models that leave the range of float16 inside one module, and come back into it before they leave the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Residual; what it adds is about 1, with ``gain`` times that on the way."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        hot = self.up(x) * self.gain
        return x + self.down(hot / self.gain)


class Caster(Block):
    """Insists on float16."""

    def forward(self, x: Tensor) -> Tensor:
        hot = self.up(x).half() * self.gain
        return x + self.down(hot.float() / self.gain)


class NestedAutocast(Block):
    """Opens autocast by itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            hot = self.up(x) * self.gain
            return x + self.down(hot / self.gain).float()


class BatchNormBlock(Block):
    def __init__(self, gain: float) -> None:
        super().__init__(gain)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        hot = self.norm(self.up(x)) * self.gain
        return x + self.down(hot / self.gain)


class Net(nn.Module):
    """Three blocks, the middle one hot; with ``reentrant`` each is checkpointed in that way."""

    reentrant: bool | None = None

    def __init__(self, block: type[Any] = Block, *, gain: float = 1e6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(1.0), block(gain), block(1.0)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x

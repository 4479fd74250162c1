"""Failures that depend on more than the parameters: random draws, buffers that change, the second call."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, mean_of_squares, named, program

Batch = dict[str, Tensor]


def rewind_until(fails: Callable[[], bool]) -> None:
    """Leave torch's generator where the next draw is a bad one."""
    while True:
        before = torch.get_rng_state()
        if fails():
            torch.set_rng_state(before)
            return


@program(phase="forward", mechanism="pole", op="reciprocal")
def module_used_twice() -> Case:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1 / x  # BAD

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)
            self.inverse = Inverse()

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            fine = self.inverse(h.square() + 1)
            return fine + self.inverse(F.relu(h))

    return Net(), {"x": torch.randn(4, 3)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "empty-reduction"), op="div")
def all_layers_dropped() -> Case:
    class LayerDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            keep = (torch.rand(4) < 0.5).float()
            total = sum(k * layer(x) for k, layer in zip(keep, self.layers, strict=True))
            return total / keep.sum()  # BAD

    case = named(drop=LayerDrop()), {"x": torch.randn(3, 4)}, mean_of_squares
    rewind_until(lambda: bool((torch.rand(4) >= 0.5).all()))
    return case


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def division_by_dropout() -> Case:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            noise = self.drop(torch.ones(4))
            return x / noise  # BAD

    case = named(fc=nn.Linear(3, 4), scale=Scale()), {"x": torch.randn(2, 3)}, mean_of_squares
    rewind_until(lambda: bool((F.dropout(torch.ones(4), 0.2) == 0).any()))
    return case


@program(phase="forward", mechanism=("empty-reduction", "invalid"), op="std")
def crop_of_random_length() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        start = random.randrange(7)
        h = model(batch["x"][start:7])
        return (h.mean(0) / (h.std(0) + 1)).pow(2).sum()  # BAD

    while True:  # leave the generator where it cuts out a single row next
        before = random.getstate()
        if random.randrange(7) == 6:
            random.setstate(before)
            break
    return nn.Linear(4, 2), {"x": torch.randn(7, 4)}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def bias_correction_at_step_zero() -> Case:
    class Average(nn.Module):
        steps: Tensor
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            center = self.mean / (1 - 0.9**self.steps)  # BAD
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.steps += 1
            return x - center

    return named(fc=nn.Linear(3, 4), average=Average()), {"x": torch.randn(4, 3)}, mean_of_squares


@program(phase="forward", mechanism="pole", op="log")
def batch_norm_then_log() -> Case:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 4, 3)
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.bn(self.conv(x))
            return torch.log(h.clamp(min=0)).mean(-1)  # BAD

    return named(stem=Stem(), head=nn.Linear(4, 1)), {"x": torch.randn(4, 1, 9)}, mean_of_squares


@program(phase="backward", mechanism="range-overflow", op="mul")
def gradient_explodes_through_time() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.zeros(4))
            self.gain = nn.Parameter(torch.full((4,), 12.0))

        def forward(self, x: Tensor) -> Tensor:
            h = self.start.expand(len(x), 4)
            for _ in range(50):
                h = h * self.gain  # BAD
            return h + x

    return Net(), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="forward", mechanism="pole", op="log", module="tower.blocks.2.ff.gate")
def deep_inside_nested_modules() -> Case:
    class Gate(nn.Module):
        def __init__(self, floor: float) -> None:
            super().__init__()
            self.floor = floor

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(F.relu(x) + self.floor)  # BAD

    class FeedForward(nn.Module):
        def __init__(self, floor: float) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8)
            self.gate = Gate(floor)
            self.down = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(self.gate(self.up(x)))
            return out

    class Block(nn.Module):
        def __init__(self, floor: float) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.ff = FeedForward(floor)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.ff(self.norm(x))

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(0.1), Block(1.0), Block(0.0), Block(1.0)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return named(tower=Tower(), head=nn.Linear(4, 1)), {"x": torch.randn(3, 4)}, mean_of_squares

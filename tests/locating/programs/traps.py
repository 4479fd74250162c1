"""Finite losses whose gradient is not: the branch that was not taken still has a derivative."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, mean_of_squares, named, program

Batch = dict[str, Tensor]


class Gain(nn.Module):
    """A learnt factor that keeps zeros zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


ZEROS_AMONG = torch.tensor([[0.5, 0.0, 2.0], [0.0, 1.5, 0.25]])


@program(phase="backward", mechanism="where-gradient", op="log")
def where_log() -> Case:
    class LogScale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.log(x)  # BAD
            return torch.where(x > 0, y, torch.zeros_like(x))

    return named(gain=Gain(3), scale=LogScale()), {"x": ZEROS_AMONG}, mean_of_squares


@program(phase=("backward", "forward"), mechanism=("where-gradient", "invalid"), op="sqrt")
def where_sqrt_of_negatives() -> Case:
    class SignedRoot(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, torch.sqrt(x), 0.1 * x)  # BAD

    return named(fc=nn.Linear(3, 4), root=SignedRoot()), {"x": torch.randn(5, 3)}, mean_of_squares


@program(phase="backward", mechanism="where-gradient", op="div")
def where_division() -> Case:
    class Sinc(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            raw = torch.sin(t) / t  # BAD
            return torch.where(t == 0, torch.ones_like(t), raw)

    return named(gain=Gain(3), sinc=Sinc()), {"x": ZEROS_AMONG}, mean_of_squares


@program(phase=("backward", "forward"), mechanism=("where-gradient", "range-overflow"), op="exp")
def where_exp() -> Case:
    class Warmup(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            grown = torch.exp(x)  # BAD
            return torch.where(x < 10, grown, x)

    return named(fc=nn.Linear(3, 4), warm=Warmup()), {"x": torch.randn(5, 3) * 200}, mean_of_squares


@program(phase=("backward", "forward"), mechanism=("where-gradient", "range-overflow"), op="expm1")
def elu_by_hand() -> Case:
    class Elu(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            negative = torch.expm1(x)  # BAD
            return torch.where(x > 0, x, negative)

    return named(fc=nn.Linear(3, 4), elu=Elu(), head=nn.Linear(4, 1)), {"x": torch.randn(5, 3) * 200}, mean_of_squares


@program(phase="backward", mechanism="where-gradient", op="acos")
def where_acos() -> Case:
    class Geodesic(nn.Module):
        def forward(self, cosine: Tensor) -> Tensor:
            angle = torch.acos(cosine)  # BAD
            return torch.where(cosine < 1, angle, torch.zeros_like(cosine))

    x = torch.tensor([[0.5, 1.0, -0.2], [0.1, 0.3, 1.0]])
    return named(gain=Gain(3), geodesic=Geodesic()), {"x": x}, mean_of_squares


@program(phase="backward", mechanism=("where-gradient", "pole"), op="log")
def nan_to_num_after_log() -> Case:
    class LogMel(nn.Module):
        def forward(self, power: Tensor) -> Tensor:
            return torch.nan_to_num(power.log(), neginf=-20.0)  # BAD

    return named(gain=Gain(3), mel=LogMel()), {"x": ZEROS_AMONG}, mean_of_squares


@program(phase="backward", mechanism=("where-gradient", "pole"), op="log")
def clamp_after_log() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        power = model(batch["x"])
        decibel = 10 * torch.log10(power)  # BAD
        return (decibel.clamp(min=-80) - batch["y"]).abs().mean()

    return Gain(3), {"x": ZEROS_AMONG, "y": torch.zeros(2, 3)}, step


@program(phase="backward", mechanism=("where-gradient", "pole"), op="sqrt")
def selected_after_sqrt() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        energy = model(batch["x"])
        amplitude = energy.sqrt()  # BAD
        return amplitude[energy > 0].mean()

    return Gain(3), {"x": ZEROS_AMONG}, step


@program(phase="backward", mechanism=("where-gradient", "pole", "invalid"), op="div")
def masked_fill_after_division() -> Case:
    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            base = F.hardtanh(self.base(x), 0.0, 1.0) * 1.0
            empty = x == 0
            ratio = base / x  # BAD
            return ratio.masked_fill(empty, 0.0)

    return named(gain=Gain(3), relative=Relative()), {"x": ZEROS_AMONG}, mean_of_squares


@program(phase=("backward", "forward"), mechanism=("where-gradient", "invalid"), op="pow")
def where_power() -> Case:
    class Compress(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.tensor(0.4))

        def forward(self, x: Tensor) -> Tensor:
            bright = x.pow(self.gamma)  # BAD
            return torch.where(x > 0.1, bright, x)

    return named(fc=nn.Linear(3, 4), compress=Compress()), {"x": torch.randn(5, 3)}, mean_of_squares

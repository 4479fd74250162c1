"""Values that were already bad: parameters, buffers and items of the batch. The marker is where they enter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, mean_of_squares, named, program

Batch = dict[str, Tensor]
NAN, INF = float("nan"), float("inf")


@program(phase="leaf", mechanism="bad-leaf", leaf="parameter body.w", index=(3,))
def nan_in_a_scale() -> Case:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w  # BAD

    model = named(stem=nn.Linear(4, 6), body=Scale(), head=nn.Linear(6, 1))
    model.body.w.data[3] = NAN
    return model, {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase="leaf", mechanism="bad-leaf", leaf="parameter blocks.1.fc.weight", index=(2, 5), module="blocks.1.fc")
def infinity_in_a_nested_weight() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.fc(x)) * 0.5 - self.fc(x) * 0.1  # BAD

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Net()
    model.get_submodule("blocks.1.fc").weight.data[2, 5] = INF
    return model, {"x": torch.randn(3, 8)}, mean_of_squares


@program(phase="leaf", mechanism="bad-leaf", leaf="buffer bn.running_mean", index=(2,), module="bn")
def nan_in_a_running_mean() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 5)
            self.bn = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.bn(self.fc(x))  # BAD
            return out

    model = Net().eval()  # a frozen norm while the rest is trained
    model.bn.running_mean[2] = NAN
    return model, {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase="leaf", mechanism="bad-leaf", leaf="buffer rope.table", index=(6, 1))
def infinity_in_a_position_table() -> Case:
    class Rope(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            used = self.table[: x.shape[1]]  # BAD
            return x * used.cos() + x * used  # BAD

    model = named(fc=nn.Linear(3, 4), rope=Rope())
    model.rope.table[6, 1] = INF
    return model, {"x": torch.randn(2, 8, 3)}, mean_of_squares


@program(phase="leaf", mechanism="bad-leaf", leaf="parameter tok.weight", index=(7, 2), module="tok")
def nan_in_the_row_of_one_token() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            e = self.tok(tokens)  # BAD
            out: Tensor = self.head(e.mean(1))
            return out

    model = Net()
    model.tok.weight.data[7, 2] = NAN
    return model, {"x": torch.tensor([[1, 2, 3], [4, 7, 0]])}, mean_of_squares


@program(phase="leaf", mechanism="bad-leaf", leaf="batch x", index=(4, 1), module="fc1")
def nan_in_an_input() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(3, 8)
            self.fc2 = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.fc1(x))  # BAD
            out: Tensor = self.fc2(h)
            return out

    x = torch.randn(6, 3)
    x[4, 1] = NAN
    return Net(), {"x": x}, mean_of_squares


@program(phase="leaf", mechanism="bad-leaf", leaf="batch y", index=(1, 0))
def infinity_in_a_target() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return F.smooth_l1_loss(model(batch["x"]), batch["y"])  # BAD

    y = torch.randn(3, 2)
    y[1, 0] = -INF
    return nn.Linear(4, 2), {"x": torch.randn(3, 4), "y": y}, step


@program(phase="leaf", mechanism="bad-leaf", leaf=("batch image.pixels", "batch image/pixels"), index=(0, 0, 2, 1))
def nan_in_a_nested_batch() -> Case:
    def step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        pixels = batch["image"]["pixels"]
        mean, std = batch["image"]["mean"], batch["image"]["std"]
        normal = (pixels - mean) / std  # BAD
        return F.cross_entropy(model(normal).flatten(1), batch["label"])

    pixels = torch.rand(2, 1, 4, 4)
    pixels[0, 0, 2, 1] = NAN
    image = {"pixels": pixels, "mean": torch.tensor(0.5), "std": torch.tensor(0.25)}
    return nn.Conv2d(1, 1, 3), {"image": image, "label": torch.tensor([0, 3])}, step


@program(phase="leaf", mechanism="bad-leaf", leaf=("batch 1", "batch [1]", "batch[1]", "batch.1"), index=(2,))
def nan_in_a_tuple_batch() -> Case:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, weight = batch
        return (model(x).squeeze(-1).pow(2) * weight).mean()  # BAD

    return nn.Linear(4, 1), (torch.randn(3, 4), torch.tensor([1.0, 0.5, NAN])), step

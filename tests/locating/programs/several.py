"""More than one origin in the same step: the first is primary, the others are told as well."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, mean_of_squares, program

Batch = dict[str, Tensor]


@program(phase="forward", mechanism="pole", op="log", module="logs")
def log_then_division() -> Case:
    class Logs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(F.relu(x))  # BAD

    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1 / F.relu(-x)  # ALSO

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)
            self.logs = Logs()
            self.inverse = Inverse()

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return self.logs(h) + self.inverse(h)

    return Net(), {"x": torch.randn(4, 3)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="exp")
def overflow_and_a_root_at_zero() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch["x"])
        grown = z.exp()  # BAD
        near = (z - z.detach()).square().sum(-1).sqrt()  # ALSO
        return grown.mean() + near.mean()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3) * 300}, step


@program(phase="backward", mechanism=("pole", "where-gradient", "invalid"), op="sqrt", module="")
def two_traps_in_backward() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.v = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            left = (x * self.w).sqrt()  # BAD
            right = torch.where(x > 0, (x * self.v).log(), 0.0)  # BAD
            return left + right

    return Net(), {"x": torch.tensor([[0.5, 0.0, 2.0]])}, mean_of_squares


@program(phase="forward", mechanism=("empty-reduction",), op="mean")
def three_terms_two_of_them_empty() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        error = (model(batch["x"]).squeeze(-1) - batch["y"]).abs()
        kind = batch["kind"]
        first = error[kind == 0].mean()
        second = error[kind == 1].mean()  # BAD
        third = error[kind == 2].mean()  # ALSO
        return first + second + third

    return nn.Linear(4, 1), {"x": torch.randn(5, 4), "y": torch.randn(5), "kind": torch.zeros(5)}, step


@program(phase=("leaf", "forward"), mechanism=("bad-leaf", "pole"), leaf="batch x", index=(0, 2), op="log", module="")
def bad_input_and_log_of_zero() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"]).mean()  # BAD
        weight = torch.log(batch["count"])  # ALSO
        return out + weight.mean()

    x = torch.randn(2, 3)
    x[0, 2] = float("nan")
    return nn.Linear(3, 1), {"x": x, "count": torch.tensor([2.0, 0.0])}, step


@program(phase="forward", mechanism="pole", op="log", module="1")
def same_line_in_two_modules() -> Case:
    class LogScale(nn.Module):
        def __init__(self, floor: float) -> None:
            super().__init__()
            self.floor = floor

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(F.relu(x) + self.floor)  # BAD

    model = nn.Sequential(LogScale(1.0), LogScale(0.0), nn.Linear(3, 1), LogScale(0.1))
    return model, {"x": torch.tensor([[0.0, 1.0, 2.0]])}, mean_of_squares

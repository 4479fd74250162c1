"""In-place operations, views, scatters, embeddings and complex numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, mean_of_squares, named, program

Batch = dict[str, Tensor]


@program(phase="forward", mechanism="pole", op="log_")
def log_in_place() -> Case:
    class LogRate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rate = x.clamp(min=0) * 2
            rate.log_()  # BAD
            return rate

    return named(fc=nn.Linear(3, 4), rate=LogRate()), {"x": torch.randn(4, 3)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="exp_")
def box_sizes_through_a_view() -> Case:
    class Boxes(nn.Module):
        def forward(self, raw: Tensor) -> Tensor:
            box = raw * 1.0
            box[..., :2].mul_(0.5)
            box[..., 2:].exp_()  # BAD
            return box / 8

    return named(head=nn.Linear(6, 4), boxes=Boxes()), {"x": torch.randn(5, 6) * 300}, mean_of_lengths


@program(phase="forward", mechanism="invalid", op="div_")
def narrow_view_divided_in_place() -> Case:
    class Weighted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x.clone()
            tail = out.narrow(1, 2, 2)
            tail -= tail.mean(0)
            tail.div_(tail.detach().std(0))  # BAD
            return out

    fc = nn.Linear(3, 4)
    with torch.no_grad():
        fc.weight[3] = 0
        fc.bias[3] = 0.5
    return named(fc=fc, weighted=Weighted()), {"x": torch.randn(4, 3)}, mean_of_squares


@program(phase="forward", mechanism="pole", op="div")
def ratio_written_into_a_slice() -> Case:
    class Features(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), 5)
            out[:, :3] = x
            ratio = x[:, 0] / F.relu(x[:, 1])  # BAD
            out[:, 3] = ratio
            out[:, 4] = x.sum(-1)
            return out

    return (
        named(fc=nn.Linear(3, 3), features=Features(), head=nn.Linear(5, 1)),
        {"x": torch.randn(6, 3)},
        mean_of_squares,
    )


@program(phase="forward", mechanism="pole", op="log")
def target_written_with_out() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        target = torch.empty(3, 2)
        with torch.no_grad():
            torch.log(batch["count"], out=target)  # BAD
        return F.mse_loss(model(batch["x"]), target)

    return nn.Linear(4, 2), {"x": torch.randn(3, 4), "count": torch.tensor([[1.0, 4.0], [0.0, 2.0], [3.0, 1.0]])}, step


@program(phase="forward", mechanism=("empty-reduction", "invalid"), op="div")
def pooling_of_an_empty_cluster() -> Case:
    class Pool(nn.Module):
        def forward(self, x: Tensor, cluster: Tensor) -> Tensor:
            total = torch.zeros(4, x.shape[1]).index_add_(0, cluster, x)
            size = torch.zeros(4).scatter_add_(0, cluster, torch.ones(len(cluster)))
            return total / size[:, None]  # BAD

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.pool = Pool()

        def forward(self, x: Tensor, cluster: Tensor) -> Tensor:
            out: Tensor = self.pool(self.fc(x), cluster)
            return out

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["cluster"]).pow(2).mean()

    return Net(), {"x": torch.randn(5, 3), "cluster": torch.tensor([0, 1, 1, 3, 0])}, step


@program(phase="forward", mechanism="pole", op="reciprocal")
def inverse_frequency_put_into_a_table() -> Case:
    class Rebalance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor, y: Tensor, seen: Tensor) -> Tensor:
            table = torch.ones(4)
            rare = seen[y].reciprocal()  # BAD
            table.index_put_((y,), rare)
            return F.cross_entropy(self.fc(x), y, weight=table)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch["x"], batch["y"], batch["seen"])
        return loss

    batch = {"x": torch.randn(3, 3), "y": torch.tensor([0, 2, 3]), "seen": torch.tensor([4.0, 2.0, 0.0, 1.0])}
    return Rebalance(), batch, step


@program(phase="backward", mechanism="pole", op="sqrt")
def norm_of_a_looked_up_zero() -> Case:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4)
            nn.init.zeros_(self.table.weight[2:3].detach())

        def forward(self, tokens: Tensor) -> Tensor:
            e = self.table(tokens)
            return torch.sqrt(torch.einsum("btd,btd->bt", e, e))  # BAD

    return named(lookup=Lookup()), {"x": torch.tensor([[1, 2], [4, 5]])}, mean_of_lengths


def mean_of_lengths(model: nn.Module, batch: Batch) -> Tensor:
    out: Tensor = model(batch["x"])
    return out.mean()


@program(phase="forward", mechanism="range-overflow", op="exp")
def edge_softmax_by_scatter() -> Case:
    class EdgeSoftmax(nn.Module):
        def forward(self, score: Tensor, target: Tensor) -> Tensor:
            odds = score.exp()  # BAD
            total = torch.zeros(3).scatter_reduce(0, target, odds, "sum")
            return odds / total.gather(0, target)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 1)
            self.softmax = EdgeSoftmax()

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            out: Tensor = self.softmax(self.score(x).squeeze(-1), target)
            return out

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["target"]).pow(2).sum()

    return Net(), {"x": torch.randn(6, 4) * 400, "target": torch.tensor([0, 0, 1, 1, 2, 2])}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def complex_division_by_a_silent_bin() -> Case:
    class Deconvolve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.ones(8))

        def forward(self, wave: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(wave * self.filter)
            response = torch.fft.rfft(torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1]))
            clean = spectrum / response  # BAD
            return torch.fft.irfft(clean, n=8)

    return named(deconvolve=Deconvolve()), {"x": torch.randn(2, 8)}, mean_of_squares


@program(phase="backward", mechanism="pole", op="sqrt")
def magnitude_of_a_silent_frame() -> Case:
    class Magnitude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.window = nn.Parameter(torch.hann_window(8))

        def forward(self, frames: Tensor) -> Tensor:
            z = torch.fft.rfft(frames * self.window)
            power = z.real**2 + z.imag**2
            return power.sqrt()  # BAD

    frames = torch.randn(3, 8)
    frames[1] = 0
    return named(magnitude=Magnitude()), {"x": frames}, mean_of_lengths


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def complex_root_of_zero() -> Case:
    class HalfAngle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.Parameter(torch.tensor([[1.0, 0.5], [0.0, 0.0]]))

        def forward(self, x: Tensor) -> Tensor:
            z = torch.view_as_complex(self.pair) * x
            half = torch.sqrt(z)  # BAD
            return half.real

    return named(angle=HalfAngle()), {"x": torch.tensor([1.0, 2.0])}, mean_of_lengths

"""Functions met where they, or their derivatives, have no finite value."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, mean_of_squares, named, program


@program(phase="forward", mechanism="pole", op="log")
def entropy_of_dead_units() -> Case:
    class Entropy(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            rate = F.relu(h)
            rate = rate / (1 + rate.sum(-1, keepdim=True))
            surprise = -torch.log(rate)  # BAD
            return (rate * surprise).sum(-1)

    return named(proj=nn.Linear(6, 8), entropy=Entropy()), {"x": torch.randn(5, 6)}, mean_of_squares


@program(phase="forward", mechanism="pole", op="log")
def log_in_a_chained_call() -> Case:
    class Energy(nn.Module):
        def forward(self, wave: Tensor) -> Tensor:
            return (
                wave.unfold(-1, 4, 4)
                .pow(2)
                .mean(-1)
                .log()  # BAD
                .mul(10.0)
            )

    wave = torch.randn(2, 16)
    wave[1, 4:8] = 0  # digital silence
    return named(energy=Energy(), head=nn.Linear(4, 1)), {"x": wave}, mean_of_squares


@program(phase="backward", mechanism="pole", op="sqrt")
def distance_to_oneself() -> Case:
    class Distances(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            squared = (z[:, None] - z[None]).pow(2).sum(-1)
            return squared.sqrt()  # BAD

    return named(embed=nn.Linear(4, 3), pairs=Distances()), {"x": torch.randn(6, 4)}, mean_of_distances


def mean_of_distances(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(batch["x"])
    return out.mean()


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def unit_vector_of_padding() -> Case:
    class Unit(nn.Module):
        def forward(self, e: Tensor) -> Tensor:
            length = e.norm(dim=-1, keepdim=True)
            return e / length  # BAD

    tokens = torch.tensor([[3, 5, 2], [4, 0, 0]])
    return named(tok=nn.Embedding(8, 4, padding_idx=0), unit=Unit()), {"x": tokens}, mean_of_squares


@program(phase="backward", mechanism="invalid", op="hypot")
def hypotenuse_of_a_resting_point() -> Case:
    class Speed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2))

        def forward(self, v: Tensor) -> Tensor:
            u = v * self.gain
            return torch.hypot(u[:, 0], u[:, 1])  # BAD

    v = torch.randn(6, 2)
    v[2] = 0
    return named(speed=Speed()), {"x": v}, mean_of_distances


@program(phase="forward", mechanism="pole", op="rsqrt")
def graph_with_an_isolated_node() -> Case:
    class GraphConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(3, 3)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            degree = adjacency.sum(-1)
            scale = degree.rsqrt()  # BAD
            normal = scale[:, None] * adjacency * scale[None]
            return normal @ self.mix(x)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"], batch["adjacency"]) - batch["y"]).pow(2).mean()

    adjacency = torch.ones(4, 4)
    adjacency[3] = adjacency[:, 3] = 0
    return GraphConv(), {"x": torch.randn(4, 3), "adjacency": adjacency, "y": torch.randn(4, 3)}, step


@program(phase="forward", mechanism="invalid", op="div")
def rescaled_constant_feature() -> Case:
    class MinMax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            low, high = x.amin(0), x.amax(0)
            return (x - low) / (high - low)  # BAD

    x = torch.randn(6, 3)
    x[:, 1] = 0.5
    return named(scale=MinMax(), head=nn.Linear(3, 1)), {"x": x}, mean_of_squares


@program(phase="forward", mechanism="pole", op="reciprocal")
def infinite_weight_times_zero() -> Case:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        weight = 1.0 / batch["count"]  # BAD
        error = (model(batch["x"]) - batch["y"]).pow(2).mean(-1)
        return (error * batch["present"] * weight).sum()

    count = torch.tensor([3.0, 1.0, 0.0, 2.0])
    batch = {"x": torch.randn(4, 5), "y": torch.randn(4, 2), "count": count, "present": (count > 0).float()}
    return nn.Linear(5, 2), batch, step


@program(phase="backward", mechanism="pole", op="pow")
def gamma_correction_of_black() -> Case:
    class Develop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exposure = nn.Parameter(torch.ones(3, 1, 1))

        def forward(self, image: Tensor) -> Tensor:
            linear = image * self.exposure
            return linear ** (1 / 2.2)  # BAD

    image = torch.rand(2, 3, 4, 4)
    image[0, 1, 2, 2] = 0
    return named(develop=Develop()), {"x": image}, mean_of_distances


@program(phase="forward", mechanism="invalid", op="pow")
def fractional_power_of_a_negative() -> Case:
    class Warp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**1.5  # BAD

    return named(fc=nn.Linear(4, 4), warp=Warp()), {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase="backward", mechanism="pole", op="pow")
def generalised_mean_of_a_dark_channel() -> Case:
    class GeM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: Tensor) -> Tensor:
            powered = F.relu(x).pow(self.p).mean((-1, -2))
            return powered.pow(1 / self.p)  # BAD

    conv = nn.Conv2d(1, 3, 3)
    with torch.no_grad():
        conv.weight[1] = 0
        conv.bias[1] = 0  # not below zero: exactly zero
    return named(conv=conv, pool=GeM()), {"x": torch.rand(2, 1, 6, 6)}, mean_of_distances


@program(phase="backward", mechanism="pole", op="acos")
def angle_between_equal_directions() -> Case:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.delta = nn.Parameter(torch.zeros(3))

        def forward(self, target: Tensor) -> Tensor:
            cosine = (torch.eye(3) * (1 + self.delta) * target).sum((-1, -2)).sub(1).div(2)
            return torch.acos(cosine)  # BAD

    return named(rotation=Rotation()), {"x": torch.eye(3).expand(2, 3, 3)}, mean_of_distances


@program(phase="forward", mechanism="invalid", op="acos")
def cosine_a_bit_above_one() -> Case:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        a, b = model(batch["x"]), model(batch["x"])
        cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
        return torch.acos(cosine).mean()  # BAD

    return nn.Linear(7, 33), {"x": torch.randn(64, 7)}, step


@program(phase="backward", mechanism="pole", op="asin")
def pitch_in_gimbal_lock() -> Case:
    class Euler(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            w, x, y, z = q.unbind(-1)
            sine = 2 * (w * y - z * x)
            return torch.asin(sine)  # BAD

    class Pose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.tensor([[1.0, 0.0, 0.5, 0.0], [1.0, 0.0, 0.1, 0.0]]))
            self.euler = Euler()

        def forward(self, target: Tensor) -> Tensor:
            return self.euler(self.q) - target

    return Pose(), {"x": torch.zeros(2)}, mean_of_squares


@program(phase="forward", mechanism="invalid", op="div")
def heading_of_zero_velocity() -> Case:
    class Heading(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            slope = v[..., 1] / v[..., 0]  # BAD
            return torch.atan(slope)

    fc = nn.Linear(3, 2, bias=False)
    x = torch.randn(4, 3)
    x[1] = 0
    return named(fc=fc, heading=Heading()), {"x": x}, mean_of_squares


@program(phase="forward", mechanism="invalid", op="logdet")
def flow_with_negative_determinant() -> Case:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.diag(torch.tensor([1.0, -1.0, 1.0])))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x @ self.w, torch.logdet(self.w)  # BAD

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z, logdet = model(batch["x"])
        return z.pow(2).sum(-1).mean() / 2 - logdet

    return Flow(), {"x": torch.randn(4, 3)}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="linalg_inv_ex")
def inverse_of_a_singular_matrix() -> Case:
    class Whiten(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gram = x.T @ x
            inverse, _ = torch.linalg.inv_ex(gram)  # BAD
            return x @ inverse

    fc = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        fc.weight.copy_(torch.ones(2, 2))  # both features are the same
    return named(fc=fc, whiten=Whiten()), {"x": torch.ones(4, 2)}, mean_of_squares


@program(phase="backward", mechanism=("pole", "invalid"), op="linalg_eigh")
def eigenvectors_of_equal_eigenvalues() -> Case:
    class Principal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.root = nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            covariance = self.root @ self.root.T
            _, axes = torch.linalg.eigh(covariance)  # BAD
            return x @ axes[:, :1]

    return named(principal=Principal()), {"x": torch.randn(4, 3)}, mean_of_squares


@program(phase="backward", mechanism=("pole", "invalid"), op="xlogy")
def xlogy_at_zero() -> Case:
    class Rates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.tensor([0.3, 0.0, 0.7]))

        def forward(self, count: Tensor) -> Tensor:
            return torch.xlogy(count, self.rate * count) - self.rate  # BAD

    return named(rates=Rates()), {"x": torch.tensor([[1.0, 0.0, 2.0]])}, mean_of_distances


@program(phase="forward", mechanism=("pole", "invalid"), op="native_layer_norm", module="encoder.layers.1.norm")
def layer_norm_without_eps() -> Case:
    class Layer(nn.Module):
        def __init__(self, gain: float) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4, eps=0.0)
            with torch.no_grad():
                self.fc.weight.mul_(gain)
                self.fc.bias.mul_(gain)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x))  # BAD

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(1.0), Layer(0.0), Layer(1.0)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    return named(encoder=Encoder(), head=nn.Linear(4, 1)), {"x": torch.randn(3, 4)}, mean_of_squares

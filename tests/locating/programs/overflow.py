"""Values that leave the range of their float format, at the top or at the bottom."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, mean_of_squares, named, program


@program(phase="forward", mechanism="range-overflow", op="exp")
def softmax_by_hand() -> Case:
    class Route(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            odds = torch.exp(scores)  # BAD
            return odds / odds.sum(-1, keepdim=True)

    return named(gate=nn.Linear(4, 4), route=Route()), {"x": torch.randn(3, 4) * 500}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="exp")
def sinkhorn_overflow() -> Case:
    class Sinkhorn(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            plan = (scores / 0.01).exp()  # BAD
            for _ in range(3):
                plan = plan / plan.sum(-1, keepdim=True)
                plan = plan / plan.sum(-2, keepdim=True)
            return plan

    return named(mix=nn.Linear(4, 4), sinkhorn=Sinkhorn()), {"x": torch.randn(4, 4) * 3}, mean_of_squares


@program(phase="forward", mechanism=("underflow", "pole"), op="div")
def sinkhorn_underflow() -> Case:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        a, b = model(batch["x"]), batch["y"]
        cost = (a[:, None] - b[None]).pow(2).sum(-1)
        kernel = torch.exp(-cost / 0.08)
        u = torch.ones(len(a))
        for _ in range(3):
            v = 0.25 / (kernel.T @ u)  # BAD
            u = 0.25 / (kernel @ v)  # ALSO: rows of the kernel are all zero as well
        return (u[:, None] * kernel * v[None] * cost).sum()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3), "y": torch.randn(4, 2) + 3}, step


@program(phase="forward", mechanism="range-overflow", op="mm")
def fp16_attention_scores() -> Case:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 16).half()
            self.k = nn.Linear(8, 16).half()

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.q(x.half()), self.k(x.half())
            scores = q @ k.transpose(-1, -2)  # BAD
            return (scores / 4).softmax(-1)

    return named(attention=Attention()), {"x": torch.randn(2, 5, 8) * 300}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="mm")
def bf16_power_iteration() -> Case:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(8) * 8 + torch.rand(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            v = x.bfloat16()
            for _ in range(60):
                v = v @ self.w.bfloat16()  # BAD
            return v / v.norm(dim=-1, keepdim=True)

    return named(spectral=Spectral()), {"x": torch.rand(2, 8)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="convolution", module="block.conv2")
def fp16_convolution() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
            self.conv2 = nn.Conv2d(4, 2, 3, padding=1)
            nn.init.constant_(self.conv2.weight, 2.0)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.conv1(x))
            h = self.conv2(h)  # BAD
            return h / 1000

    model = named(block=Block()).half()
    return model, {"x": (torch.rand(1, 2, 6, 6) * 20000).half()}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="sum")
def fp16_sum_of_errors() -> Case:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        error = (model(batch["x"].half()) - batch["y"].half()).abs()
        total = error.sum()  # BAD
        return total.float() / error.numel()

    return nn.Linear(4, 32).half(), {"x": torch.randn(64, 4), "y": torch.full((64, 32), 60.0)}, step


@program(phase="forward", mechanism="range-overflow", op="var")
def fp16_variance() -> Case:
    class Spread(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            spread = h.var(-1)  # BAD
            return spread.float().log1p()

    model = named(fc=nn.Linear(4, 16).half(), spread=Spread())
    return model, {"x": (torch.randn(3, 4) * 800).half()}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="mean")
def fp16_layer_norm_by_moments() -> Case:
    class Norm(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            mean = h.mean(-1, keepdim=True)
            second = (h * h).mean(-1, keepdim=True)  # BAD
            variance = second - mean * mean  # ALSO
            return (h - mean) / (variance + 1e-3).sqrt()

    model = named(fc=nn.Linear(4, 8).half(), norm=Norm())
    with torch.no_grad():
        model.fc.bias.fill_(400)
    return model, {"x": torch.randn(3, 4).half()}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="linear", module="down")
def autocast_linear() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 64)
            self.down = nn.Linear(64, 1)
            nn.init.constant_(self.down.weight, 10.0)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                h = F.relu(self.up(x))
                out = self.down(h)  # BAD
            return out.float() * 1e-3

    return Net(), {"x": torch.randn(4, 8) * 2000}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="_to_copy", module="fc")
def cast_at_the_autocast_boundary() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, age_in_seconds: Tensor) -> Tensor:
            squared = age_in_seconds.square()
            with torch.autocast("cpu", dtype=torch.float16):
                out = self.fc(squared)  # BAD
            return out.float()

    return Net(), {"x": torch.tensor([[1.0, 2.0, 400.0]])}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="_to_copy")
def explicit_cast_to_half() -> Case:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        target = batch["y"].half()  # BAD
        return F.smooth_l1_loss(model(batch["x"]), target.float())

    return nn.Linear(3, 1), {"x": torch.randn(2, 3), "y": torch.tensor([[12.0], [81000.0]])}, step


@program(phase="forward", mechanism=("underflow", "pole"), op="log")
def bf16_rounds_a_probability_to_one() -> Case:
    class Miss(nn.Module):
        def forward(self, logit: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                p = torch.sigmoid(logit.bfloat16())
                return torch.log(1 - p)  # BAD

    return named(fc=nn.Linear(4, 2), miss=Miss()), {"x": torch.randn(4, 4) * 20}, mean_of_squares


@program(phase="backward", mechanism="range-overflow", op="linear", module="head")
def fp16_gradient_under_a_loss_scale() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 16).half()
            self.head = nn.Linear(16, 2).half()

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x.half())  # ALSO
            return self.head(h)  # BAD

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).float() - 1).pow(2).mean() * 2.0**13

    return Net(), {"x": torch.randn(64, 4) * 20}, step


@program(phase="forward", mechanism="range-overflow", op="exp")
def softplus_by_hand() -> Case:
    class Softplus(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log1p(torch.exp(x))  # BAD

    return named(fc=nn.Linear(3, 3), act=Softplus()), {"x": torch.randn(4, 3) * 300}, mean_of_squares


@program(phase=("forward", "backward"), mechanism="range-overflow", op="exp")
def sigmoid_by_hand() -> Case:
    class Sigmoid(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            odds = torch.exp(-x)  # BAD
            return 1 / (1 + odds)

    return named(fc=nn.Linear(3, 3), act=Sigmoid()), {"x": torch.randn(4, 3) * 300}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="cosh")
def log_cosh_loss() -> Case:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        error = model(batch["x"]) - batch["y"]
        return torch.log(torch.cosh(error)).mean()  # BAD

    return nn.Linear(3, 1), {"x": torch.randn(4, 3), "y": torch.tensor([[1.0], [2.0], [120.0], [0.0]])}, step


@program(phase="forward", mechanism="range-overflow", op="exp")
def exploding_log_variance() -> Case:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mu = nn.Linear(4, 2)
            self.logvar = nn.Linear(4, 2)
            self.decode = nn.Linear(2, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mu, logvar = self.mu(x), self.logvar(x)
            spread = torch.exp(logvar / 2).clamp(max=10)
            return self.decode(mu + torch.randn_like(mu) * spread), mu, logvar

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        recon, mu, logvar = model(x)
        kl = (mu.pow(2) + logvar.exp() - 1 - logvar).sum(-1) / 2  # BAD
        return F.mse_loss(recon, x) + kl.mean()

    model = VAE()
    nn.init.constant_(model.logvar.bias, 95.0)
    return model, {"x": torch.randn(3, 4)}, step


@program(phase="forward", mechanism="range-overflow", op="cumprod")
def product_of_growth_rates() -> Case:
    class Compound(nn.Module):
        def forward(self, rate: Tensor) -> Tensor:
            growth = torch.cumprod(1 + F.softplus(rate), -1)  # BAD
            return growth / growth.amax(-1, keepdim=True)

    return named(rate=nn.Linear(2, 100), compound=Compound()), {"x": torch.full((2, 2), 20.0)}, mean_of_squares


@program(phase="forward", mechanism=("underflow", "pole"), op="log")
def transmittance_underflow() -> Case:
    class Render(nn.Module):
        def forward(self, density: Tensor) -> Tensor:
            alpha = torch.sigmoid(density)
            light = torch.cumprod(1 - alpha, -1)
            return torch.log(light)  # BAD

    return named(density=nn.Linear(2, 150), render=Render()), {"x": torch.randn(2, 2)}, mean_of_squares


@program(phase="forward", mechanism=("underflow", "invalid"), op="div")
def fp16_eps_rounds_to_zero() -> Case:
    class Embed(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return F.normalize(h, dim=-1, eps=1e-8)  # BAD

    x = torch.randn(3, 4)
    x[1] = 0
    return named(fc=nn.Linear(4, 4, bias=False), embed=Embed()).half(), {"x": x.half()}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="einsum")
def fp16_einsum() -> Case:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.Parameter(torch.full((4, 4, 4), 30.0).half())

        def forward(self, x: Tensor) -> Tensor:
            joint = torch.einsum("bi,ijk,bj->bk", x, self.core, x)  # BAD
            return joint / joint.abs().amax(-1, keepdim=True)

    return named(bilinear=Bilinear()), {"x": (torch.rand(2, 4) * 30 + 10).half()}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="mul")
def recurrence_that_grows() -> Case:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.outer = nn.Linear(4, 4, bias=False)
            nn.init.eye_(self.outer.weight)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            drive = torch.tanh(self.inner(x))
            return drive + self.outer(h) * 6  # BAD

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()

        def forward(self, sequence: Tensor) -> Tensor:
            h = torch.zeros(sequence.shape[0], 4)
            for x in sequence.unbind(1):
                h = self.cell(x, h)
            return torch.tanh(h) - h / h.detach()

    return Net(), {"x": torch.randn(2, 60, 4)}, sum_of_absolutes


def sum_of_absolutes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(batch["x"])
    return out.abs().sum()

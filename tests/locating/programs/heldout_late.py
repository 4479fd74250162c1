"""The last part of the set: labeled before the locator ever saw it, and scored on first contact."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, mean_of_squares, named, program

Batch = dict[str, Tensor]


@program(phase="forward", mechanism=("range-overflow",), op="exp")
def reparametrized_scale() -> Case:
    """A log-variance head drifts far up before exp is taken."""

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_variance = nn.Linear(3, 2), nn.Linear(3, 2)
            with torch.no_grad():
                self.log_variance.bias.fill_(190.0)

        def forward(self, x: Tensor) -> Tensor:
            mean, logvar = self.mean(x), self.log_variance(x)
            z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
            kl = 1 + logvar - mean**2 - logvar.exp()  # BAD
            return z.tanh().sum() - 0.5 * kl.sum()

    return named(vae=VAE()), {"x": torch.randn(2, 3)}, lambda m, b: m(b["x"])


@program(phase="forward", mechanism=("invalid", "pole", "underflow"), op="log")
def gumbel_noise_from_a_zero_draw() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        noise = -torch.log(-torch.log(batch["u"]))  # BAD
        return F.softmax(logits + noise * noise, -1).pow(2).mean()

    u = torch.rand(2, 4)
    u[0, 1] = 0.0
    return nn.Linear(3, 4), {"x": torch.randn(2, 3), "u": u}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="reciprocal")
def inverse_depth_of_the_sky() -> Case:
    class Disparity(nn.Module):
        def forward(self, depth: Tensor) -> Tensor:
            return 1.0 / depth  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        depth = F.relu(model.head(batch["x"]))  # type: ignore[operator]
        return model.disparity(depth).mean()  # type: ignore[operator]

    model = nn.Module()
    model.head, model.disparity = nn.Linear(3, 8), Disparity()
    return model, {"x": torch.randn(2, 3)}, step


@program(phase="forward", mechanism=("invalid", "empty-reduction"), op="div")
def dice_of_an_empty_slice() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = (torch.sigmoid(model(batch["x"])) > 2).float() * model(batch["x"])
        overlap = (p * batch["mask"]).sum((1, 2))
        dice = 2 * overlap / (p.sum((1, 2)) + batch["mask"].sum((1, 2)))  # BAD
        return 1 - dice.mean()

    return nn.Linear(4, 4), {"x": torch.randn(2, 3, 4), "mask": torch.zeros(2, 3, 4)}, step


@program(phase="forward", mechanism=("range-overflow",), op="addmm", module="head.out")
def logits_of_a_half_head() -> Case:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 5).half()
            with torch.no_grad():
                self.out.weight.fill_(200.0)

        def forward(self, h: Tensor) -> Tensor:
            logits: Tensor = self.out(h.half())  # BAD
            return logits

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])

    return named(head=Head()), {"x": torch.full((2, 8), 60.0), "y": torch.tensor([0, 1])}, step


@program(phase="forward", mechanism=("range-overflow",), op="sum")
def bf16_autocast_is_fine_until_the_cube() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            h = model(batch["x"])
        cubed = h**3  # BAD
        return cubed.float().mean()

    fc = nn.Linear(3, 2)
    with torch.no_grad():
        fc.bias.fill_(60.0)
    return fc, {"x": torch.randn(2, 3)}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="linalg_cholesky_ex")
def covariance_that_lost_a_direction() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch["x"])
        cov = h.T @ h / len(h)
        det = torch.linalg.det(cov * 0)
        return torch.log(det) + h.pow(2).mean()  # BAD

    return nn.Linear(3, 4), {"x": torch.randn(6, 3)}, step


@program(phase="forward", mechanism=("pole",), op="log")
def hidden_in_a_helper_function() -> Case:
    def entropy(p: Tensor) -> Tensor:
        return -(p * p.log()).sum(-1)  # BAD

    def regularize(p: Tensor, weight: float) -> Tensor:
        return weight * entropy(p).mean()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = F.one_hot(batch["y"], 3).float() * torch.sigmoid(model(batch["x"]))
        return F.binary_cross_entropy(p, torch.ones_like(p) * 0.5) + regularize(p, 0.01)

    return nn.Linear(4, 3), {"x": torch.randn(2, 4), "y": torch.tensor([0, 2])}, step


@program(phase="backward", mechanism=("pole", "invalid"), op="asin")
def haversine_of_the_same_place() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        lat = model(batch["x"]).squeeze(-1)
        a = torch.sin((lat - lat.detach()) / 2) ** 2
        distance = 2 * torch.asin(torch.sqrt(a))  # BAD
        return distance.mean()

    return nn.Linear(3, 1), {"x": torch.randn(2, 3)}, step


@program(phase="backward", mechanism=("where-gradient", "pole", "invalid"), op="div")
def sinc_with_a_mask_multiplied() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        t = model(batch["x"])
        safe = t != 0
        value = torch.where(safe, torch.sin(t) / t, torch.ones_like(t))  # BAD
        return value.mean()

    return nn.Linear(3, 2, bias=False), {"x": torch.zeros(2, 3)}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def masked_by_multiplication() -> Case:
    """A mask that is multiplied does not remove an infinity."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        ratio = model(batch["x"]) / batch["area"]  # BAD
        return (ratio * (batch["area"] > 0)).sum()

    return nn.Linear(3, 1), {"x": torch.randn(3, 3), "area": torch.tensor([[1.0], [0.0], [2.0]])}, step


@program(phase="leaf", mechanism="bad-leaf", leaf=("batch y", "input y"), index=(2,))
def closure_over_a_bad_label() -> Case:
    y = torch.tensor([0.0, 1.0, math.inf])

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"]).squeeze(-1) - y).abs().mean()  # BAD

    return nn.Linear(3, 1), {"x": torch.randn(3, 3)}, step


@program(phase="forward", mechanism=("masked-row", "invalid"), op="_log_softmax")
def token_filter_removes_everything() -> Case:
    """Top-p filtering at p = 0 leaves no token."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        order = logits.sort(-1, descending=True)
        cumulative = order.values.softmax(-1).cumsum(-1)
        drop = (cumulative > 0.0).scatter(-1, order.indices, cumulative > 0.0)
        kept = logits.masked_fill(drop, float("-inf"))
        return -F.log_softmax(kept, -1)[:, 0].mean()  # BAD

    return nn.Linear(3, 4), {"x": torch.randn(2, 3)}, step


@program(phase="forward", mechanism=("masked-row", "invalid"), op="_softmax")
def alibi_bias_and_padding() -> Case:
    class Attention(nn.Module):
        slopes: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(4, 4)
            self.register_buffer("slopes", torch.tensor([0.5, 0.25]))

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            distance = -(torch.arange(3)[None] - torch.arange(3)[:, None]).abs().float()
            bias = self.slopes[:, None, None] * distance
            bias = bias + torch.zeros(2, 1, 1, 3).masked_fill(~keep[:, None, None], float("-inf"))
            scores = (self.q(x) @ x.transpose(1, 2))[:, None] + bias
            return torch.nn.functional.softmax(scores.float(), dim=-1).type_as(scores)  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["keep"]).pow(2).mean()

    keep = torch.tensor([[True, True, False], [False, False, False]])
    return Attention(), {"x": torch.randn(2, 3, 4), "keep": keep}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def gan_loss_of_a_confident_critic() -> Case:
    critic = nn.Linear(2, 1)
    with torch.no_grad():
        critic.weight.fill_(1e4)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        fake = model(batch["z"]).abs() + 1
        return torch.log(1 - torch.sigmoid(critic(fake))).mean()  # BAD

    return nn.Linear(3, 2), {"z": torch.randn(4, 3)}, step


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def several_calls_of_one_layer() -> Case:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs().sqrt()  # BAD

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.root = nn.Linear(3, 3), Root()

        def forward(self, x: Tensor) -> Tensor:
            h = self.root(self.fc(x))
            return self.root(h - h.detach())

    return named(twice=Twice()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "pole"), op="lgamma")
def beta_likelihood_at_the_edge() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        a, b = F.softplus(model(batch["x"])).chunk(2, -1)
        y = batch["y"]
        logp = (a - 1) * y.log() + (b - 1) * (1 - y).log()  # BAD
        return -(logp - torch.lgamma(a) - torch.lgamma(b) + torch.lgamma(a + b)).mean()

    return nn.Linear(3, 2), {"x": torch.randn(2, 3), "y": torch.tensor([[0.0], [0.5]])}, step


@program(phase="forward", mechanism=("pole", "bad-leaf"), op="div")
def constant_of_another_module() -> Case:
    class Stats:
        mean, std = torch.zeros(3), torch.tensor([1.0, 0.0, 2.0])

    def step(model: nn.Module, batch: Batch) -> Tensor:
        x = (batch["x"] - Stats.mean) / Stats.std  # BAD
        return model(x).pow(2).mean()

    x = torch.randn(2, 3)
    return nn.Linear(3, 2), {"x": x}, step


@program(phase="forward", mechanism=("invalid", "pole", "range-overflow"), op="sub")
def difference_of_two_overflows() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch["x"]) * 100 + 200
        sinh = (torch.exp(h) - torch.exp(h.detach())) / 2  # BAD
        return sinh.mean()

    return nn.Linear(3, 2), {"x": torch.randn(2, 3)}, step


def hooked(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["x"])
    out.register_hook(lambda g: g / g.sum() * 0)  # BAD
    return (out - out.detach().mean() * 0).sum() * 0 + out.sum() - out.sum()


@program(phase="backward", mechanism=("invalid", "pole", "empty-reduction"), op="div", uses=(hooked,))
def gradient_hook_that_normalizes() -> Case:
    return nn.Linear(3, 2), {"x": torch.randn(2, 3)}, hooked

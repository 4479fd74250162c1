"""A further part, written and labeled after `fields.py` had been answered, and scored on first contact."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, healthy, mean_of_squares, named, program

Batch = dict[str, Tensor]


@program(phase="forward", mechanism=("invalid", "masked-row", "pole"))
def contrast_with_a_temperature_below_zero() -> Case:
    """−inf on the diagonal becomes +inf when a learned temperature has changed its sign."""

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(-0.1))

        def forward(self, x: Tensor) -> Tensor:
            scores = (x @ x.T).fill_diagonal_(-math.inf)
            logits = scores / self.temperature  # BAD
            return torch.softmax(logits, -1)  # BAD

    return named(fc=nn.Linear(4, 4), contrast=Contrast()), {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="exp")
def learned_logit_scale_without_a_limit() -> Case:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.tensor(95.0))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.log_scale.exp()  # BAD
            return scale * F.relu(x - 100)

    return named(fc=nn.Linear(4, 4), clip=Clip()), {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase="forward", mechanism="invalid", op="div")
def coordinates_of_an_image_one_pixel_wide() -> Case:
    class Grid(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            height, width = image.shape[-2:]
            x = 2 * torch.arange(width) / (width - 1) - 1  # BAD
            y = 2 * torch.arange(height) / (height - 1) - 1
            grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)
            return image + grid.sum(-1)

    model = named(conv=nn.Conv2d(1, 1, 1), grid=Grid())
    return model, {"x": torch.randn(2, 1, 4, 1)}, mean_of_squares


@program(phase="backward", mechanism=("pole", "invalid", "where-gradient"))
def orthogonalized_basis_with_a_zero_column() -> Case:
    class Basis(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))
            with torch.no_grad():
                self.weight[:, 1] = 0

        def forward(self, x: Tensor) -> Tensor:
            q, _ = torch.linalg.qr(self.weight)  # BAD
            return x @ q

    return named(basis=Basis()), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="forward", mechanism="pole", op="log")
def inverse_softplus_of_zero() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        width = batch["width"]
        raw = torch.log(torch.expm1(width))  # BAD
        return (model(batch["x"]) - raw).pow(2).mean()

    return nn.Linear(3, 2), {"x": torch.randn(2, 3), "width": torch.tensor([0.0, 1.0])}, step


@program(phase="forward", mechanism=("masked-row", "invalid"))
def policy_without_a_legal_action() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(~batch["legal"], -math.inf)
        policy = torch.distributions.Categorical(logits=logits, validate_args=False)  # BAD
        return -policy.log_prob(batch["action"]).mean()

    legal = torch.tensor([[True, False, True], [False, False, False]])
    return nn.Linear(4, 3), {"x": torch.randn(2, 4), "legal": legal, "action": torch.tensor([0, 1])}, step


@program(phase="forward", mechanism="pole", op="reciprocal")
def wave_of_a_period_zero() -> Case:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.period = nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            frequency = 1 / self.period  # BAD
            return torch.sin(x * frequency)

    return named(fc=nn.Linear(3, 3), wave=Wave()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="forward", mechanism=("underflow", "pole"), op="log")
def mixture_density_far_from_its_target() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        mean = model(batch["x"])
        density = torch.exp(-0.5 * (batch["y"] - mean) ** 2) / math.sqrt(2 * math.pi)
        return -torch.log((density / 3).sum(-1)).mean()  # BAD

    return nn.Linear(2, 3), {"x": torch.randn(4, 2), "y": torch.full((4, 1), 40.0)}, step


@program(phase="forward", mechanism="range-overflow")
def equilibrium_that_is_not_contracting() -> Case:
    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(3 * torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            z = torch.zeros_like(x)
            for _ in range(120):
                z = z @ self.weight + x  # BAD
            return z

    return named(equilibrium=Equilibrium()), {"x": torch.ones(2, 4)}, mean_of_squares


@program(phase="forward", mechanism=("pole", "invalid"), op="log1p")
def count_that_is_coded_as_minus_one() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        features = torch.log1p(batch["counts"])  # BAD
        return model(features).pow(2).mean()

    return nn.Linear(3, 2), {"counts": torch.tensor([[0.0, 4.0, -1.0], [1.0, 2.0, 3.0]])}, step


@program(phase="forward", mechanism=("invalid", "underflow"), op="sqrt")
def spline_with_a_negative_discriminant() -> Case:
    class Spline(nn.Module):
        def forward(self, coefficients: Tensor) -> Tensor:
            a, b, c = coefficients.unbind(-1)
            root = torch.sqrt(b * b - 4 * a * c)  # BAD
            return 2 * c / (-b - root)

    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([1.0, 0.5, 1.0]))
    return named(fc=layer, spline=Spline()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="forward", mechanism=("empty-reduction", "invalid"), op="mean")
def context_without_a_document() -> Case:
    class Pool(nn.Module):
        def forward(self, documents: Tensor) -> Tensor:
            return documents.mean(1)  # BAD

    return named(fc=nn.Linear(3, 4), pool=Pool()), {"x": torch.randn(2, 0, 3)}, mean_of_squares


@program(phase="forward", mechanism=("pole", "invalid"), op="log")
def directional_derivative_of_a_log() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        def energy(x: Tensor) -> Tensor:
            return torch.log(F.relu(model(x) - 10)).sum()  # BAD

        value, slope = torch.func.jvp(energy, (batch["x"],), (torch.ones_like(batch["x"]),))
        return value + slope

    return nn.Linear(3, 2), {"x": torch.randn(2, 3)}, step


@program(phase="forward", mechanism="range-overflow", op="index_add")
def messages_summed_in_half_precision() -> Case:
    class Sum(nn.Module):
        def forward(self, messages: Tensor) -> Tensor:
            nodes = torch.zeros(2, messages.shape[1], dtype=messages.dtype)
            return nodes.index_add(0, torch.zeros(len(messages), dtype=torch.long), messages)  # BAD

    layer = nn.Linear(2, 2).half()
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(30000.0)
    return named(fc=layer, sum=Sum()), {"x": torch.randn(6, 2).half()}, mean_of_squares


@program(phase="forward", mechanism="pole", op="reciprocal")
def loss_divided_by_its_running_mean() -> Case:
    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.register_buffer("running", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            losses = self.fc(x).pow(2).mean(0)
            balanced = losses * (1 / self.running)  # type: ignore[operator]  # BAD
            self.running.mul_(0.9).add_(losses.detach(), alpha=0.1)  # type: ignore[operator]
            return balanced.sum()

    return Balanced(), {"x": torch.randn(4, 3)}, lambda m, b: m(b["x"])


@program(phase="backward", mechanism=("pole", "invalid", "range-overflow"), op="pow")
def charbonnier_loss_without_its_eps() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        difference = model(batch["x"]) - model(batch["x"]).detach()
        return (difference**2).pow(0.45).mean()  # BAD

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@program(phase="backward", mechanism=("where-gradient", "pole", "invalid"), op="sqrt")
def distance_matrix_with_its_diagonal_cut_out() -> Case:
    """The upper triangle is taken after the root: the zeros of the diagonal still have a slope."""

    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            between = (x[:, None] - x[None]).pow(2).sum(-1)
            distance = torch.sqrt(between)  # BAD
            return torch.triu(distance, 1)

    return named(fc=nn.Linear(3, 3), pairs=Pairs()), {"x": torch.randn(4, 3)}, mean_of_squares


@healthy
def coordinates_of_a_wider_image() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        x = torch.arange(batch["x"].shape[-1]) / (batch["x"].shape[-1] - 1)
        return (model(batch["x"]) + x).pow(2).mean()

    return nn.Linear(3, 3), {"x": torch.randn(2, 3)}, step


@healthy
def policy_with_one_legal_action() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(~batch["legal"], -math.inf)
        policy = torch.distributions.Categorical(logits=logits, validate_args=False)
        return -policy.log_prob(batch["action"]).mean()

    legal = torch.tensor([[True, False, True], [False, True, False]])
    return nn.Linear(4, 3), {"x": torch.randn(2, 4), "legal": legal, "action": torch.tensor([0, 1])}, step


@healthy
def lowest_cost_from_infinity() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        cost = torch.full((3,), math.inf)
        cost[0] = 0.0
        for edges in F.softplus(model(batch["x"])).view(2, 3, 3):
            cost = torch.minimum(cost, (cost[:, None] + edges).amin(0))
        return cost.sum()

    return nn.Linear(3, 9), {"x": torch.randn(2, 3)}, step


@healthy
def attention_weights_normalized_by_hand() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = (model(batch["x"]) @ batch["x"].T).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return ((weights / weights.sum(-1, keepdim=True)) @ batch["x"]).pow(2).mean()

    return nn.Linear(4, 4), {"x": torch.randn(3, 4)}, step

"""Steps as users of further fields write them, labeled before the first contact with them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, healthy, mean_of_squares, named, program

Batch = dict[str, Tensor]


@program(phase="backward", mechanism=("pole", "invalid", "where-gradient"), op="norm")
def forces_of_two_atoms_in_one_place() -> Case:
    """A potential of pairwise distances; forces are its gradient, and the loss is on the forces."""

    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 1))

        def forward(self, position: Tensor, edges: Tensor) -> Tensor:
            vector = position[edges[0]] - position[edges[1]]
            length = vector.pow(2).sum(-1, keepdim=True).sqrt()  # BAD
            return self.embed(length).sum()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        position = batch["position"].clone().requires_grad_()
        energy = model(position, batch["edges"])
        (force,) = torch.autograd.grad(-energy, position, create_graph=True)
        return F.l1_loss(force, batch["force"]) + F.mse_loss(energy, batch["energy"])

    position = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    edges = torch.tensor([[0, 1, 2, 0], [1, 2, 1, 2]])
    batch = {"position": position, "edges": edges, "force": torch.zeros(3, 3), "energy": torch.tensor(1.0)}
    return Potential(), batch, step


@program(phase="backward", mechanism=("pole", "invalid"))
def superposition_of_mirrored_points() -> Case:
    """Kabsch: the singular vectors of a covariance with equal singular values have no gradient."""

    def aligned(mobile: Tensor, target: Tensor) -> Tensor:
        a, b = mobile - mobile.mean(0), target - target.mean(0)
        u, _, vh = torch.linalg.svd(a.T @ b)  # BAD
        rotation = u @ vh
        return a @ rotation - b

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return aligned(batch["points"] * model.scale, batch["target"]).pow(2).mean()  # type: ignore[operator]

    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(3))
    corners = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0], [0, 1.0, 0], [0, -1.0, 0], [0, 0, 1.0], [0, 0, -1.0]])
    return model, {"points": corners, "target": corners * 2}, step


@program(phase="forward", mechanism="invalid", op="acos")
def slerp_of_two_rotations() -> Case:
    class Slerp(nn.Module):
        def forward(self, q0: Tensor, q1: Tensor, t: float) -> Tensor:
            dot = (q0 * q1).sum(-1, keepdim=True)
            theta = torch.acos(dot)  # BAD
            a = torch.sin((1 - t) * theta) / torch.sin(theta)
            b = torch.sin(t * theta) / torch.sin(theta)
            return a * q0 + b * q1

    class Pose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.tensor([[0.1, 0.2, 0.3, 1.2]]))
            self.slerp = Slerp()

        def forward(self, target: Tensor) -> Tensor:
            return self.slerp(self.q, target, 0.3)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["q"]) - batch["q"]).pow(2).sum()

    return Pose(), {"q": torch.tensor([[0.1, 0.2, 0.3, 1.2]])}, step


@program(phase="forward", mechanism="range-overflow")
def integrator_with_a_stiff_rate() -> Case:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.tensor(8.0))

        def forward(self, y: Tensor) -> Tensor:
            return -self.rate * y**3  # BAD

    class Integrator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = Field()

        def forward(self, y: Tensor) -> Tensor:
            h = 0.25
            for _ in range(12):
                k1 = self.field(y)
                k2 = self.field(y + h / 2 * k1)
                y = y + h * k2
            return y

    return Integrator(), {"x": torch.full((2, 3), 2.0)}, mean_of_squares


@program(phase="forward", mechanism=("pole", "invalid", "empty-reduction"), op="log")
def partial_likelihood_after_the_last_event() -> Case:
    """Cox: subjects sorted by time, but the risk set of the last one was cut off by the follow-up mask."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        risk = model(batch["x"]).squeeze(-1)
        at_risk = (batch["time"][None] >= batch["time"][:, None]) & batch["followed"][None]
        total = (at_risk * risk.exp()[None]).sum(-1)
        terms = (risk - total.log()) * batch["event"]  # BAD
        return -terms.sum() / batch["event"].sum()

    time = torch.tensor([1.0, 2.0, 3.0, 4.0])
    followed = torch.tensor([True, True, True, False])
    return nn.Linear(3, 1), {"x": torch.randn(4, 3), "time": time, "followed": followed, "event": torch.ones(4)}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def percentage_error_of_days_without_sales() -> Case:
    def smape(forecast: Tensor, actual: Tensor) -> Tensor:
        return 2 * ((forecast - actual).abs() / (forecast.abs() + actual.abs())).mean()  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        forecast = F.relu(model(batch["history"]) - 5)
        return smape(forecast, batch["sales"])

    return nn.Linear(7, 2), {"history": torch.rand(3, 7), "sales": torch.tensor([[0.0, 3.0]] * 3)}, step


@program(phase="forward", mechanism=("invalid", "pole", "empty-reduction"), op="div")
def series_scaled_by_its_own_mean() -> Case:
    """DeepAR divides by the mean of the context; here the context is padding."""

    class Scaler(nn.Module):
        def forward(self, past: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
            total = (past.abs() * observed).sum(-1, keepdim=True)
            scale = total / observed.sum(-1, keepdim=True)  # BAD
            return past / scale, scale

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaler = Scaler()
            self.rnn = nn.GRU(1, 8, batch_first=True)
            self.head = nn.Linear(8, 1)

        def forward(self, past: Tensor, observed: Tensor) -> Tensor:
            scaled, scale = self.scaler(past, observed)
            h, _ = self.rnn(scaled[..., None])
            return self.head(h[:, -1]) * scale

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return F.smooth_l1_loss(model(batch["past"], batch["observed"]), batch["future"])

    observed = torch.ones(3, 6)
    observed[1] = 0
    return Net(), {"past": torch.rand(3, 6) * observed, "observed": observed, "future": torch.ones(3, 1)}, step


@program(phase="forward", mechanism=("pole", "invalid", "underflow"))
def dynamic_time_warping_with_a_tiny_gamma() -> Case:
    class SoftDTW(nn.Module):
        def __init__(self, gamma: float) -> None:
            super().__init__()
            self.gamma = gamma

        def softmin(self, *costs: Tensor) -> Tensor:
            return -self.gamma * torch.log(sum(torch.exp(-c / self.gamma) for c in costs))  # type: ignore[arg-type]  # BAD

        def forward(self, cost: Tensor) -> Tensor:
            n, m = cost.shape
            table = {(0, 0): cost.new_zeros(())}
            for i in range(1, n + 1):
                for j in range(1, m + 1):
                    before = [table[k] for k in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if k in table]
                    table[i, j] = cost[i - 1, j - 1] + self.softmin(*before)
            return table[n, m]

    def step(model: nn.Module, batch: Batch) -> Tensor:
        cost = torch.cdist(model.encoder(batch["a"]), model.encoder(batch["b"])) + 1  # type: ignore[operator]
        return model.dtw(cost)  # type: ignore[operator]

    model = nn.Module()
    model.encoder, model.dtw = nn.Linear(2, 4), SoftDTW(0.01)
    return model, {"a": torch.randn(3, 2), "b": torch.randn(4, 2)}, step


@program(phase="forward", mechanism="range-overflow", op="exp")
def recurrent_attention_without_its_running_maximum() -> Case:
    """RWKV: numerator and denominator accumulate exp(k) without subtracting the maximum."""

    class TimeMix(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
            self.decay = nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            k, v = self.key(x), self.value(x)
            above, below = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
            outputs = []
            for t in range(x.shape[1]):
                weight = torch.exp(k[:, t])  # BAD
                above = above * torch.exp(-self.decay.exp()) + weight * v[:, t]
                below = below * torch.exp(-self.decay.exp()) + weight
                outputs.append(above / below)
            return torch.stack(outputs, 1)

    model = named(embed=nn.Linear(3, 4), mix=TimeMix(4))
    with torch.no_grad():
        model.mix.key.bias[2] = 120.0
    return model, {"x": torch.randn(2, 5, 3)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def sharpness_aware_step_at_a_flat_point() -> Case:
    """SAM climbs along the gradient divided by its norm, which is zero where all units are dead."""

    def perturbed(model: nn.Module, loss: Tensor, rho: float) -> dict[str, Tensor]:
        names = [n for n, _ in model.named_parameters()]
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        return {n: p + rho * g / norm for n, p, g in zip(names, model.parameters(), grads, strict=True)}  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        climbed = perturbed(model, loss, 0.05)
        return F.mse_loss(torch.func.functional_call(model, climbed, (batch["x"],)), batch["y"])

    model = named(stem=nn.Linear(3, 4), act=nn.ReLU(), head=nn.Linear(4, 1))
    with torch.no_grad():
        model.stem.bias.fill_(-100.0)
        model.head.bias.zero_()
    return model, {"x": torch.randn(5, 3), "y": torch.zeros(5, 1)}, step


@program(phase=("forward", "backward"), mechanism=("invalid", "pole"), op="div")
def conflicting_gradients_projected() -> Case:
    """PCGrad: the second task has no gradient, and one projects onto it."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch["x"])
        losses = (h[:, 0].pow(2).mean(), F.relu(h[:, 1] - 1e6).mean())
        flat = [
            torch.cat([g.flatten() for g in torch.autograd.grad(one, list(model.parameters()), retain_graph=True)])
            for one in losses
        ]
        inner = flat[0] @ flat[1]
        projected = flat[0] - inner / (flat[1] @ flat[1]) * flat[1]  # BAD
        offset = 0
        for p in model.parameters():
            p.grad = projected[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        return losses[0] + losses[1]

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@program(phase="backward", mechanism=("pole", "invalid"))
def variance_regularizer_of_a_collapsed_feature() -> Case:
    """VICReg's hinge on the standard deviation of each feature, without its eps."""

    class Expander(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 6)
            with torch.no_grad():
                self.fc.weight[2] = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch["x"])
        spread = z.var(0).sqrt()  # BAD
        return F.relu(1 - spread).mean() + (z.T @ z).fill_diagonal_(0).pow(2).mean()

    return Expander(), {"x": torch.randn(5, 4)}, step


@program(phase="forward", mechanism=("invalid", "pole", "underflow"), op="log")
def coupling_layer_with_a_saturated_scale() -> Case:
    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 4)
            with torch.no_grad():
                self.net.bias.fill_(-140.0)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = x.chunk(2, -1)
            shift, raw = self.net(a).chunk(2, -1)
            scale = torch.sigmoid(raw)
            logdet = scale.log().sum(-1)  # BAD
            return torch.cat([a, b * scale + shift], -1), logdet

    def step(model: nn.Module, batch: Batch) -> Tensor:
        z, logdet = model(batch["x"])
        return (0.5 * z.pow(2).sum(-1) - logdet).mean()

    return Coupling(), {"x": torch.randn(3, 4)}, step


@program(phase="backward", mechanism=("pole", "invalid", "where-gradient"))
def focal_power_below_one() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.sigmoid(model(batch["x"])).squeeze(-1)
        error = (batch["y"] - p).abs()
        return (error**0.5 * F.binary_cross_entropy(p, batch["y"], reduction="none")).mean()  # BAD

    fc = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        fc.weight.fill_(30.0)
    return fc, {"x": torch.tensor([[1.0, 1.0], [0.1, 0.0]]), "y": torch.tensor([1.0, 1.0])}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="log")
def squashed_action_at_the_limit() -> Case:
    """SAC: log(1 − a²) of an action from the replay buffer that lies on the limit, and the inverse tanh."""

    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mean, self.log_std = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 2)

        def log_prob(self, state: Tensor, action: Tensor) -> Tensor:
            h = torch.tanh(self.body(state))
            raw = 0.5 * torch.log((1 + action) / (1 - action))  # BAD
            normal = torch.distributions.Normal(self.mean(h), self.log_std(h).clamp(-5, 2).exp())
            return normal.log_prob(raw).sum(-1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return -model.log_prob(batch["state"], batch["action"]).mean()  # type: ignore[operator]

    return Actor(), {"state": torch.randn(3, 3), "action": torch.tensor([[0.5, -1.0], [0.1, 0.2], [0.0, 0.3]])}, step


@program(phase="forward", mechanism=("range-overflow", "invalid"), op="exp")
def policy_ratio_after_a_long_pause() -> Case:
    """PPO's ratio of a policy that has moved far from the one that sampled; clipping comes too late."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> torch.distributions.Categorical:
            return torch.distributions.Categorical(logits=self.fc(x))

    def surrogate(policy: Any, batch: Batch) -> Tensor:
        log_prob = policy.log_prob(batch["action"])
        ratio = torch.exp(log_prob - batch["old"])  # BAD
        advantage = batch["advantage"]
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return surrogate(model(batch["x"]), batch)

    old = torch.tensor([-1.0, -150.0])
    batch = {"x": torch.randn(2, 4), "action": torch.tensor([0, 2]), "old": old, "advantage": torch.tensor([1.0, -1.0])}
    return Policy(), batch, step


@program(phase="forward", mechanism="range-overflow")
def value_targets_through_a_discount_above_one() -> Case:
    """Returns are computed backwards in a loop in half precision; gamma was given in percent."""

    def returns(reward: Tensor, gamma: float) -> Tensor:
        running = torch.zeros_like(reward[0])
        out = torch.empty_like(reward)
        for t in reversed(range(len(reward))):
            running = reward[t] + gamma * running  # BAD
            out[t] = running
        return out

    def step(model: nn.Module, batch: Batch) -> Tensor:
        target = returns(batch["reward"], gamma=99.0)
        return F.mse_loss(model(batch["x"]).squeeze(-1), target.float())

    return nn.Linear(2, 1), {"x": torch.randn(8, 2), "reward": torch.ones(8).half()}, step


@program(phase="forward", mechanism=("pole", "invalid"))
def process_with_a_repeated_input() -> Case:
    """A Gaussian process without jitter: its kernel matrix is singular, and the log determinant −inf."""

    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_length = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            distance = (x[:, None] - x[None]).pow(2).sum(-1)
            return torch.exp(-distance / (2 * self.log_length.exp() ** 2))

    def step(model: nn.Module, batch: Batch) -> Tensor:
        k = model(batch["x"])
        logdet = torch.logdet(k)  # BAD
        return 0.5 * logdet + (torch.linalg.pinv(k.detach()) @ batch["y"]).pow(2).sum()

    x = torch.tensor([[0.0], [1.0], [1.0]])
    return named(kernel=Kernel()), {"x": x, "y": torch.ones(3, 1)}, step


@program(phase="forward", mechanism=("underflow", "pole", "invalid"))
def cloud_opacity_in_half_precision() -> Case:
    """Volume rendering: 1 − alpha + 1e-10 is exactly 0 in half precision for an opaque sample."""

    class Render(nn.Module):
        def forward(self, density: Tensor, step: float) -> Tensor:
            alpha = 1 - torch.exp(-F.relu(density) * step)
            log_transmittance = torch.cumsum(torch.log(1 - alpha + 1e-10), -1)  # BAD
            return alpha * torch.exp(log_transmittance - log_transmittance[..., :1])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field, self.render = nn.Linear(3, 1), Render()

        def forward(self, x: Tensor) -> Tensor:
            return self.render(self.field(x).squeeze(-1).half(), 0.5)

    model = Net()
    with torch.no_grad():
        model.field.bias.fill_(40.0)
    return model, {"x": torch.randn(2, 5, 3)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "pole", "underflow"), op="div")
def splat_with_a_flat_covariance() -> Case:
    """Gaussian splatting: the inverse of a two-dimensional covariance, by its determinant."""

    class Splat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([[-1.0, -1.0], [0.5, -200.0]]))
            self.angle = nn.Parameter(torch.tensor([0.3, 0.0]))

        def forward(self, pixel: Tensor) -> Tensor:
            c, s = self.angle.cos(), self.angle.sin()
            rotation = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
            spread = rotation @ torch.diag_embed(self.scale.exp())
            cov = spread @ spread.transpose(-1, -2)
            a, b, d = cov[:, 0, 0], cov[:, 0, 1], cov[:, 1, 1]
            conic = torch.stack([d, -b, a], -1) / (a * d - b * b)[:, None]  # BAD
            power = -0.5 * (conic[:, 0] * pixel[:, :1] ** 2 + conic[:, 2] * pixel[:, 1:] ** 2)
            return torch.exp(power)

    return named(splat=Splat()), {"x": torch.zeros(3, 2)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def perspective_division_of_a_point_on_the_camera() -> Case:
    class Camera(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.tensor([[500.0, 0, 320], [0, 500.0, 240], [0, 0, 1.0]]))
            self.offset = nn.Parameter(torch.zeros(3))

        def project(self, points: Tensor) -> Tensor:
            moved = (points + self.offset) @ self.k.T  # type: ignore[operator]
            return moved[..., :2] / moved[..., 2:]  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        pixels = model.project(batch["points"])  # type: ignore[operator]
        inside = ((pixels > 0) & (pixels < 640)).all(-1)
        return (F.smooth_l1_loss(pixels, batch["pixels"], reduction="none").sum(-1) * inside).mean()

    points = torch.tensor([[1.0, 1.0, 4.0], [0.0, 0.0, 0.0]])
    return Camera(), {"points": points, "pixels": torch.tensor([[445.0, 365.0], [320.0, 240.0]])}, step


@program(phase="backward", mechanism=("pole", "invalid", "where-gradient"))
def total_variation_of_a_flat_image() -> Case:
    def total_variation(image: Tensor) -> Tensor:
        dx = image[..., 1:, :-1] - image[..., :-1, :-1]
        dy = image[..., :-1, 1:] - image[..., :-1, :-1]
        return torch.hypot(dx, dy).mean()  # BAD

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 3, padding=1, padding_mode="replicate")

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.conv(x) - 10)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        image = model.conv(batch["x"])  # type: ignore[operator]
        return F.mse_loss(image, batch["x"]) + 0.1 * total_variation(image)

    return Decoder(), {"x": torch.ones(1, 1, 5, 5)}, step


@program(phase="forward", mechanism=("invalid", "pole", "empty-reduction"), op="div")
def structural_similarity_of_black_frames() -> Case:
    class Similarity(nn.Module):
        def __init__(self, c1: float = 0.0, c2: float = 0.0) -> None:
            super().__init__()
            self.c1, self.c2 = c1, c2

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            ma, mb = F.avg_pool2d(a, 3, 1), F.avg_pool2d(b, 3, 1)
            va = F.avg_pool2d(a * a, 3, 1) - ma * ma
            vb = F.avg_pool2d(b * b, 3, 1) - mb * mb
            cov = F.avg_pool2d(a * b, 3, 1) - ma * mb
            above = (2 * ma * mb + self.c1) * (2 * cov + self.c2)
            below = (ma**2 + mb**2 + self.c1) * (va + vb + self.c2)
            return (above / below).mean()  # BAD

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.similarity = nn.Conv2d(1, 1, 3, padding=1, bias=False), Similarity()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return 1 - self.similarity(self.conv(x), y)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["y"])

    x = torch.rand(2, 1, 6, 6)
    x[1] = 0
    return Net(), {"x": x, "y": x.clone()}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="log10")
def pitch_in_octaves_of_unvoiced_frames() -> Case:
    """FastSpeech-like: targets are made in the step from the batch, by numpy's habits in torch."""

    class Predictor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 1, 3, padding=1)

        def forward(self, h: Tensor) -> Tensor:
            return self.conv(h).squeeze(1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        pitch = batch["f0"]
        target = torch.log10(pitch / 440.0)  # BAD
        mask = torch.arange(pitch.shape[1])[None] < batch["length"][:, None]
        loss = F.mse_loss(model(batch["h"]), target, reduction="none")
        return (loss * mask).sum() / mask.sum()

    f0 = torch.tensor([[120.0, 130.0, 125.0], [110.0, 0.0, 0.0]])
    return Predictor(), {"h": torch.randn(2, 4, 3), "f0": f0, "length": torch.tensor([3, 1])}, step


@program(phase="forward", mechanism=("invalid", "empty-reduction"))
def duration_of_a_phoneme_without_frames() -> Case:
    """The mean mel frame of each phoneme; one of them has a duration of 0."""

    class Averager(nn.Module):
        def forward(self, mel: Tensor, durations: list[int]) -> Tensor:
            parts = mel.split(durations)
            return torch.stack([part.mean(0) for part in parts])  # BAD

    def step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        frames = model.averager(batch["mel"], batch["durations"])  # type: ignore[operator]
        return model.head(frames).pow(2).mean()  # type: ignore[operator]

    model = nn.Module()
    model.averager, model.head = Averager(), nn.Linear(4, 2)
    return model, {"mel": torch.randn(6, 4), "durations": [2, 0, 4]}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def adaptive_gain_of_a_silent_segment() -> Case:
    """SI-SDR between an estimate and a silent source."""

    def si_sdr(estimate: Tensor, source: Tensor) -> Tensor:
        alpha = (estimate * source).sum(-1, keepdim=True) / source.pow(2).sum(-1, keepdim=True)  # BAD
        target = alpha * source
        noise = estimate - target
        return 10 * torch.log10(target.pow(2).sum(-1) / noise.pow(2).sum(-1))

    class Separator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Conv1d(1, 4, 4, stride=2)
            self.decoder = nn.ConvTranspose1d(4, 1, 4, stride=2)

        def forward(self, mix: Tensor) -> Tensor:
            return self.decoder(torch.sigmoid(self.encoder(mix[:, None]))).squeeze(1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return -si_sdr(model(batch["mix"]), batch["source"]).mean()

    source = torch.randn(2, 16)
    source[0] = 0
    return Separator(), {"mix": torch.randn(2, 16), "source": source}, step


@program(phase="forward", mechanism=("masked-row", "invalid"))
def neighbors_of_a_lonely_point() -> Case:
    """Point attention within a radius; one point has nobody near, not even itself."""

    class RadiusAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)
            self.radius = 0.5

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            distance = torch.cdist(position, position)
            far = (distance > self.radius) | torch.eye(len(x), dtype=torch.bool)
            scores = q @ k.T / math.sqrt(q.shape[-1])
            scores[far] = float("-inf")
            weights = scores.softmax(-1)  # BAD
            return F.dropout(weights, 0.0) @ v

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["position"]).pow(2).mean()

    position = torch.tensor([[0.0, 0.0], [0.1, 0.0], [9.0, 9.0]])
    return RadiusAttention(), {"x": torch.randn(3, 4), "position": position}, step


@program(phase="forward", mechanism=("empty-reduction", "invalid"))
def prototypes_of_an_episode_without_a_class() -> Case:
    def prototypes(z: Tensor, label: Tensor, classes: int) -> Tensor:
        centers = [z[label == c].mean(0) for c in range(classes)]  # BAD
        return torch.stack(centers)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        centers = prototypes(model(batch["support"]), batch["label"], 3)
        logits = -torch.cdist(model(batch["query"]), centers).pow(2)
        return F.cross_entropy(logits, batch["target"])

    batch = {
        "support": torch.randn(4, 5),
        "label": torch.tensor([0, 0, 2, 2]),
        "query": torch.randn(2, 5),
        "target": torch.tensor([0, 2]),
    }
    return named(stem=nn.Linear(5, 4), act=nn.ReLU()), batch, step


@program(phase="forward", mechanism=("invalid", "pole", "empty-reduction"), op="div")
def balanced_accuracy_as_a_loss() -> Case:
    """A confusion matrix by bincount of soft assignments, one class never present."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = model(batch["x"]).softmax(-1)
        confusion = torch.zeros(3, 3).index_add(0, batch["y"], p)
        recall = confusion.diagonal() / confusion.sum(-1)  # BAD
        return 1 - recall.mean()

    return nn.Linear(4, 3), {"x": torch.randn(4, 4), "y": torch.tensor([0, 0, 2, 2])}, step


@program(phase="forward", mechanism="range-overflow", module="blocks.6")
def language_model_with_a_half_residual_stream() -> Case:
    """Every block doubles the stream; the sum leaves float16 in one of the later ones."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.down(F.gelu(self.up(self.norm(x.float())))).half()
            return x + x * 3 + h  # BAD

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(10))
            self.head = nn.Linear(8, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            x = (self.embed(tokens) + 1).half()
            for block in self.blocks:
                x = block(x)
            return self.head(F.layer_norm(x.float(), (8,)))

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    return Decoder(), {"tokens": torch.randint(0, 11, (2, 6))}, step


@program(phase="leaf", mechanism="bad-leaf", leaf="batch features.velocity", index=(1, 0))
def sensor_that_dropped_out() -> Case:
    class Fusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(2), requires_grad=False)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, features: Batch) -> Tensor:
            velocity = features["velocity"] - self.mean  # BAD
            return self.body(torch.cat([features["position"], velocity], -1))

    def step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.mse_loss(model(batch["features"]), batch["target"])

    velocity = torch.randn(3, 2)
    velocity[1, 0] = math.nan
    features = {"position": torch.randn(3, 2), "velocity": velocity}
    return Fusion(), {"features": features, "target": torch.zeros(3, 2)}, step


@program(phase="leaf", mechanism="bad-leaf", leaf=("buffer memory.queue",), index=(2, 0))
def queue_of_negatives_with_a_bad_key() -> Case:
    """MoCo's queue lives in a buffer that an earlier step has filled."""

    class Memory(nn.Module):
        queue: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", F.normalize(torch.randn(5, 4), dim=-1))
            self.queue[2] = math.nan

        def forward(self, q: Tensor) -> Tensor:
            return q @ self.queue.T / 0.07  # BAD

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.memory = nn.Linear(6, 4), Memory()

        def forward(self, x: Tensor) -> Tensor:
            return self.memory(F.normalize(self.encoder(x), dim=-1))

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), torch.zeros(3, dtype=torch.long))

    return Contrast(), {"x": torch.randn(3, 6)}, step


class Trainer:
    """A step as a method, with its loss in another method and its state in attributes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.best = float("inf")
        self.weights: dict[str, float] = {"shape": 1.0, "volume": 0.1}

    def volume(self, box: Tensor) -> Tensor:
        return torch.log(box.prod(-1))  # BAD

    def losses(self, box: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {
            "shape": F.smooth_l1_loss(box, target),
            "volume": (self.volume(box) - self.volume(target)).abs().mean(),
        }

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        box = F.softplus(model(batch["x"]))
        terms = self.losses(box, batch["target"])
        return sum((self.weights[k] * v for k, v in terms.items()), torch.zeros(()))


@program(phase="forward", mechanism="pole", op="log", uses=(Trainer,))
def trainer_class_with_a_volume_term() -> Case:
    model = nn.Linear(4, 3)
    return model, {"x": torch.randn(2, 4), "target": torch.tensor([[1.0, 2.0, 0.0], [1.0, 1.0, 1.0]])}, Trainer(model)


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.round(x / scale) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        steps = x / scale
        inside = steps.abs() <= 127
        count = torch.count_nonzero(~inside)
        slope = torch.where(inside, steps.round() - steps, torch.sign(steps) * 127)
        return grad * inside, (grad * slope).sum() / torch.sqrt(count * 127.0)  # BAD


@program(phase="backward", mechanism=("invalid", "pole", "empty-reduction"), op="div", uses=(Quantize,))
def learned_step_size_when_nothing_is_clipped() -> Case:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.tensor(0.1))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, Quantize.apply(self.weight, self.scale))

    return named(first=Layer(), act=nn.ReLU()), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="backward", mechanism=("pole", "invalid", "where-gradient"))
def cosine_of_complex_impedances() -> Case:
    """The phase between two complex signals; one bin of the reference is silent."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        spectrum = torch.fft.rfft(model(batch["x"]), dim=-1)
        reference = torch.fft.rfft(batch["reference"], dim=-1)
        product = spectrum * reference.conj()
        power = product.real.square() + product.imag.square()
        return (1 - product.real / power.clamp_min(1e-12).sqrt()).mean() + 0.1 * power.sqrt().mean()  # BAD

    return nn.Linear(4, 8), {"x": torch.randn(2, 4), "reference": torch.ones(2, 8)}, step


@program(phase="forward", mechanism=("pole", "invalid"))
def masked_tokens_scored_by_gathered_logits() -> Case:
    """DPO-like: log-probabilities of a completion under a policy whose vocabulary was padded with −inf."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            logits = self.head(self.embed(tokens))
            logits[..., 6:] = -torch.inf
            return logits

    def completion(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        per_token = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)  # BAD
        return (per_token * mask).sum(-1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        chosen = completion(model(batch["prompt"]), batch["chosen"], batch["mask"])
        rejected = completion(model(batch["prompt"]), batch["rejected"], batch["mask"])
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    batch = {
        "prompt": torch.randint(0, 6, (2, 3)),
        "chosen": torch.tensor([[1, 2, 7], [0, 3, 5]]),
        "rejected": torch.randint(0, 6, (2, 3)),
        "mask": torch.ones(2, 3),
    }
    return Policy(), batch, step


@program(phase="forward", mechanism=("range-overflow", "invalid"), op="cumprod")
def population_by_cumulative_products() -> Case:
    """A cohort model: births and survival multiply over generations, in half precision under autocast."""

    class Cohort(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.full((4,), 1.5))

        def forward(self, years: Tensor) -> Tensor:
            growth = F.softplus(self.rate).half().expand(len(years), 40, 4)
            return torch.cumprod(growth, 1)[:, -1] * 0 + growth[:, 0] / torch.cumprod(growth, 1)[:, -1]  # BAD

    return named(cohort=Cohort()), {"x": torch.ones(2, 1)}, mean_of_squares


@program(
    phase=("leaf", "outside"),
    mechanism=("bad-leaf", "outside-dispatcher"),
    leaf="attribute criterion.weight",
    index=(1,),
)
def class_weights_from_a_histogram() -> Case:
    """Weights by inverse frequency, made in numpy before the step and held by a loss module."""

    class WeightedLoss(nn.Module):
        def __init__(self, counts: np.ndarray[Any, Any]) -> None:
            super().__init__()
            with np.errstate(all="ignore"):
                self.weight = torch.from_numpy((counts.sum() / counts).astype(np.float32))

        def forward(self, logits: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(logits, y, weight=self.weight)  # BAD

    criterion = WeightedLoss(np.array([3.0, 0.0, 5.0]))

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return criterion(model(batch["x"]), batch["y"])

    return nn.Linear(4, 3), {"x": torch.randn(4, 4), "y": torch.tensor([0, 1, 2, 2])}, step


def clipped(parameters: Iterable[nn.Parameter], limit: float) -> None:
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt()
    for g in grads:
        g.mul_(limit / norm)  # BAD


@program(phase=("backward", "forward"), mechanism=("invalid", "pole"), uses=(clipped,))
def clipping_by_hand_of_a_gradient_of_zero() -> Case:
    """A whole training step: backward, then a clipping of one's own that divides by a norm of 0."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        model.zero_grad()
        loss = F.relu(model(batch["x"]) - 1e6).mean()
        loss.backward()
        clipped(model.parameters(), 1.0)
        return loss.detach()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def attention_pooling_normalized_by_hand() -> Case:
    """Multiple-instance learning: a bag whose instances were all cut by a threshold on the gate."""

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 1)

        def forward(self, bag: Tensor) -> Tensor:
            score = torch.sigmoid(self.gate(bag))
            kept = F.threshold(score, 0.99, 0.0)
            return (kept * bag).sum(1) / kept.sum(1)  # BAD

    return named(embed=nn.Linear(3, 4), pool=Pool(), head=nn.Linear(4, 1)), {"x": torch.randn(2, 5, 3)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "range-overflow", "pole"))
def router_loss_of_logits_that_exploded() -> Case:
    """The z-loss of a router squares a log-sum-exp in bfloat16 logits cast to half."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 3)
            with torch.no_grad():
                self.gate.weight.mul_(2000)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.gate(x).half()
            z = torch.logsumexp(logits, -1)
            return logits.softmax(-1), z.square()  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        weights, z = model(batch["x"])
        return weights.float().std() + 1e-3 * z.float().mean()

    return Router(), {"x": torch.randn(5, 4)}, step


# ------------------------------------------------------------------------------------------------ healthy


@healthy
def forces_with_a_distance_that_is_safe() -> Case:
    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, position: Tensor) -> Tensor:
            vector = position[:, None] - position[None]
            square = vector.pow(2).sum(-1)
            near = square > 0
            length = torch.where(near, square, torch.ones_like(square)).sqrt() * near
            return (self.w * torch.exp(-length)).sum()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        position = batch["position"].clone().requires_grad_()
        (force,) = torch.autograd.grad(model(position), position, create_graph=True)
        return force.pow(2).mean()

    return Potential(), {"position": torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])}, step


@healthy
def viterbi_from_impossible_transitions() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        emission = model(batch["x"])
        transition = torch.full((3, 3), -math.inf)
        transition[0, 1] = transition[1, 2] = transition[0, 0] = transition[1, 1] = transition[2, 2] = 0.0
        score = torch.tensor([0.0, -math.inf, -math.inf])
        for t in range(emission.shape[0]):
            score = (score[:, None] + transition).amax(0) + emission[t]
        return -score[0]

    return nn.Linear(4, 3), {"x": torch.randn(5, 4)}, step


@healthy
def overflow_kept_out_by_a_scaler_that_skips() -> Case:
    """The step looks at its gradients itself and drops a bad term before it can reach them."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch["x"])
        terms = [h.pow(2).mean(), (h.detach().half() * 1e5).float().mean()]
        good = [t for t in terms if bool(t.isfinite())]
        return torch.stack(good).sum()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@healthy
def nearest_neighbor_with_the_diagonal_excluded() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch["x"])
        distance = (z[:, None] - z[None]).pow(2).sum(-1)
        distance.fill_diagonal_(math.inf)
        return distance.min(-1).values.mean()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@healthy
def top_k_of_a_masked_vocabulary() -> Case:
    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.head(x)
            kth = logits.topk(3, -1).values[..., -1:]
            logits = torch.where(logits < kth, torch.full_like(logits, -math.inf), logits)
            return -(logits.softmax(-1) * logits.log_softmax(-1).masked_fill(logits.isinf(), 0)).sum(-1)

    return named(sampler=Sampler()), {"x": torch.randn(3, 4)}, mean_of_squares


@healthy
def statistics_that_ignore_missing_values() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"]
        mean = x.nanmean(0)
        filled = torch.where(x.isnan(), mean, x)
        missing = x.isnan().float()
        return model(torch.cat([filled, missing], -1)).pow(2).mean()

    x = torch.randn(4, 3)
    x[1, 2] = x[3, 0] = math.nan
    return nn.Linear(6, 2), {"x": x}, step


@healthy
def early_stopping_compares_with_infinity() -> Case:
    class Best:
        value = torch.tensor(math.inf)

        def improve(self, loss: Tensor) -> bool:
            better = bool(loss.detach() < self.value)
            self.value = torch.minimum(self.value, loss.detach())
            return better

    best = Best()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = model(batch["x"]).pow(2).mean()
        return loss * (1.0 if best.improve(loss) else 0.5)

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@healthy
def padded_cells_of_a_segment_maximum() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch["x"])
        pooled = torch.full((4, 2), -math.inf).scatter_reduce(0, batch["cell"][:, None].expand(-1, 2), h, "amax")
        pooled = pooled.masked_fill(pooled == -math.inf, 0.0)
        return pooled.pow(2).mean()

    return nn.Linear(3, 2), {"x": torch.randn(5, 3), "cell": torch.tensor([0, 0, 1, 3, 3])}, step


@healthy
def kernel_matrix_with_jitter() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        x = model(batch["x"])
        k = torch.exp(-(x[:, None] - x[None]).pow(2).sum(-1)) + 1e-2 * torch.eye(4)
        factor = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(batch["y"], factor)
        return (batch["y"] * alpha).sum() + factor.diagonal().log().sum()

    x = torch.randn(4, 2)
    x[1] = x[0]
    return nn.Linear(2, 2), {"x": x, "y": torch.randn(4, 1)}, step


@healthy
def gumbel_softmax_with_a_straight_through_estimator() -> Case:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.gumbel_softmax(self.head(x), tau=0.05, hard=True)

    return named(choice=Choice(), out=nn.Linear(4, 1)), {"x": torch.randn(3, 3)}, mean_of_squares


@healthy
def loss_terms_weighted_by_uncertainty() -> Case:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.log_var = nn.Linear(3, 2), nn.Parameter(torch.tensor([-8.0, 8.0]))

        def forward(self, x: Tensor) -> Tensor:
            losses = self.fc(x).pow(2).mean(0)
            return (torch.exp(-self.log_var) * losses + self.log_var).sum()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"])

    return Weighted(), {"x": torch.randn(4, 3)}, step


@healthy
def batch_that_is_empty_on_this_rank() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        kept = batch["x"][batch["keep"]]
        loss = model(kept).pow(2).sum() / max(len(kept), 1)
        return loss + sum(p.sum() * 0 for p in model.parameters())

    return nn.Linear(3, 2), {"x": torch.randn(4, 3), "keep": torch.zeros(4, dtype=torch.bool)}, step

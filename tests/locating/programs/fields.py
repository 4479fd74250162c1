"""Steps of kinds that the other files lack: diffusion, state-space models, experts, preference losses, quantizers,
torch's own distributions and parametrizations, per-sample gradients. Labeled before the locator saw them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from support.programs import Case, healthy, mean_of_squares, named, program

Batch = dict[str, Tensor]


@program(phase="forward", mechanism=("pole", "underflow"), op="div")
def diffusion_weight_at_the_first_timestep() -> Case:
    """The cumulated product of a schedule is 1 at t = 0: the signal-to-noise ratio has no finite value."""

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)
            self.register_buffer("alphas", torch.linspace(1.0, 0.1, 10))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            alpha = self.alphas[t]  # type: ignore[index]
            noise = torch.randn_like(x)
            noisy = alpha.sqrt()[:, None] * x + (1 - alpha).sqrt()[:, None] * noise
            snr = alpha / (1 - alpha)  # BAD
            return ((self.net(noisy) - noise).pow(2).mean(1) * snr).mean()

    return Denoiser(), {"x": torch.randn(3, 4), "t": torch.tensor([5, 0, 9])}, lambda m, b: m(b["x"], b["t"])


@program(phase=("backward", "forward"), mechanism="where-gradient", op="exp")
def state_space_decay_masked_after_exp() -> Case:
    """The upper triangle is thrown away after exp, where its slope has overflowed already."""

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            decay = -50 * F.softplus(self.rate(x).squeeze(-1) + 1).cumsum(-1)
            between = decay[:, :, None] - decay[:, None, :]
            weight = torch.exp(between)  # BAD
            kept = torch.ones_like(weight, dtype=torch.bool).tril()
            return torch.where(kept, weight, torch.zeros(())) @ x

    return named(scan=Scan()), {"x": torch.randn(2, 5, 4)}, mean_of_squares


@program(phase="forward", mechanism="invalid", op="div")
def router_without_an_expert_left() -> Case:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 6)

        def forward(self, x: Tensor, capacity: Tensor) -> Tensor:
            weights, chosen = torch.softmax(self.gate(x), -1).topk(2, -1)
            weights = weights * capacity[chosen]
            return weights / weights.sum(-1, keepdim=True)  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model.router(batch["x"], batch["room"]).pow(2).sum()  # type: ignore[operator]

    return named(router=Router()), {"x": torch.randn(3, 4), "room": torch.zeros(6)}, step


@program(phase="forward", mechanism=("underflow", "pole"), op="log")
def preference_loss_by_log_of_sigmoid() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        margin = 2000 * (model(batch["chosen"]) - model(batch["rejected"])).squeeze(-1)
        return -torch.log(torch.sigmoid(margin)).mean()  # BAD

    return nn.Linear(4, 1), {"chosen": torch.randn(6, 4), "rejected": torch.randn(6, 4)}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="slogdet")
def flow_whose_mixing_matrix_lost_a_rank() -> Case:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))
            with torch.no_grad():
                self.weight[2].zero_()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x @ self.weight, torch.linalg.slogdet(self.weight)[1]  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        z, volume = model(batch["x"])
        return 0.5 * z.pow(2).sum(-1).mean() - volume

    return Mix(), {"x": torch.randn(4, 3)}, step


@program(phase="forward", mechanism="range-overflow", op="i0")
def von_mises_normalizer_of_a_sharp_prediction() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        kappa = F.softplus(out[:, 0]) + 120
        partition = torch.special.i0(kappa)  # BAD
        return (partition.log() - kappa * torch.cos(out[:, 1])).mean()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@program(phase="forward", mechanism="invalid", op="div")
def ray_that_hits_nothing() -> Case:
    class Render(nn.Module):
        def forward(self, density: Tensor) -> Tensor:
            alpha = 1 - torch.exp(-F.relu(density))
            clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
            weights = alpha * clear
            depth = (weights * torch.linspace(1, 4, alpha.shape[1])).sum(1)
            return torch.maximum(torch.tensor(1e-10), depth / weights.sum(1))  # BAD

    head = nn.Linear(3, 5)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-1.0)
    return named(head=head, render=Render()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def perfect_reconstruction_in_decibels() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        estimate = model(batch["x"]) * 0 + batch["clean"]
        residual = estimate - batch["clean"]
        ratio = batch["clean"].pow(2).sum(-1) / residual.pow(2).sum(-1)  # BAD
        return -10 * torch.log10(ratio).mean()

    return nn.Linear(8, 8), {"x": torch.randn(2, 8), "clean": torch.randn(2, 8)}, step


class Standardized(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)  # BAD


@program(phase="forward", mechanism="invalid", op="div", uses=(Standardized,), module="net.parametrizations.weight.0")
def weight_standardization_of_a_constant_filter() -> Case:
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight[1] = 0.25
    parametrize.register_parametrization(layer, "weight", Standardized())
    return named(net=layer), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="forward", mechanism="invalid", op="div", module="critic.parametrizations.weight.0")
def spectral_norm_of_a_layer_that_starts_at_zero() -> Case:
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).pow(2).mean()  # BAD

    return named(critic=parametrizations.spectral_norm(layer)), {"x": torch.randn(2, 4)}, step


@program(phase="forward", mechanism="invalid", module="block.norm")
def running_variance_that_went_negative() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.norm.running_var[2] = -0.5  # type: ignore[index]

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.norm(x))  # BAD

    return named(fc=nn.Linear(4, 4), block=Block()).eval(), {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase=("forward", "backward"), mechanism=("invalid", "pole"), op="div_")
def gradients_normalized_by_hand() -> Case:
    """The step runs backward itself and divides every gradient by its norm; one is zero."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        loss = out.detach().mean() + (out - out).sum()
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(p.grad.norm())  # BAD
        return loss

    return nn.Linear(4, 4), {"x": torch.randn(3, 4)}, step


@program(phase="forward", mechanism="invalid", op="div")
def per_sample_gradient_of_length_zero() -> Case:
    """Clipping of per-sample gradients as in private training, by vmap over grad."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        weight = model.weight

        def one(w: Tensor, x: Tensor) -> Tensor:
            return (x @ w.T).pow(2).sum()  # type: ignore[attr-defined]

        def clipped(x: Tensor) -> Tensor:
            grad = torch.func.grad(one)(weight, x)
            return grad / grad.norm()  # BAD

        return torch.func.vmap(clipped)(batch["x"]).mean()

    x = torch.randn(4, 3)
    x[2] = 0
    return nn.Linear(3, 2, bias=False), {"x": x}, step


@program(phase="forward", mechanism="invalid")
def distillation_with_classes_masked_on_both_sides() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(batch["absent"], -math.inf)
        target = torch.softmax(batch["teacher"].masked_fill(batch["absent"], -math.inf), -1)
        return F.kl_div(F.log_softmax(logits, -1), target, reduction="batchmean")  # BAD

    absent = torch.tensor([False, False, True, False])
    return nn.Linear(3, 4), {"x": torch.randn(2, 3), "teacher": torch.randn(2, 4), "absent": absent}, step


@program(phase="forward", mechanism=("invalid", "empty-reduction"), op="nll_loss")
def classes_of_weight_zero_only() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        weight = torch.tensor([0.0, 1.0, 1.0])
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=weight)  # BAD

    return nn.Linear(3, 3), {"x": torch.randn(2, 3), "y": torch.tensor([0, 0])}, step


@program(phase="forward", mechanism=("empty-reduction", "invalid"))
def packed_batch_with_an_empty_sequence() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        hidden = model(batch["x"])
        pooled = torch.segment_reduce(hidden, "mean", lengths=batch["lengths"], axis=0)  # BAD
        return pooled.pow(2).mean()

    return nn.Linear(3, 2), {"x": torch.randn(5, 3), "lengths": torch.tensor([2, 0, 3])}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="log")
def relative_distance_bias_of_two_tokens() -> Case:
    """The distances of two tokens are 0 and 1, which is no mask: the bias on the diagonal is +inf."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            place = torch.arange(x.shape[1])
            distance = (place[:, None] - place[None, :]).abs().float()
            bias = -0.5 * torch.log(distance)  # BAD
            return torch.softmax(self.q(x) @ x.transpose(1, 2) + bias, -1) @ x

    return named(attention=Attention()), {"x": torch.randn(2, 2, 4)}, mean_of_squares


@program(phase="forward", mechanism=("masked-row", "invalid"), op="sub")
def hidden_markov_model_by_hand() -> Case:
    """Two impossible paths meet: the larger of two −inf is taken from both."""

    class Forward(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            state = torch.full_like(scores[0], -math.inf)
            state[0] = 0.0
            for emission in scores:
                moved = torch.cat([torch.full_like(state[:1], -math.inf), state[:-1]])
                top = torch.maximum(state, moved)
                state = top + torch.log(torch.exp(state - top) + torch.exp(moved - top)) + emission  # BAD
            return state

    return named(fc=nn.Linear(4, 4), hmm=Forward()), {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="_to_copy")
def activations_stored_in_eight_bits() -> Case:
    class Stored(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            small = (x * 1e6).to(torch.float8_e5m2)  # BAD
            return small.float() / 1e6

    return named(fc=nn.Linear(4, 4), stored=Stored()), {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="exp")
def poisson_rate_that_explodes() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return F.poisson_nll_loss(90 + model(batch["x"]), batch["y"], log_input=True)  # BAD

    return nn.Linear(3, 1), {"x": torch.randn(4, 3), "y": torch.ones(4, 1)}, step


@program(phase="forward", mechanism=("underflow", "invalid"), op="div")
def library_eps_that_half_precision_does_not_have() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        features = F.relu(model(batch["x"].half()))
        return F.normalize(features, dim=-1).float().pow(2).mean()  # BAD

    layer = nn.Linear(3, 4).half()
    with torch.no_grad():
        layer.bias.fill_(-100.0)
    return layer, {"x": torch.randn(2, 3)}, step


@program(phase="forward", mechanism=("underflow", "pole", "range-overflow"))
def likelihood_of_a_normal_that_collapsed() -> Case:
    """scale ** 2 is 0 in float32: the library divides by it."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        mean, log_scale = model(batch["x"]).chunk(2, -1)
        policy = torch.distributions.Normal(mean, torch.exp(log_scale - 60))
        return -policy.log_prob(batch["y"]).mean()  # BAD

    return nn.Linear(3, 2), {"x": torch.randn(4, 3), "y": torch.randn(4, 1)}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def quantizer_of_a_constant_tensor() -> Case:
    class FakeQuantize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            low, high = x.amin(), x.amax()
            scale = (high - low) / 255
            zero = -128 - torch.round(low / scale)  # BAD
            code = torch.clamp(torch.round(x / scale) + zero, -128, 127)  # BAD
            return (code - zero) * scale

    layer = nn.Linear(3, 4)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(0.7)
    return named(fc=layer, quantize=FakeQuantize()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="backward", mechanism="range-overflow")
def accumulated_gradient_leaves_half_precision() -> Case:
    """Each micro-batch is fine, and their sum is not: the second backward overflows what it adds to."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        total = torch.zeros(())
        for x in batch["x"]:
            loss = (model(x.half()).float() * 40000).sum()
            loss.backward()  # BAD
            total = total + loss.detach()
        return total

    return nn.Linear(2, 1, bias=False).half(), {"x": torch.ones(2, 1, 2)}, step


@program(phase="forward", mechanism="range-overflow", op="cosh")
def hyperbolic_embedding_far_from_the_origin() -> Case:
    class ExpMap(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            norm = v.norm(dim=-1, keepdim=True)
            return torch.cat([torch.cosh(norm), torch.sinh(norm) * v / norm], -1)  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        point = model(100 * batch["x"])
        return (point[:, :1] - point[:, 1:].norm(dim=-1, keepdim=True)).mean()

    return named(fc=nn.Linear(3, 3), exp=ExpMap()), {"x": 10 * torch.randn(4, 3)}, step


@program(phase="forward", mechanism=("range-overflow", "invalid"))
def half_precision_kernel_matrix() -> Case:
    """A matrix of squared distances by the quadratic formula overflows half precision."""

    class Kernel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            square = (x * x).sum(-1)  # BAD
            distance = square[:, None] + square[None, :] - 2 * x @ x.T
            return torch.exp(-distance / 1e4)

    model = named(fc=nn.Linear(8, 64).half(), kernel=Kernel())
    return model, {"x": 30 * torch.ones(3, 8).half() * 10}, mean_of_squares


@healthy
def spread_of_a_constant_feature() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"]) * 0 + 1
        return F.relu(1 - out.std(0)).mean()

    return nn.Linear(3, 4), {"x": torch.randn(4, 3)}, step


@healthy
def log_snr_of_the_last_timestep_clamped() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        alpha = torch.linspace(1, 0, 5)
        snr = alpha.log() - (1 - alpha).log()
        weight = snr.clamp(-10, 5).exp()[batch["t"]]
        return (model(batch["x"]).pow(2).mean(-1) * weight).mean()

    return nn.Linear(3, 3), {"x": torch.randn(3, 3), "t": torch.tensor([0, 2, 4])}, step


@healthy
def beam_search_inside_a_step() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = torch.full((4,), -math.inf)
        scores[0] = 0.0
        for x in batch["x"]:
            scores = (scores[:, None] + F.log_softmax(model(x), -1)[None]).flatten().topk(4).values
        return -scores.max()

    return nn.Linear(3, 5), {"x": torch.randn(3, 3)}, step


@healthy
def experts_with_a_masked_router() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        top, chosen = logits.topk(2, -1)
        kept = torch.full_like(logits, -math.inf).scatter(-1, chosen, top)
        gate = torch.softmax(kept, -1)
        return (gate * gate.mean(0)).sum()

    return nn.Linear(3, 6), {"x": torch.randn(4, 3)}, step


@program(phase="leaf", mechanism="bad-leaf", leaf="batch y", index=(1, 0))
def missing_targets_left_to_nanmean() -> Case:
    """nanmean leaves them out of the loss; their gradients are 0 · NaN."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        error = (model(batch["x"]) - batch["y"]).pow(2)  # BAD
        return error.nanmean()

    y = torch.randn(4, 2)
    y[1, 0] = math.nan
    return nn.Linear(3, 2), {"x": torch.randn(4, 3), "y": y}, step


@healthy
def decay_masked_before_exp() -> Case:
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            decay = -50 * F.softplus(self.rate(x).squeeze(-1) + 1).cumsum(-1)
            between = decay[:, :, None] - decay[:, None, :]
            kept = torch.ones_like(between, dtype=torch.bool).tril()
            weight: Any = torch.exp(between.masked_fill(~kept, -math.inf))
            return weight @ x

    return named(scan=Scan()), {"x": torch.randn(2, 5, 4)}, mean_of_squares

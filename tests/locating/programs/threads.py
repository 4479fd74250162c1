"""Failures from further threads of public issue trackers: rotations, policies, tagging, half precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, healthy, mean_of_squares, named, program

Batch = dict[str, Tensor]


@program(phase="forward", mechanism="invalid", op="div", module="norm")
def directions_of_a_vector_neuron_of_length_zero() -> Case:
    """FlyingGiraffe/vnn#4: the batch norm of lengths divides each vector by its own."""

    class LengthNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            length = torch.linalg.vector_norm(x, dim=2)
            kept = self.scale(length)
            return x / length.unsqueeze(2) * kept.unsqueeze(2)  # BAD

    class Lift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("oc,bcd->bod", self.weight, x)

    x = torch.randn(3, 2, 3)
    x[1] = 0
    return named(lift=Lift(), norm=LengthNorm()), {"x": x}, mean_of_squares


@program(phase=("backward", "forward"), mechanism=("where-gradient", "pole", "invalid"), op="div")
def logarithm_of_a_motion_without_rotation() -> Case:
    """kornia/kornia#3275: V⁻¹ is chosen away where the angle is 0, its derivative is not."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        omega, t = model(batch["x"]).split(3, -1)
        angle_squared = (omega * omega).sum(-1, keepdim=True)
        factor = (1 - angle_squared.cos()) / angle_squared  # BAD
        turned = t + factor * torch.linalg.cross(omega, t)
        return torch.where(angle_squared > 1e-8, turned, t).square().sum()

    model = nn.Linear(2, 6)
    with torch.no_grad():
        model.weight[:3], model.bias[:3] = 0, 0
    return model, {"x": torch.randn(2, 2)}, step


@program(phase="forward", mechanism=("pole", "underflow"), op="log")
def focal_weight_with_an_eps_below_the_resolution() -> Case:
    """NVIDIA/apex#358: 1 − 1e-8 is 1 in float32, so the clamp keeps nothing away from the logarithm."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.sigmoid(model(batch["x"])).clamp(1e-8, 1 - 1e-8)
        right = batch["y"] * (1 - p).pow(2) * torch.log(p)
        wrong = (1 - batch["y"]) * p.pow(2) * torch.log(1 - p)  # BAD
        return -(right + wrong).mean()

    model = nn.Linear(3, 1)
    nn.init.constant_(model.bias, 60.0)
    return model, {"x": torch.randn(4, 3), "y": torch.tensor([[1.0], [0.0], [1.0], [0.0]])}, step


@program(phase="forward", mechanism="invalid", op="div")
def closed_form_eigenvalues_of_a_multiple_of_the_identity() -> Case:
    """banctilrobitaille/torch-vectorized#7: the deviator of a round tensor is zero."""

    def eigenvalues(a: Tensor) -> Tensor:
        mean = a.diagonal(dim1=1, dim2=2).mean(-1)
        deviator = a - mean[:, None, None] * torch.eye(3)
        size = (deviator.square().sum((1, 2)) / 6).sqrt()  # ALSO
        angle = torch.linalg.det(deviator / size[:, None, None]) / 2  # BAD
        return mean + 2 * size * torch.cos(torch.acos(angle.clamp(-0.99, 0.99)) / 3)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return eigenvalues(batch["tensor"] * model(batch["x"]).view(-1, 1, 1)).square().mean()

    tensor = torch.randn(3, 3, 3)
    tensor = tensor + tensor.transpose(1, 2)
    tensor[1] = 0
    return nn.Linear(2, 1), {"x": torch.randn(3, 2), "tensor": tensor}, step


@program(phase="forward", mechanism="pole", op="div")
def polar_derivative_of_a_harmonic_at_the_pole() -> Case:
    """amirhajibabaei/AutoForce#5: the derivative by theta is divided by its sine."""

    class Harmonic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coefficient = nn.Parameter(torch.randn(3))

        def forward(self, xyz: Tensor) -> Tensor:
            r = xyz.square().sum(-1, keepdim=True).add(1e-12).sqrt()
            cos = xyz[:, 2:] / r
            sin = xyz[:, :2].square().sum(-1, keepdim=True) / r
            y = torch.cat([cos, cos * cos, cos * cos * cos], -1) * self.coefficient
            return cos * y / sin  # BAD

    return Harmonic(), {"x": torch.tensor([[1.0, 0.5, 0.2], [0.0, 0.0, 2.0]])}, lambda m, b: m(b["x"]).mean()


@program(phase="forward", mechanism="range-overflow", op="mm", module="feed.wo")
def feed_forward_of_a_text_to_text_model_in_half_precision() -> Case:
    """huggingface/transformers#5651: `wo` gives 66,246 where float16 ends at 65,504."""

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi, self.wo = nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.wi(x))
            return x + self.wo(h)  # BAD

    block = named(feed=FeedForward()).half()
    with torch.no_grad():
        block.feed.wi.weight.fill_(8.0)
        block.feed.wo.weight.fill_(4.0)
    return block, {"x": torch.full((2, 8), 5.0).half()}, mean_of_squares


@program(phase="forward", mechanism="invalid", op="div")
def signal_to_noise_weight_at_zero_terminal_snr() -> Case:
    """kohya-ss/sd-scripts#934: min(snr, gamma) / snr with a schedule that ends in pure noise."""

    @dataclass
    class Schedule:
        alphas: Tensor = field(default_factory=lambda: torch.tensor([0.99, 0.5, 0.1, 0.0]))

        def weight(self, t: Tensor, gamma: float = 5.0) -> Tensor:
            kept = self.alphas[t]
            snr = kept / (1 - kept)
            return torch.stack([snr, gamma * torch.ones_like(snr)], 1).min(1).values / snr  # BAD

    schedule = Schedule()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        error = (model(batch["x"]) - batch["noise"]).square().mean(-1)
        return (error * schedule.weight(batch["t"])).mean()

    return nn.Linear(3, 3), {"x": torch.randn(3, 3), "noise": torch.randn(3, 3), "t": torch.tensor([0, 2, 3])}, step


@program(phase="forward", mechanism="pole", op="div")
def decomposed_adapter_with_a_dead_column() -> Case:
    """KohakuBlueleaf/LyCORIS#166: a column of weight and update is zero, and its norm divides the magnitude."""

    class Decomposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 4))
            self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(5, 2))
            self.magnitude = nn.Parameter(torch.ones(4))
            with torch.no_grad():
                self.weight[:, 2] = 0

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight + self.up @ self.down
            norm = weight.detach().norm(dim=0)
            scale = self.magnitude / norm  # BAD
            return F.linear(x, weight * scale)

    return Decomposed(), {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase="forward", mechanism="invalid", op="div")
def spectra_of_generated_features_that_are_flat() -> Case:
    """facebookresearch/pytorch_GAN_zoo#89: the eigenvalues are scaled by their range."""

    def scaled(values: Tensor) -> Tensor:
        low, high = values.amin(), values.amax()
        return (values - low) / (high - low)  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        fake = F.relu(model(batch["x"]) - 100)
        real = scaled(torch.linalg.eigvalsh(batch["real"] @ batch["real"].T))
        return F.mse_loss(scaled(torch.linalg.eigvalsh(fake @ fake.T)), real)

    return nn.Linear(3, 6), {"x": torch.randn(4, 3), "real": torch.randn(4, 6)}, step


@program(phase="forward", mechanism="invalid", op="div")
def coefficient_of_variation_of_a_loss_that_is_always_zero() -> Case:
    """rickgroen/cov-weighting#3: each loss is weighted by its deviation over its mean so far."""

    class Weighting:
        def __init__(self) -> None:
            self.history = [torch.tensor([1.0, 0.0]), torch.tensor([0.8, 0.0])]

        def __call__(self, losses: Tensor) -> Tensor:
            seen = torch.stack([*self.history, losses.detach()])
            spread = seen.std(0) / seen.mean(0)  # BAD
            return spread / spread.sum()

    weigh = Weighting()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        losses = torch.stack([out[:, 0].square().mean(), F.relu(out[:, 1] - 50).mean()])
        return (weigh(losses) * losses).sum()

    return nn.Linear(3, 2), {"x": torch.randn(5, 3)}, step


@program(phase="forward", mechanism="invalid", op="pow")
def multi_scale_similarity_of_a_negative() -> Case:
    """VainF/pytorch-msssim#7: the structure term of an inverted image is negative."""

    def structure(a: Tensor, b: Tensor) -> Tensor:
        da, db = a - a.mean((1, 2), keepdim=True), b - b.mean((1, 2), keepdim=True)
        return (2 * (da * db).mean((1, 2)) + 9e-4) / (da.square().mean((1, 2)) + db.square().mean((1, 2)) + 9e-4)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        image, target = model(batch["x"]).view(-1, 8, 8), batch["y"]
        scales = []
        for _ in range(3):
            scales.append(structure(image, target))
            image, target = F.avg_pool2d(image, 2), F.avg_pool2d(target, 2)
        weights = torch.tensor([0.2, 0.3, 0.5])
        return 1 - (torch.stack(scales, -1) ** weights).prod(-1).mean()  # BAD

    model = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.copy_(-torch.eye(64))
    x = torch.rand(2, 64)
    return model, {"x": x, "y": x.view(2, 8, 8)}, step


@program(phase="backward", mechanism=("pole", "where-gradient", "invalid"), op="pow")
def multi_scale_similarity_clamped_at_zero() -> Case:
    """One-sixth/ms_ssim_pytorch#3: the maximum lets 0 through, and x ** 0.3 has no slope there."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        contrast = (model(batch["x"]) * batch["y"]).mean(-1)
        contrast = torch.maximum(contrast, torch.zeros(()))  # clamp stops this gradient, from torch 2.15 on
        return 1 - contrast.pow(0.3).mean()  # BAD

    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    return model, {"x": torch.randn(3, 4), "y": torch.rand(3, 4)}, step


@program(phase="forward", mechanism="range-overflow", op="exp")
def divergence_from_a_reference_that_drifted_away() -> Case:
    """huggingface/trl#6637: exp(log π_ref − log π) of the third estimator."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"])
        logp = logits.log_softmax(-1).gather(-1, batch["tokens"][..., None]).squeeze(-1)
        delta = batch["reference"] - logp
        kl = torch.exp(delta) - delta - 1  # BAD
        return (kl * batch["mask"]).sum() / batch["mask"].sum()

    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    with torch.no_grad():
        model[1].bias[2] = -200.0
    batch = {"tokens": torch.tensor([[1, 2, 0]]), "reference": torch.full((1, 3), -1.0), "mask": torch.ones(1, 3)}
    return model, batch, step


@program(phase=("backward", "forward"), mechanism=("where-gradient", "range-overflow"), op="exp")
def policy_ratio_at_padding() -> Case:
    """MakazhanAlpamys/Soup#1084: the loss is finite; the ratio that min and mask leave out is not."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logp = model(batch["x"]).squeeze(-1)
        ratio = torch.exp(logp - batch["old"])  # BAD
        clipped = ratio.clamp(0.8, 1.2)
        each = -torch.min(ratio * batch["advantage"], clipped * batch["advantage"])
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    batch = {
        "x": torch.randn(1, 3, 2),
        "old": torch.tensor([[0.0, 0.1, -200.0]]),
        "advantage": torch.ones(1, 3),
        "mask": torch.tensor([[1.0, 1.0, 0.0]]),
    }
    return nn.Linear(2, 1), batch, step


@program(phase="forward", mechanism="underflow", op="log")
def tagging_likelihood_through_a_probability() -> Case:
    """allanj/pytorch_neural_crf#4: −log(exp(labeled − unlabeled)) instead of the difference itself."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emit = nn.Linear(4, 3)
            self.transition = nn.Parameter(torch.zeros(3, 3))

        def partition(self, scores: Tensor) -> Tensor:
            alpha = scores[0]
            for score in scores[1:]:
                alpha = torch.logsumexp(alpha[:, None] + self.transition + score, 0)
            return alpha.logsumexp(0)

        def forward(self, x: Tensor, tags: Tensor) -> Tensor:
            scores = self.emit(x)
            path = scores.gather(1, tags[:, None]).sum() + self.transition[tags[:-1], tags[1:]].sum()
            return -torch.log(torch.exp(path - self.partition(scores)))  # BAD

    model = Tagger()
    with torch.no_grad():
        model.emit.bias[0] = -30.0
    return model, {"x": torch.randn(6, 4), "tags": torch.zeros(6, dtype=torch.long)}, lambda m, b: m(**b)


@program(phase="forward", mechanism=("masked-row", "invalid"), op="sub")
def log_sum_of_exponentials_over_forbidden_tags() -> Case:
    """threelittlemonkeys/lstm-crf-pytorch#3: the maximum of a row of −inf is subtracted from it."""

    def log_sum(x: Tensor) -> Tensor:
        top = x.max(-1, keepdim=True).values
        shifted = x - top  # BAD
        return top.squeeze(-1) + shifted.exp().sum(-1).log()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["x"]).unsqueeze(1) + batch["allowed"]
        return log_sum(scores).mean()

    allowed = torch.zeros(3, 3)
    allowed[1] = -math.inf
    return nn.Linear(4, 3), {"x": torch.randn(2, 4), "allowed": allowed}, step


@program(phase="forward", mechanism="empty-reduction", op="div")
def average_of_a_padded_sequence_of_length_zero() -> Case:
    """pytorch/pytorch#2311: "just sum the time axis and divide it by the length tensor"."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            out, _ = self.rnn(x)
            keep = torch.arange(x.shape[1])[None] < lengths[:, None]
            return (out * keep[..., None]).sum(1) / lengths[:, None]  # BAD

    batch = {"x": torch.randn(3, 5, 3), "lengths": torch.tensor([5, 0, 2])}
    return Encoder(), batch, lambda m, b: m(b["x"], b["lengths"]).square().mean()


@program(phase="forward", mechanism="range-overflow", op="mul", module="stem")
def scaled_images_before_a_batch_norm_in_half_precision() -> Case:
    """pytorch/pytorch#115500: the layer before the norm leaves float16, and the norm gets the blame."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x.half() * (self.gain * 255).half()  # BAD

    class Single(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    return named(stem=Stem(), norm=Single(3)), {"x": torch.rand(2, 3, 4, 4) * 400}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="mul", module="norm")
def instance_norm_by_hand_in_half_precision() -> Case:
    """tensorflow/tensorflow#47156: the squared deviation of a large activation leaves float16."""

    class InstanceNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            centered = x - x.mean((2, 3), keepdim=True)
            variance = (centered * centered).mean((2, 3), keepdim=True)  # BAD
            return centered * torch.rsqrt(variance + 1e-3)

    model = named(conv=nn.Conv2d(1, 2, 1), norm=InstanceNorm()).half()
    with torch.no_grad():
        model.conv.weight.fill_(1.0)
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 0, 0], x[0, 0, 2, 2] = 900.0, -900.0
    return model, {"x": x.half()}, lambda m, b: (1 / m(b["x"]).float()[..., 0, 0]).sum()


@program(phase="forward", mechanism="empty-reduction", op="div")
def semihard_triplets_of_a_batch_without_a_pair() -> Case:
    """alfonmedela/triplet-loss-pytorch#3: no two samples of the batch share a label."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch["x"])
        distance = (z[:, None] - z[None]).square().sum(-1)
        same = (batch["y"][:, None] == batch["y"][None]).float() - torch.eye(len(z))
        hardest = (distance * (1 - same)).amax(1, keepdim=True)
        return (F.relu(distance - hardest + 1) * same).sum() / same.sum()  # BAD

    return nn.Linear(3, 2), {"x": torch.randn(4, 3), "y": torch.arange(4)}, step


@program(phase="backward", mechanism=("pole", "invalid", "where-gradient"), op="sqrt")
def second_norm_of_a_squared_norm() -> Case:
    """jax-ml/jax#4177: norm(x) ** 2 by hand, at the origin."""

    def length(v: Tensor) -> Tensor:
        return v.square().sum(-1).sqrt()  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return (length(model(batch["x"]) - batch["y"]) ** 2).mean()

    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    x = torch.randn(3, 2)
    y = x.clone()
    y[1:] += 1
    return model, {"x": x, "y": y}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="reciprocal")
def plane_through_points_on_a_line() -> Case:
    """pytorch/pytorch#37712: the normal equations of a plane through three points on a line, with a tiny eps."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        points = batch["points"] * model(batch["x"]).mean()
        a, b = points[:, :2], points[:, 2:]
        gram = a.T @ a
        inverse = 1 / (gram[0, 0] * gram[1, 1] - gram[0, 1] * gram[1, 0])  # BAD
        flipped = torch.stack([torch.stack([gram[1, 1], -gram[0, 1]]), torch.stack([-gram[1, 0], gram[0, 0]])])
        return (inverse * flipped @ a.T @ b).square().sum()

    points = torch.tensor([[1.0, 1.0, 2.0], [2.0, 2.0, 1.0], [4.0, 4.0, 3.0]])
    return nn.Linear(2, 1), {"x": torch.randn(3, 2), "points": points}, step


@program(phase="forward", mechanism="pole", op="log")
def gumbel_noise_from_a_draw_of_zero() -> Case:
    """chainer/chainer#1839: "x may be zero and it is passed to log"."""

    class Gumbel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, logits: Tensor, uniform: Tensor) -> Tensor:
            noise = -(-uniform.log()).log()  # BAD
            return logits + noise

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return grad, None

    def step(model: nn.Module, batch: Batch) -> Tensor:
        sampled: Tensor = Gumbel.apply(model(batch["x"]), batch["uniform"])
        return sampled.mean()

    uniform = torch.rand(3, 4)
    uniform[2, 1] = 1.0
    return nn.Linear(2, 4), {"x": torch.randn(3, 2), "uniform": uniform}, step


@program(phase="forward", mechanism="invalid", op="div")
def orthogonality_penalty_of_adapters_that_start_at_zero() -> Case:
    """cmnfriend/O-LoRA#26: the overlap with the old adapter is divided by its size."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
            nn.init.zeros_(self.up.weight)

        def overlap(self, old: Tensor) -> Tensor:
            shared = (self.up.weight.T @ old).abs().sum()
            return shared / self.up.weight.abs().sum()  # BAD

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.up(self.down(x))
            return out

    def step(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, Adapter)
        return model(batch["x"]).square().mean() + 0.5 * model.overlap(batch["old"])

    return Adapter(), {"x": torch.randn(3, 4), "old": torch.randn(4, 2)}, step


@program(phase=("backward", "forward"), mechanism=("where-gradient", "range-overflow"), op="exp")
def low_variance_divergence_inside_a_checkpoint() -> Case:
    """THUDM/slime#2198: log-ratios are exponentiated before the loss is reduced."""
    from torch.utils.checkpoint import checkpoint

    def surrogate(new: Tensor, old: Tensor) -> Tensor:
        ratio = (new - old).exp()  # BAD
        return torch.maximum(-ratio, -ratio.clamp(0.8, 1.28))

    def step(model: nn.Module, batch: Batch) -> Tensor:
        new = model(batch["x"]).squeeze(-1)
        out: Tensor = checkpoint(surrogate, new, batch["old"], use_reentrant=False)
        return out.mean() + 0.01 * new.square().mean()

    return nn.Linear(2, 1), {"x": torch.randn(3, 2), "old": torch.tensor([0.0, -150.0, 0.2])}, step


@program(phase="leaf", mechanism="bad-leaf", leaf="batch mask", index=(1, 3))
def mask_that_was_built_by_multiplying_infinity() -> Case:
    """returnn-like masks: (1 − keep) · −inf is NaN where keep is 1, before the step begins."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["x"]) + batch["mask"]  # BAD
        return -scores.log_softmax(-1)[:, 0].mean()

    mask = torch.zeros(2, 4)
    mask[1, 3] = math.nan
    return nn.Linear(3, 4), {"x": torch.randn(2, 3), "mask": mask}, step


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy
def power_whose_exponent_depends_on_its_base() -> Case:
    """pytorch/pytorch#38714: pow(x, (2 − x)²) at x = 0; torch has a gradient there today."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        error = (model(batch["x"]) - batch["y"]).square()
        return torch.pow(error, (2 - error) ** 2).mean()

    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    x = torch.randn(3, 2) / 2
    return model, {"x": x, "y": x.clone()}, step


@healthy
def adaptive_instance_norm_of_a_constant_channel() -> Case:
    """grey-eye/talking-heads#32, repaired: the eps is inside of the root."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        feature = F.relu(model(batch["x"]) - 100)
        deviation = (feature.var(0) + 1e-5).sqrt()
        return ((feature - feature.mean(0)) / deviation).square().mean() + model(batch["x"]).mean()

    return nn.Linear(3, 4), {"x": torch.randn(5, 3)}, step


@healthy
def snr_weight_of_a_velocity_prediction() -> Case:
    """kohya-ss/sd-scripts#934, repaired: min(snr, gamma) / (snr + 1)."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        snr = batch["alpha"] / (1 - batch["alpha"])
        weight = snr.clamp(max=5.0) / (snr + 1)
        return (weight * (model(batch["x"]) - batch["v"]).square().mean(-1)).mean()

    batch = {"x": torch.randn(3, 3), "v": torch.randn(3, 3), "alpha": torch.tensor([0.9, 0.2, 0.0])}
    return nn.Linear(3, 3), batch, step


@healthy
def similarity_clamped_away_from_zero() -> Case:
    """One-sixth/ms_ssim_pytorch#3, repaired."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        contrast = (model(batch["x"]) * batch["y"]).mean(-1).clamp_min(1e-4)
        return 1 - contrast.pow(0.3).mean()

    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    return model, {"x": torch.randn(3, 4), "y": torch.rand(3, 4)}, step


@healthy
def policy_ratio_filled_before_the_exponential() -> Case:
    """MakazhanAlpamys/Soup#1084, repaired: padding has a log-ratio of 0."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        difference = model(batch["x"]).squeeze(-1) - batch["old"]
        ratio = torch.exp(difference.masked_fill(batch["mask"] == 0, 0.0))
        each = -torch.min(ratio, ratio.clamp(0.8, 1.2))
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    batch = {
        "x": torch.randn(1, 3, 2),
        "old": torch.tensor([[0.0, 0.1, -200.0]]),
        "mask": torch.tensor([[1.0, 1.0, 0.0]]),
    }
    return nn.Linear(2, 1), batch, step


@healthy
def partition_of_tags_of_which_some_are_forbidden() -> Case:
    """timvieira/crf#5: zero is −inf in log space, and every state has a way in."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emit = nn.Linear(4, 3)
            self.transition = nn.Parameter(torch.randn(3, 3))
            self.register_buffer("forbidden", torch.tensor([[False, True, True], [False] * 3, [True, False, False]]))

        def forward(self, x: Tensor) -> Tensor:
            allowed = self.transition.masked_fill(self.get_buffer("forbidden"), -math.inf)
            alpha = torch.full((3,), -math.inf).index_fill(0, torch.tensor([1]), 0.0)
            for score in self.emit(x):
                alpha = torch.logsumexp(alpha[:, None] + allowed, 0) + score
            return alpha.logsumexp(0)

    return Chain(), {"x": torch.randn(5, 4)}, lambda m, b: m(b["x"])


@healthy
def recurrent_average_with_lengths_of_at_least_one() -> Case:
    """pytorch/pytorch#2311 with the guard that everyone adds."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            out, _ = self.rnn(x)
            keep = torch.arange(x.shape[1])[None] < lengths[:, None]
            return (out * keep[..., None]).sum(1) / lengths.clamp(min=1)[:, None]

    batch = {"x": torch.randn(3, 5, 3), "lengths": torch.tensor([5, 0, 2])}
    return Encoder(), batch, lambda m, b: m(b["x"], b["lengths"]).square().mean()


@healthy
def best_loss_so_far_starts_at_infinity() -> Case:
    """HIPS/autograd#586 and its kin: an infinite record is compared with, and a ratio to it is zero."""

    class Tracked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.best = nn.Linear(3, 2), torch.tensor(math.inf)
            self.listeners: list[Callable[[Tensor], None]] = []

        def forward(self, x: Tensor) -> Tensor:
            loss = self.body(x).square().mean()
            progress = loss.detach() / self.best
            self.best = torch.minimum(self.best, loss.detach())
            return loss * (1 + progress)

    return Tracked(), {"x": torch.randn(4, 3)}, lambda m, b: m(b["x"])

"""Failures told in public issue trackers, each as a small training step; the issue is named beside it."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, mean_of_squares, named, program

Batch = dict[str, Tensor]


@program(phase="forward", mechanism="empty-reduction", op="div")
def distillation_without_labels() -> Case:
    """microsoft/LMOps#38: the labels were truncated away."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        student = F.log_softmax(model(batch["x"]), -1)
        teacher = F.softmax(batch["teacher"], -1)
        kept = (batch["label"] != -100).int()
        per_token = (teacher * student).sum(-1).view(-1)
        return -torch.sum(per_token * kept.view(-1)) / torch.sum(kept.view(-1))  # BAD

    batch = {"x": torch.randn(2, 3, 4), "teacher": torch.randn(2, 3, 5), "label": torch.full((2, 3), -100)}
    return nn.Linear(4, 5), batch, step


@program(phase="forward", mechanism="empty-reduction", op="nll_loss_forward")
def masked_language_model_without_masks() -> Case:
    """jaywonchung/BERT4Rec-VAE-Pytorch#22: a short sequence in which nothing was masked."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).view(-1, 6)
        return F.cross_entropy(logits, batch["y"].view(-1), ignore_index=0)  # BAD

    return nn.Embedding(6, 6), {"x": torch.tensor([[1, 2, 3]]), "y": torch.zeros(1, 3, dtype=torch.long)}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def projected_gradient_of_length_zero() -> Case:
    """WeiChengTseng/Pytorch-PCGrad#7: projecting on a gradient that is zero."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        first = model(batch["x"]).mean(0)
        second = F.relu(model(batch["x"]) - 100).mean(0)
        inner = (first * second).sum()
        projected = first - inner * second / second.norm() ** 2  # BAD
        return projected.pow(2).sum()

    return nn.Linear(3, 4), {"x": torch.randn(5, 3)}, step


@program(phase="forward", mechanism=("invalid", "empty-reduction"), op="div")
def ratio_of_norms_of_a_zero_update() -> Case:
    """microsoft/dion#24: an output projection initialized with zeros has no update to rescale."""

    class Rescale(nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            before = u.norm(dim=-1, keepdim=True)
            scaled = u * 0.5
            ratio = before / scaled.norm(dim=-1, keepdim=True)  # BAD
            return scaled * ratio

    out = nn.Linear(4, 3)
    nn.init.zeros_(out.weight)
    nn.init.zeros_(out.bias)
    return named(out=out, rescale=Rescale()), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="bmm")
def half_precision_attention_scores() -> Case:
    """Stability-AI/stablediffusion#89: q·k leaves float16 before it is scaled."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(16, 16).half(), nn.Linear(16, 16).half()

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.q(x), self.k(x)
            scores = torch.einsum("bid,bjd->bij", q, k) * 0.01  # BAD
            return scores.softmax(-1)

    return named(attention=Attention()), {"x": torch.full((1, 3, 16), 250.0).half()}, mean_of_squares


@program(phase="forward", mechanism=("underflow", "pole"), op="rsqrt")
def eps_of_a_layer_norm_in_half_precision() -> Case:
    """deepspeedai/DeepSpeed#581: eps is added and then rounded away."""

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            spread = (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
            inverse = torch.rsqrt((spread + 1e-12).half())  # BAD
            return x * inverse

    return named(fc=nn.Linear(4, 4, bias=False), norm=Norm()), {"x": torch.zeros(2, 4)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="pow")
def variance_in_half_precision() -> Case:
    """pytorch/pytorch#66707, microsoft/onnxruntime#29034: the square of an outlier channel."""

    class RMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mean_square = x.pow(2).mean(-1, keepdim=True)  # BAD
            return x / mean_square.sqrt()

    fc = nn.Linear(4, 4).half()
    with torch.no_grad():
        fc.bias.fill_(300.0)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"]).float()
        return (1 / out).mean()

    return named(fc=fc, norm=RMSNorm()), {"x": torch.randn(2, 4).half()}, step


@program(phase="backward", mechanism="where-gradient", op="sqrt")
def lens_profile_inside_and_outside() -> Case:
    """Ciela-Institute/caustics#83: both branches of a profile are computed everywhere."""

    class Profile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, r: Tensor) -> Tensor:
            x = r * self.scale
            inner = torch.sqrt(1 - x * x)  # BAD
            return torch.where(x < 1, inner, torch.zeros_like(x))

    return named(profile=Profile()), {"x": torch.tensor([0.2, 1.0, 0.7])}, mean_of_squares


@program(phase=("backward", "forward"), mechanism=("where-gradient", "invalid", "pole"), op="log2")
def entropy_of_masked_attention() -> Case:
    """jax-ml/jax#17070 in torch: p·log p of a probability that the mask made zero."""

    class Entropy(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            keep = torch.tensor([True, True, False])
            p = torch.softmax(logits.masked_fill(~keep, -math.inf), -1)
            plogp = torch.where(keep, p * torch.log2(p), 0.0)  # BAD
            return -plogp.sum(-1)

    return named(fc=nn.Linear(4, 3), entropy=Entropy()), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "pole"), op="mul")
def cross_entropy_with_masked_logits() -> Case:
    """google-deepmind/optax#1762 in torch: a target of zero times a log-probability of −inf."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(batch["illegal"], -math.inf)
        logp = F.log_softmax(logits, -1)
        return -(batch["target"] * logp).sum(-1).mean()  # BAD

    illegal = torch.tensor([[False, False, True]])
    return nn.Linear(4, 3), {"x": torch.randn(2, 4), "illegal": illegal, "target": torch.tensor([[1.0, 0, 0]])}, step


@program(phase="forward", mechanism=("invalid", "empty-reduction"), op="div")
def label_smoothing_over_padding_rows() -> Case:
    """sooftware/kospeech#37: a row of nothing but padding is normalized by its own length."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logp = F.log_softmax(model(batch["x"]), -1)
        length = batch["mask"].sum(-1)
        per_row = (logp.sum(-1) * batch["mask"]).sum(-1) / length  # BAD
        return -per_row.mean()

    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    return nn.Linear(3, 4), {"x": torch.randn(2, 2, 3), "mask": mask}, step


@program(phase="forward", mechanism="masked-row", op="_softmax", module="attention.softmax")
def attention_over_an_empty_line() -> Case:
    """jadore801120/attention-is-all-you-need-pytorch#5: an empty sentence masks every key."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.Softmax(dim=2)
            self.qk = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.qk(x) @ x.transpose(1, 2)
            pad = (x.abs().sum(-1) == 0)[:, None]
            scores.data.masked_fill_(pad, -float("inf"))
            return self.softmax(scores)  # BAD

    x = torch.randn(2, 3, 4)
    x[1] = 0
    return named(attention=Attention()), {"x": x}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "empty-reduction"), op="std")
def advantages_of_one_step() -> Case:
    """Advantages normalized over a rollout of length one."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        value = model(batch["x"]).squeeze(-1)
        advantage = batch["reward"] - value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)  # BAD
        return advantage.pow(2).mean()

    return nn.Linear(3, 1), {"x": torch.randn(1, 3), "reward": torch.ones(1)}, step


@program(phase="forward", mechanism="range-overflow", op="exp")
def importance_ratio_of_a_stale_policy() -> Case:
    """The ratio of policies is exponentiated before it is clipped."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logp = F.log_softmax(model(batch["x"]), -1)[:, 0]
        ratio = torch.exp(logp - batch["old"])  # BAD
        gain = ratio * batch["advantage"]
        return -(gain - gain.detach() * 0.1).mean()

    batch = {"x": torch.randn(3, 4), "old": torch.tensor([-1.0, -200.0, -2.0]), "advantage": torch.ones(3)}
    return nn.Linear(4, 2), batch, step


@program(phase="backward", mechanism=("pole", "where-gradient"), op="sqrt")
def squared_distance_before_the_root() -> Case:
    """pytorch/pytorch#2775: .norm() has a subgradient at zero, .pow(2).sum().sqrt() has not."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        anchor, positive = model(batch["a"]), model(batch["b"])
        distance = (anchor - positive).pow(2).sum(-1).sqrt()  # BAD
        return F.relu(distance - 0.2).mean() + 0 * distance.mean()

    x = torch.randn(3, 4)
    return nn.Linear(4, 5), {"a": x, "b": x.clone()}, step


@program(phase=("backward", "forward"), mechanism=("pole", "invalid", "where-gradient"), op="sqrt")
def where_square_root() -> Case:
    """pytorch/pytorch#187297: the branch that is not taken takes a root of negative numbers."""

    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, torch.sqrt(x), x)  # BAD

    fc = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        fc.weight.copy_(-torch.eye(2))
    return named(fc=fc, root=Root()), {"x": torch.rand(3, 2) + 0.1}, mean_of_squares


@program(phase="leaf", mechanism="bad-leaf", leaf="batch teacher", index=(1, 2))
def teacher_logits_with_infinities() -> Case:
    """Saved teacher logits hold +inf from a half-precision dump."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        student = model(batch["x"])
        return (student - batch["teacher"]).pow(2).mean()  # BAD

    teacher = torch.randn(2, 3)
    teacher[1, 2] = math.inf
    return nn.Linear(4, 3), {"x": torch.randn(2, 4), "teacher": teacher}, step


@program(phase="leaf", mechanism="bad-leaf", leaf="batch x", index=(1, 3))
def spectrogram_with_log_of_silence() -> Case:
    """log of digital silence was stored in the dataset: −inf reaches a linear layer, not a softmax."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).relu()  # BAD

    x = torch.randn(2, 4)
    x[1, 3] = -math.inf
    return named(encoder=Encoder()), {"x": x}, mean_of_squares


@program(phase="forward", mechanism="pole", op="log")
def log_mel_of_silence() -> Case:
    """The front end takes the log of a power spectrum in which one frame is silent."""

    class Front(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mel = nn.Parameter(torch.rand(5, 3))

        def forward(self, audio: Tensor) -> Tensor:
            power = torch.fft.rfft(audio).abs().pow(2)
            return torch.log(power @ self.mel)  # BAD

    audio = torch.randn(2, 8)
    audio[1] = 0
    return named(front=Front(), head=nn.Linear(3, 1)), {"x": audio}, mean_of_squares


@program(phase="backward", mechanism=("pole", "invalid"), op="abs")
def magnitude_of_a_zero_complex_number() -> Case:
    """abs of complex zero is fine; its logarithm is not, and only backward shows it behind a clamp."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        z = torch.view_as_complex(model(batch["x"]).view(-1, 2))
        magnitude = z.real**2 + z.imag**2
        return torch.pow(magnitude, 0.3).mean()  # BAD

    return nn.Linear(3, 4, bias=False), {"x": torch.zeros(2, 3)}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="log")
def gaussian_likelihood_with_zero_variance() -> Case:
    """A variance head with ReLU predicts exactly zero."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        mean, raw = model(batch["x"]).chunk(2, -1)
        variance = F.relu(raw)
        return (torch.log(variance) + (batch["y"] - mean) ** 2 / (variance + 1e-6)).mean()  # BAD

    return nn.Linear(3, 4), {"x": torch.randn(8, 3), "y": torch.randn(8, 2)}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="acosh")
def hyperbolic_distance_below_one() -> Case:
    """Rounding puts the argument of acosh a hair below one."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        u = model(batch["x"]) * 0.1
        inner = 1 + 2 * (u - u).pow(2).sum(-1) - 1e-6
        return torch.acosh(inner).mean()  # BAD

    return nn.Linear(3, 4), {"x": torch.randn(2, 3)}, step


@program(phase="outside", mechanism=("outside-dispatcher", "bad-leaf", "invalid"), op="")
def sample_weights_from_numpy() -> Case:
    """Class weights are computed in numpy from counts, one of which is zero."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        counts = np.bincount(batch["y"].numpy(), minlength=4)
        weights = torch.from_numpy(counts.sum() / counts).float()  # BAD
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses.mean() * weights).mean()  # BAD

    return nn.Linear(3, 4), {"x": torch.randn(4, 3), "y": torch.tensor([0, 1, 1, 3])}, step


@program(phase="forward", mechanism="range-overflow", op="_to_copy")
def logits_cast_to_half_for_the_loss() -> Case:
    """The loss is computed in float16 "to save memory"."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]) * 1e5
        half = logits.half()  # BAD
        return F.mse_loss(half.float(), batch["y"])

    return nn.Linear(3, 4), {"x": torch.randn(2, 3), "y": torch.zeros(2, 4)}, step


@program(phase="forward", mechanism=("range-overflow", "pole"), op="cumprod")
def discounted_product() -> Case:
    """A cumulative product of values above one over a long sequence."""

    class Cumulative(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            growth = 1 + x.exp()
            return torch.cumprod(growth, -1)  # BAD

    return named(fc=nn.Linear(4, 400), product=Cumulative()), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "pole", "empty-reduction"), op="div")
def rows_that_sum_to_zero() -> Case:
    """Top-k routing weights are renormalized where no expert was chosen."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            p = F.relu(self.gate(x) - 50)
            return p / p.sum(-1, keepdim=True)  # BAD

    return named(router=Router()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="forward", mechanism=("pole", "invalid"), op="atanh")
def tanh_policy_at_the_border() -> Case:
    """The action lies exactly on the border of a squashed Gaussian."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        mean = model(batch["x"])
        raw = torch.atanh(batch["action"])  # BAD
        return ((raw - mean) ** 2).mean()

    return nn.Linear(3, 2), {"x": torch.randn(2, 3), "action": torch.tensor([[0.3, 1.0], [0.2, -0.4]])}, step


@program(phase="backward", mechanism=("pole", "invalid"), op="linalg_vector_norm")
def norm_of_half_power() -> Case:
    """A p-norm with p below one at a zero component."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        w = model(batch["x"])
        return (w.abs() ** 0.5).sum(-1).pow(2).mean()  # BAD

    fc = nn.Linear(3, 4)
    with torch.no_grad():
        fc.weight[1], fc.bias[1] = 0, 0
    return fc, {"x": torch.randn(2, 3)}, step


@program(phase="forward", mechanism="range-overflow", op="sum")
def half_precision_sum_of_squares() -> Case:
    """A loss that is summed, not averaged, in float16."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        error = (model(batch["x"]) - batch["y"]) ** 2
        return error.sum()  # BAD

    return nn.Linear(8, 512).half(), {"x": torch.randn(64, 8).half(), "y": torch.full((64, 512), 2.0).half()}, step


@program(phase="forward", mechanism=("masked-row", "invalid"), op="_softmax")
def pointer_network_with_no_city_left() -> Case:
    """Every city has been visited, and the mask is a buffer that is updated in place."""

    class Pointer(nn.Module):
        visited: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(3, 1)
            self.register_buffer("visited", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = x.sum() * 0
            for i in range(5):
                p = torch.softmax(self.score(x).squeeze(-1) + self.visited, -1)  # BAD
                total = total + p[i % 4]
                self.visited[i % 4] = -math.inf
            return total

    return named(pointer=Pointer()), {"x": torch.randn(4, 3)}, mean_of_squares

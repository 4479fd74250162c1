"""Failures that users reported to projects of many fields, each in a few lines with the formula that failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.programs import Case, healthy, mean_of_squares, named, program

Batch = dict[str, Tensor]


def _constant(layer: nn.Linear, value: float) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, value)
    return layer


# --- boxes, segmentation, images ------------------------------------------------------------------------------------


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def gaussian_distance_of_two_equal_boxes() -> Case:
    """open-mmlab/mmrotate#205: the distance of two boxes as Gaussians is the root of 0 where they agree."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        moved = batch["mean"] * model(batch["x"])
        center = (moved - batch["mean"]).square().sum(-1)
        whole = center + (batch["size"] - batch["size"]).square().sum(-1)
        distance = whole.sqrt()  # BAD
        return (1 - 1 / (1 + distance)).mean()

    batch = {"x": torch.randn(3, 2), "mean": torch.rand(3, 2), "size": torch.rand(3, 2)}
    return _constant(nn.Linear(2, 1), 1.0), batch, step


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def edge_of_an_enclosing_box_without_length() -> Case:
    """lilanxiao/Rotated_IoU#20: two corners of a box lie in one place."""

    class Corners(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, 4, 2)

    class Edges(nn.Module):
        def forward(self, corners: Tensor) -> Tensor:
            step = corners.roll(-1, 1) - corners
            return torch.sqrt(step[..., 0].square() + step[..., 1].square())  # BAD

    return (
        named(head=_constant(nn.Linear(3, 8), 1.0), corners=Corners(), edges=Edges()),
        {"x": torch.randn(2, 3)},
        mean_of_squares,
    )


@program(phase="backward", mechanism=("where-gradient", "pole", "invalid"), op="log")
def distance_transform_far_from_every_boundary() -> Case:
    """kornia/kornia#4183: the logarithm of an empty neighborhood is replaced in the forward only."""

    class Distance(nn.Module):
        def forward(self, mask: Tensor) -> Tensor:
            kernel = torch.exp(-torch.tensor([[[[2.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 2.0]]]]) / 0.35)
            near = F.conv2d(mask, kernel, padding=1)
            far = -0.35 * torch.log(near)  # BAD
            return torch.nan_to_num(far, nan=0.0, posinf=0.0, neginf=0.0)

    mask = torch.zeros(1, 1, 6, 6)
    mask[..., 0, 0] = 1
    scale = nn.Conv2d(1, 1, 1, bias=False)
    return named(scale=scale, distance=Distance()), {"x": mask * scale.weight.detach().sign()}, mean_of_squares


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt", module="metric")
def gradient_magnitude_of_a_black_picture() -> Case:
    """photosynthesis-team/piq#308: the Prewitt gradients of a constant picture are 0."""

    class Similarity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            prewitt = torch.tensor([[1.0, 0.0, -1.0]] * 3) / 3
            self.register_buffer("kernels", torch.stack([prewitt, prewitt.T])[:, None])

        def edges(self, image: Tensor) -> Tensor:
            grads = F.conv2d(image, self.get_buffer("kernels"), padding=1)
            return torch.sqrt(torch.sum(grads**2, dim=-3, keepdim=True))  # BAD

        def forward(self, image: Tensor) -> Tensor:
            return self.edges(image) / (self.edges(image).square() + 1.0)

    return (
        named(paint=_constant(nn.Linear(4, 25), 0.0), shape=nn.Unflatten(1, (1, 5, 5)), metric=Similarity()),
        {"x": torch.randn(2, 4)},
        mean_of_squares,
    )


@program(phase="forward", mechanism="empty-reduction", op="div")
def masked_absolute_error_where_no_pixel_counts() -> Case:
    """MhLiao/DB#14: the sum of the mask is 0, and the error is divided by it."""

    class MaskL1Loss(nn.Module):
        def forward(self, pred: Tensor, gt: Tensor, mask: Tensor) -> Tensor:
            return (torch.abs(pred - gt) * mask).sum() / mask.sum()  # BAD

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.criterion = nn.Conv2d(1, 1, 3, padding=1), MaskL1Loss()

        def forward(self, x: Tensor, gt: Tensor, mask: Tensor) -> Tensor:
            return self.criterion(self.body(x), gt, mask)

    batch = {"x": torch.rand(2, 1, 4, 4), "gt": torch.rand(2, 1, 4, 4), "mask": torch.zeros(2, 1, 4, 4)}
    return Head(), batch, lambda m, b: m(b["x"], b["gt"], b["mask"])


@program(phase="backward", mechanism=("pole", "invalid"), op="pow")
def focal_weight_with_a_fractional_exponent() -> Case:
    """kornia/kornia#918: the derivative of p ** 0.5 where p is 0."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.sigmoid(model(batch["x"]).squeeze(-1))
        wrong = 1 - p
        weight = torch.pow(wrong, 0.5)  # BAD
        return (-weight * batch["y"] * torch.log(p + 1e-8)).mean()

    return _constant(nn.Linear(3, 1), 100.0), {"x": torch.randn(4, 3), "y": torch.ones(4)}, step


@program(phase="forward", mechanism=("underflow", "pole"), op="log")
def focal_loss_with_a_clip_that_half_precision_rounds_away() -> Case:
    """fudannlp16/focal-loss#4: 1e-8 is 0 in float16, so the clip before the logarithm does nothing."""

    class Focal(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            p = torch.sigmoid(logits.half())
            kept = p.clamp(1e-8, 1.0)
            return (-((1 - p) ** 2) * torch.log(kept)).float()  # BAD

    return (
        named(head=_constant(nn.Linear(2, 3), -40.0), focal=Focal()),
        {"x": torch.randn(4, 2)},
        lambda m, b: m(b["x"]).mean(),
    )


# --- diffusion, flows, transport ------------------------------------------------------------------------------------


@program(phase="forward", mechanism="pole", op="div")
def min_snr_weight_of_a_rescaled_schedule() -> Case:
    """TiankaiHang/Min-SNR-Diffusion-Training#4: rescaled betas end at an SNR of 0, and the weight is divided by it."""

    @dataclass
    class Schedule:
        kept: Tensor

        def snr(self, t: Tensor) -> Tensor:
            return self.kept[t] / (1 - self.kept[t])

        def weight(self, t: Tensor, gamma: float = 5.0) -> Tensor:
            snr = self.snr(t)
            return (snr.clamp(max=gamma) + 1e-3) / snr  # BAD

    schedule = Schedule(torch.linspace(0.99, 0.0, 10))

    def step(model: nn.Module, batch: Batch) -> Tensor:
        t = batch["t"]
        kept = schedule.kept[t][:, None]
        noisy = kept.sqrt() * batch["x"] + (1 - kept).sqrt() * batch["noise"]
        error = (model(noisy) - batch["noise"]).square().mean(-1)
        return (schedule.weight(t) * error).mean()

    batch = {"x": torch.randn(4, 3), "noise": torch.randn(4, 3), "t": torch.tensor([0, 4, 9, 2])}
    return nn.Linear(3, 3), batch, step


@program(phase="forward", mechanism="range-overflow", op="exp")
def assignment_of_features_that_were_not_normalized() -> Case:
    """facebookresearch/swav#67: exp(scores / 0.05) of prototypes that are far from unit length."""

    @torch.no_grad()
    def sinkhorn(scores: Tensor, rounds: int = 3) -> Tensor:
        q = torch.exp(scores / 0.05).t()  # BAD
        q /= q.sum()
        for _ in range(rounds):
            q /= q.sum(1, keepdim=True) * q.shape[0]
            q /= q.sum(0, keepdim=True) * q.shape[1]
        return (q * q.shape[1]).t()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["x"])
        return -(sinkhorn(scores) * F.log_softmax(scores / 0.1, -1)).sum(-1).mean()

    return nn.Linear(4, 5, bias=False), {"x": torch.randn(6, 4) * 30}, step


@program(phase=("forward", "backward"), mechanism=("pole", "where-gradient"), op="div")
def scaling_of_a_marginal_with_an_empty_bin() -> Case:
    """PythonOT/POT#54: the kernel is divided by a histogram that has a 0."""

    class Transport(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 4)

        def forward(self, x: Tensor, a: Tensor, cost: Tensor) -> Tensor:
            b = self.body(x).softmax(-1)
            kernel = torch.exp(-cost / 0.5)
            scaled = (1 / a)[:, None] * kernel  # BAD
            u, v = torch.full_like(a, 1 / len(a)), torch.full_like(b, 1 / len(a))
            for _ in range(3):
                v = b / (kernel.T @ u)
                u = 1 / (scaled @ v)
            return (u[:, None] * kernel * v * cost).sum()

    batch = {"x": torch.randn(3), "a": torch.tensor([0.0, 1.0, 0.0, 0.0]), "cost": torch.rand(4, 4)}
    return Transport(), batch, lambda m, b: m(b["x"], b["a"], b["cost"])


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def transport_whose_kernel_has_a_row_of_zeros() -> Case:
    """PythonOT/POT#552: exp(−cost / reg) underflows in a whole row, and the row is divided by."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        x = model(batch["x"])
        cost = torch.cdist(x, batch["y"]).square()
        kernel = torch.exp(-cost / 0.01)
        v = torch.full((4,), 0.25)
        u = 0.2 / (kernel @ v)  # BAD
        return (u[:, None] * kernel * v * cost).sum()

    batch = {"x": torch.randn(5, 2), "y": torch.randn(4, 2) + 8}
    return nn.Linear(2, 2), batch, step


@program(phase="backward", mechanism=("pole", "underflow", "invalid"), op="sqrt")
def amplitude_of_a_spectral_density_that_vanished() -> Case:
    """seantalts/stanli#144: exp(−877) is 0, the root is finite, its derivative is not."""

    class HilbertSpace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale, self.log_length = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
            self.register_buffer("eigenvalues", torch.tensor([1.0, 10.0, 42.0]))
            self.weights = nn.Parameter(torch.randn(3))

        def forward(self, basis: Tensor) -> Tensor:
            power = -0.5 * (self.log_length.exp() * self.get_buffer("eigenvalues")) ** 2
            density = self.log_scale.exp() * torch.exp(power)
            return basis @ (density.sqrt() * self.weights)  # BAD

    return HilbertSpace(), {"x": torch.randn(6, 3)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="mul")
def euler_steps_of_a_cubic_rate() -> Case:
    """rtqichen/torchdiffeq#58: a stiff system leaves the stable region, and each step cubes it."""

    class Rate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor([-2.0, -3.0]))

        def forward(self, y: Tensor) -> Tensor:
            return self.gain * (y * y * y)  # BAD

    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = Rate()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(12):
                x = x + 0.5 * self.rate(x)
            return x

    return Solver(), {"x": torch.full((3, 2), 4.0)}, mean_of_squares


@program(phase="forward", mechanism="invalid", op="log")
def planar_flow_that_folds_space() -> Case:
    """VincentStimper/normalizing-flows#21 and its kin: w · u below −1, so the determinant is negative."""

    class Planar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.u = nn.Parameter(torch.tensor([2.0, 0.0])), nn.Parameter(torch.tensor([-3.0, 0.5]))
            self.bias = nn.Parameter(torch.zeros(()))

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            inner = z @ self.w + self.bias
            slope = 1 - inner.tanh().square()
            log_det = torch.log(1 + slope * (self.u @ self.w))  # BAD
            return z + self.u * inner.tanh()[:, None], log_det

    def step(model: nn.Module, batch: Batch) -> Tensor:
        z, log_det = model(batch["x"])
        return (0.5 * z.square().sum(-1) - log_det).mean()

    return Planar(), {"x": torch.randn(8, 2) * 0.3}, step


# --- language models, preferences, attention ------------------------------------------------------------------------


@program(phase="forward", mechanism="empty-reduction", op="div")
def preference_pair_that_is_all_prompt() -> Case:
    """allenai/open-instruct#1625: every label of one sequence is −100, and the average is over its length."""

    def average_log_prob(logits: Tensor, labels: Tensor) -> Tensor:
        mask = labels != -100
        picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        return (picked * mask).sum(-1) / mask.sum(-1)  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logps = average_log_prob(model(batch["x"]), batch["labels"])
        return -F.logsigmoid(0.1 * (logps[:2] - logps[2:])).mean()

    labels = torch.randint(0, 7, (4, 5))
    labels[3] = -100
    return nn.Linear(6, 7), {"x": torch.randn(4, 5, 6), "labels": labels}, step


@program(phase="forward", mechanism="empty-reduction", op="div")
def normalizer_of_a_batch_of_truncated_completions() -> Case:
    """unslothai/unsloth-zoo#1286: the number of items in the batch is a plain 0 when all are truncated."""

    class Config:
        num_processes = 2

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logps = model(batch["x"]).log_softmax(-1)[..., 0]
        mask = batch["mask"]
        per_token = -torch.exp(logps - logps.detach()) * batch["advantage"][:, None]
        normalizer = mask.sum() / Config.num_processes
        return (per_token * mask).sum() / normalizer  # BAD

    batch = {"x": torch.randn(2, 3, 4), "mask": torch.zeros(2, 3), "advantage": torch.randn(2)}
    return nn.Linear(4, 5), batch, step


@program(phase="forward", mechanism="range-overflow", op="exp")
def importance_ratio_without_a_divergence_term() -> Case:
    """huggingface/trl#3248: exp of the difference of log-probabilities, which nothing keeps small."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(9, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 9)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden, _ = self.rnn(self.embed(tokens))
            return self.head(hidden).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        new = model(batch["tokens"])
        first = torch.exp(new - batch["old"])  # BAD
        second = first.clamp(0.8, 1.2)
        gain = batch["gain"][:, None]
        each = -torch.min(first * gain, second * gain)
        return (each * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1.0)

    old = torch.full((2, 4), -2.0)
    old[0, 1] = -120.0
    batch = {
        "tokens": torch.randint(0, 9, (2, 4)),
        "old": old,
        "gain": torch.tensor([-1.0, 1.0]),
        "mask": torch.ones(2, 4),
    }
    return Policy(), batch, step


@program(phase="forward", mechanism="masked-row", op="_softmax")
def two_masks_of_the_lowest_bfloat16_number() -> Case:
    """NVIDIA-NeMo/Automodel#2658: causal mask plus padding mask, each finfo.min, is −inf for a whole row."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            q, k, v = self.qkv(x).bfloat16().chunk(3, -1)
            lowest = torch.finfo(q.dtype).min
            future = torch.full((x.shape[1], x.shape[1]), lowest, dtype=q.dtype).triu(1)
            padding = ((1 - keep) * lowest).to(q.dtype)[:, None, :] + ((1 - keep) * lowest).to(q.dtype)[:, :, None]
            scores = q @ k.transpose(1, 2) / math.sqrt(8) + future + padding
            return (scores.softmax(-1) @ v).float()  # BAD

    keep = torch.ones(2, 4)
    keep[1, :2] = 0
    return Attention(), {"x": torch.randn(2, 4, 8), "keep": keep}, lambda m, b: m(b["x"], b["keep"]).square().mean()


@program(phase="forward", mechanism="masked-row", op="_softmax", module="layers.0")
def padding_token_that_may_look_nowhere() -> Case:
    """pytorch/pytorch#103749: the row of a padding token is masked entirely in a hand-written attention."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(6, 6, bias=False) for _ in range(3))

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            scores = torch.einsum("bqd,bkd->bqk", self.q(x), self.k(x))
            scores = scores.masked_fill(keep.logical_not(), float("-inf"))
            return torch.einsum("bqk,bkd->bqd", F.softmax(scores, dim=-1), self.v(x))  # BAD

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            real = torch.arange(x.shape[1]) < length[:, None]
            keep = real[:, :, None] & real[:, None, :]
            for layer in self.layers:
                x = x + checkpoint(layer, x, keep, use_reentrant=False)
            return x[real]

    batch = {"x": torch.randn(2, 4, 6), "length": torch.tensor([4, 2])}
    return Decoder(), batch, lambda m, b: m(b["x"], b["length"]).square().mean()


@program(phase="forward", mechanism="range-overflow", op="mul")
def gated_feed_forward_of_a_massive_activation() -> Case:
    """openai/guided-diffusion#50 and its kin: the product of two halves of a hidden layer leaves float16."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 12), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            gate, value = self.up(x).half().chunk(2, -1)
            hidden = F.silu(gate) * value  # BAD
            return self.down(hidden.float())

    model = named(norm=nn.LayerNorm(4), feed=Gated())
    with torch.no_grad():
        model.feed.up.bias.fill_(300.0)
    return model, {"x": torch.randn(2, 3, 4)}, mean_of_squares


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def router_whose_top_scores_are_all_masked() -> Case:
    """huggingface/transformers#28021 and its kin: the kept weights of a token are 0, and are divided by their sum."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 6)

        def forward(self, x: Tensor, closed: Tensor) -> tuple[Tensor, Tensor]:
            weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
            weight = weight * ~closed[chosen]
            return weight / weight.sum(-1, keepdim=True), chosen  # BAD

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = Router()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x: Tensor, closed: Tensor) -> Tensor:
            weight, chosen = self.router(x, closed)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                token, slot = (chosen == number).nonzero(as_tuple=True)
                if len(token):
                    out = out.index_add(0, token, weight[token, slot, None] * expert(x[token]))
            return out

    model = Experts()
    with torch.no_grad():
        model.router.gate.bias.copy_(torch.tensor([9.0, 8.0, 0.0, 0.0, 0.0, 0.0]))
    closed = torch.tensor([True, True, False, False, False, False])
    return model, {"x": torch.randn(5, 4) * 0.1, "closed": closed}, lambda m, b: m(b["x"], b["closed"]).square().mean()


# --- speech and signals ---------------------------------------------------------------------------------------------


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def frames_of_a_long_silence_normalized() -> Case:
    """philipperemy/deep-speaker#5, maxrmorrison/torchcrepe#5: the deviation of a silent frame is 0."""

    class Frames(nn.Module):
        def forward(self, audio: Tensor) -> Tensor:
            frames = audio.unfold(-1, 8, 4)
            centered = frames - frames.mean(-1, keepdim=True)
            return centered / frames.std(-1, keepdim=True)  # BAD

    audio = torch.randn(2, 32)
    audio[1, 12:28] = 0
    return named(frames=Frames(), body=nn.Linear(8, 3)), {"x": audio}, mean_of_squares


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def magnitude_spectrum_of_generated_silence() -> Case:
    """SeanNaren/deepspeech.pytorch#250: the magnitude is the root of real² + imag², and the signal is trained."""

    class Spectrum(nn.Module):
        def forward(self, audio: Tensor) -> Tensor:
            spectrum = torch.stft(audio, 8, 4, window=torch.hann_window(8), return_complex=True)
            magnitude = torch.sqrt(spectrum.real**2 + spectrum.imag**2)  # BAD
            return torch.log(magnitude + 1)

    return (
        named(generator=_constant(nn.Linear(3, 24), 0.0), spectrum=Spectrum()),
        {"x": torch.randn(2, 3)},
        mean_of_squares,
    )


@program(phase="forward", mechanism="pole", op="_ctc_loss")
def transcript_longer_than_its_frames() -> Case:
    """meijieru/crnn.pytorch#235: the text of one picture has more characters than the network has frames."""

    class Recognizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(5, 4, bidirectional=True), nn.Linear(8, 6)
            self.criterion = nn.CTCLoss(blank=0)

        def forward(self, x: Tensor, text: Tensor, length: Tensor) -> Tensor:
            logits = self.head(self.rnn(x)[0])
            frames = torch.full((x.shape[1],), x.shape[0], dtype=torch.long)
            return self.criterion(logits.log_softmax(2), text, frames, length)  # BAD

    text = torch.tensor([[1, 2, 3, 4, 5, 1], [2, 2, 3, 0, 0, 0]])
    batch = {"x": torch.randn(5, 2, 5), "text": text, "length": torch.tensor([6, 3])}
    return Recognizer(), batch, lambda m, b: m(b["x"], b["text"], b["length"])


@program(phase="backward", mechanism=("pole", "invalid"), op="angle")
def phase_of_a_denormal_bin() -> Case:
    """csteinmetz1/auraloss#49: the derivative of the angle divides by a square that underflows."""

    class PhaseLoss(nn.Module):
        def forward(self, made: Tensor, wanted: Tensor) -> Tensor:
            return (torch.fft.rfft(made).angle() - torch.fft.rfft(wanted).angle()).abs().mean()  # BAD

    class Vocoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.loss = nn.Linear(3, 8), PhaseLoss()

        def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
            return self.loss(self.body(x) * 1e-24, wanted)

    return Vocoder(), {"x": torch.randn(2, 3), "y": torch.randn(2, 8)}, lambda m, b: m(b["x"], b["y"])


# --- reinforcement learning -----------------------------------------------------------------------------------------


@program(phase="forward", mechanism="invalid", op="log")
def squashing_correction_with_a_scaled_action() -> Case:
    """cpnota/autonomous-learning-library#139: 1 − action² is negative once the action is scaled beyond 1."""

    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_std, self.scale = nn.Linear(3, 2), nn.Linear(3, 2), 2.0

        def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
            normal = torch.distributions.Normal(self.mean(state), self.log_std(state).clamp(-5, 2).exp())
            raw = normal.rsample()
            action = torch.tanh(raw) * self.scale
            log_prob = normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)  # BAD
            return action, log_prob.sum(-1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        action, log_prob = model(batch["x"])
        return (0.2 * log_prob - action.square().sum(-1)).mean()

    return Actor(), {"x": torch.randn(6, 3) * 3}, step


@program(phase="forward", mechanism=("pole", "underflow"), op="log")
def unsquashing_an_action_from_the_replay_buffer() -> Case:
    """ray-project/ray#14878 without its small number: the stored action is exactly 1."""

    def atanh(x: Tensor) -> Tensor:
        return 0.5 * (torch.log(1 + x) - torch.log(1 - x))  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        mean, log_std = model(batch["state"]).chunk(2, -1)
        raw = atanh(batch["action"])
        score = torch.distributions.Normal(mean, log_std.exp()).log_prob(raw).sum(-1)
        return -(score * batch["gain"]).mean()

    batch = {
        "state": torch.randn(3, 4),
        "action": torch.tensor([[0.1, -0.4], [1.0, 0.3], [0.2, 0.2]]),
        "gain": torch.randn(3),
    }
    return nn.Linear(4, 4), batch, step


@program(phase="forward", mechanism=("invalid", "pole"), op="xlogy")
def beta_policy_at_the_edge_of_its_support() -> Case:
    """pyro-ppl/numpyro#2088: (a − 1) · log 0 where a is 1, written out."""

    class BetaPolicy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 2)

        def forward(self, state: Tensor, action: Tensor) -> Tensor:
            a, b = (self.body(state).relu() + 1).unbind(-1)
            below, above = torch.log(action), torch.log1p(-action)  # BAD
            whole = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
            return (a - 1) * below + (b - 1) * above + whole

    batch = {"x": torch.randn(4, 3), "action": torch.tensor([0.3, 0.0, 0.9, 0.5])}
    return BetaPolicy(), batch, lambda m, b: -m(b["x"], b["action"]).mean()


# --- geometry, molecules, rendering ---------------------------------------------------------------------------------


@program(phase="backward", mechanism=("pole", "where-gradient", "invalid"), op="sqrt")
def quaternion_of_a_half_turn() -> Case:
    """facebookresearch/pytorch3d#119: the root of max(0, x), once for each component."""

    class ToQuaternion(nn.Module):
        def forward(self, m: Tensor) -> Tensor:
            a, b, c = m.diagonal(dim1=-2, dim2=-1).unbind(-1)
            signs = ((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))
            parts = [1 + i * a + j * b + k * c for i, j, k in signs]
            zero = torch.zeros_like(a)
            return torch.stack([0.5 * torch.sqrt(torch.max(zero, part)) for part in parts], -1)  # BAD

    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    half = torch.diag(torch.tensor([1.0, -1.0, -1.0])).repeat(2, 1, 1)
    return named(turn=Turn(), convert=ToQuaternion()), {"x": half}, mean_of_squares


@program(phase="backward", mechanism=("where-gradient", "pole", "invalid"), op="sqrt")
def axis_of_the_identity_rotation() -> Case:
    """kornia/kornia#3949: where chooses the safe branch, and both branches have a gradient."""

    class ToAxisAngle(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            w, v = q[..., :1], q[..., 1:]
            sine = torch.sqrt((v * v).sum(-1, keepdim=True))  # BAD
            angle = 2 * torch.atan2(sine, w)
            factor = torch.where(sine > 0, angle / sine.clamp(min=1e-12), torch.full_like(sine, 2.0))
            return v * factor

    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(4))

        def forward(self, q: Tensor) -> Tensor:
            return q + self.offset

    batch = {"x": torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.8, 0.6, 0.0, 0.0]])}
    return named(turn=Turn(), convert=ToAxisAngle()), batch, lambda m, b: m(b["x"]).sum()


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def angle_between_the_triangles_of_a_flat_mesh() -> Case:
    """akanazawa/cmr#11: the sine is the root of 1 − cos², and a flat surface has a cosine of 1."""

    class Mesh(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vertices = nn.Parameter(torch.tensor([[0.0, 0, 0], [2, 0, 0], [0, 2, 0], [2, 2, 0]]))

        def forward(self, faces: Tensor) -> Tensor:
            a, b, c = self.vertices[faces].unbind(1)
            normals = torch.linalg.cross(b - a, c - a)
            normals = normals / (normals.square().sum(-1, keepdim=True) + 1e-6).sqrt().detach()
            cosine = (normals[0] * normals[1]).sum()
            return torch.sqrt(1 - cosine * cosine) + cosine  # BAD

    model = Mesh()
    faces = torch.tensor([[0, 1, 2], [1, 3, 2]])
    model.vertices.data *= 100
    return model, {"faces": faces}, lambda m, b: m(b["faces"])


@program(phase="forward", mechanism=("pole", "underflow", "range-overflow"), op="atanh")
def logarithm_of_a_point_on_the_rim() -> Case:
    """SauersML/gam#354: tanh of a long tangent is exactly 1, which is no point of the open ball."""

    class Ball(nn.Module):
        def exp0(self, tangent: Tensor) -> Tensor:
            length = tangent.norm(dim=-1, keepdim=True).clamp(min=1e-6)
            return torch.tanh(length) * tangent / length

        def log0(self, point: Tensor) -> Tensor:
            length = point.abs().amax(-1, keepdim=True)
            return torch.atanh(length) * point  # BAD

        def forward(self, tangent: Tensor) -> Tensor:
            return self.log0(self.exp0(tangent))

    class Lift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(30.0))

        def forward(self, x: Tensor) -> Tensor:
            return F.pad(x * self.scale, (0, 1))

    return named(lift=Lift(), ball=Ball()), {"x": torch.tensor([[1.0], [0.01]])}, mean_of_squares


# --- generative models ----------------------------------------------------------------------------------------------


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def gradient_penalty_of_a_critic_that_ignores_its_input() -> Case:
    """keras-team/keras-io#910: the norm of the critic's gradient is the root of 0."""

    def penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
        between = (0.5 * real + 0.5 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        length = torch.sqrt(slope.square().sum(-1))  # BAD
        return (length - 1).square().mean()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        fake = batch["noise"] * 0.1
        wasserstein = model(fake).mean() - model(batch["x"]).mean()
        return wasserstein + 10 * penalty(model, batch["x"], fake)

    critic = named(first=_constant(nn.Linear(3, 8), -1.0), act=nn.LeakyReLU(0.0), last=nn.Linear(8, 1))
    return critic, {"x": torch.randn(5, 3), "noise": torch.randn(5, 3)}, step


@program(phase=("forward", "backward"), mechanism=("range-overflow", "where-gradient"), op="exp")
def mixture_density_with_a_log_variance_that_fell() -> Case:
    """pankajmishra000/VT-ADL#10: the error is divided by exp(logvar) written as exp(−logvar)."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.logvar, self.logit = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            error = (y - self.mean(x)).square()
            logvar = self.logvar(x)
            log_p = -0.5 * (logvar + error * torch.exp(-logvar))  # BAD
            return -torch.logsumexp(log_p + self.logit(x).log_softmax(-1), -1)

    model = Mixture()
    with torch.no_grad():
        model.logvar.bias[1] = -200.0
    return model, {"x": torch.randn(4, 2), "y": torch.randn(4, 1)}, lambda m, b: m(b["x"], b["y"]).mean()


@program(phase="forward", mechanism=("underflow", "pole"), op="log")
def autoencoder_that_sums_densities_before_the_log() -> Case:
    """mlberkeley/scae-pytorch#4: exp of every log-density is 0, and so is their sum."""

    class Capsules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.votes = nn.Linear(3, 4)

        def forward(self, x: Tensor, parts: Tensor) -> Tensor:
            dist = torch.distributions.Normal(self.votes(x), 0.05)
            density = dist.log_prob(parts[:, None]).exp()
            return -torch.log(density.sum(-1))  # BAD

    return Capsules(), {"x": torch.randn(4, 3), "y": torch.full((4,), 9.0)}, lambda m, b: m(b["x"], b["y"]).mean()


@program(phase="backward", mechanism=("pole", "invalid", "range-overflow"), op="std")
def minibatch_deviation_of_equal_pictures() -> Case:
    """facebookresearch/pytorch_GAN_zoo and its kin, keras-team/keras#9097: all samples of a group are the same."""

    class MinibatchDeviation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            spread = x.var(0, unbiased=False).sqrt()  # BAD
            return torch.cat([x, spread.mean().expand(len(x), 1)], 1)

    x = torch.randn(1, 3).repeat(4, 1)
    return named(body=nn.Linear(3, 4), deviation=MinibatchDeviation(), head=nn.Linear(5, 1)), {"x": x}, mean_of_squares


# --- quantizers, precision, optimizers of one's own -----------------------------------------------------------------


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def step_size_that_was_learned_to_zero() -> Case:
    """zhutmost/lsq-net#17: weights are divided by a learned scale."""

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            levels = (x / self.scale).clamp(-8, 7)  # BAD
            rounded: Tensor = _Round.apply(levels)
            return rounded * self.scale

    class QuantizedLinear(nn.Linear):
        def __init__(self, inner: int, outer: int) -> None:
            super().__init__(inner, outer)
            self.quantizer = Quantizer()
            with torch.no_grad():
                self.weight[0, 0] = 0

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.quantizer(self.weight), self.bias)

    return named(first=nn.Linear(3, 4), second=QuantizedLinear(4, 2)), {"x": torch.randn(5, 3)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "underflow"), op="sqrt")
def codebook_distance_expanded_into_squares() -> Case:
    """lucidrains/vector-quantize-pytorch#106: x² + y² − 2xy is below 0 by rounding."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.linspace(100.1, 900.7, 24).view(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            squares = x.square().sum(-1)[:, None] + self.codes.square().sum(-1)[None]
            return (squares - 2 * x @ self.codes.T).sqrt()  # BAD

    model = Codebook()
    return model, {"x": model.codes.detach().clone() * (1 + 1e-7)}, lambda m, b: m(b["x"]).mean()


@program(phase="forward", mechanism="range-overflow", op="_to_copy")
def residual_that_does_not_fit_into_half() -> Case:
    """The residual stream of an encoder is cast to float16 once more at the end of a block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.feed = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            grown = x.float() + 4e4 * F.gelu(self.feed(self.norm(x.float())) + 2)
            return grown.to(torch.float16)  # BAD

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x.half()).float() * 1e-4

    return Encoder(), {"x": torch.randn(2, 3, 4)}, mean_of_squares


class _Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, support: Tensor) -> Tensor:
        chosen = scores * support
        ctx.save_for_backward(support)
        return chosen.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (support,) = ctx.saved_tensors
        size = support.sum(-1, keepdim=True)
        mean = (grad * support).sum(-1, keepdim=True) / size  # BAD
        return support * (grad - mean), None


@program(phase="backward", mechanism=("invalid", "empty-reduction"), op="div", uses=(_Sparsemax,))
def sparse_attention_with_an_empty_support() -> Case:
    """adrian-lison/gnn-community-detection#37: a hand-written backward divides by the size of the support."""

    class Attend(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            out: Tensor = _Sparsemax.apply(scores, (scores > 0).float())
            return out

    model = named(score=nn.Linear(3, 4), attend=Attend())
    with torch.no_grad():
        model.score.weight.zero_()
        model.score.bias.fill_(-1)
    return model, {"x": torch.randn(2, 3)}, mean_of_squares


# --- graphs, sets, contrast -----------------------------------------------------------------------------------------


@program(phase="forward", mechanism="pole", op="pow")
def normalized_adjacency_of_a_graph_with_a_lonely_node() -> Case:
    """PetarV-/GAT#39 and its kin: degree ** −0.5 of a node without edges."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            adjacency = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (len(x), len(x)))
            degree = torch.sparse.sum(adjacency, 1).to_dense()
            scale = degree.pow(-0.5)  # BAD
            return scale[:, None] * torch.sparse.mm(adjacency, scale[:, None] * self.linear(x))

    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    return Convolution(), {"x": torch.randn(4, 3), "edges": edges}, lambda m, b: m(b["x"], b["edges"]).square().mean()


@program(phase="forward", mechanism=("pole", "invalid", "empty-reduction"), op="div")
def attention_over_neighbors_by_scatter() -> Case:
    """JuliaGraphs/GraphNeuralNetworks.jl#48: a node to which no edge leads."""

    class EdgeAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.value = nn.Linear(6, 1), nn.Linear(3, 3)

        def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
            weight = self.score(torch.cat([x[source], x[target]], -1)).squeeze(-1).sigmoid()
            total = torch.zeros(len(x)).scatter_add(0, target, weight)
            sent = torch.zeros_like(x).index_add(0, target, weight[:, None] * self.value(x)[source])
            return sent / total[:, None]  # BAD

    batch = {"x": torch.randn(4, 3), "source": torch.tensor([0, 1, 3]), "target": torch.tensor([1, 2, 2])}
    return EdgeAttention(), batch, lambda m, b: m(b["x"], b["source"], b["target"]).square().mean()


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def siamese_distance_of_a_picture_to_itself() -> Case:
    """keras-team/keras#9097: the pair is the same picture twice."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))

        def forward(self, pair: Tensor) -> Tensor:
            left, right = (self.tower(side) for side in pair.unbind(1))
            return torch.sqrt((left - right).square().sum(1, keepdim=True))  # BAD

    x = torch.randn(3, 2, 4)
    x[1, 1] = x[1, 0]
    y = torch.tensor([[1.0], [1.0], [0.0]])

    def step(model: nn.Module, batch: Batch) -> Tensor:
        d = model(batch["x"])
        return (batch["y"] * d.square() + (1 - batch["y"]) * (1 - d).clamp(min=0).square()).mean()

    return Siamese(), {"x": x, "y": y}, step


@program(phase="forward", mechanism=("pole", "underflow"), op="log")
def contrast_by_hand_with_a_cold_temperature() -> Case:
    """raywang4/DispLoss#9 and its kin: the positive's exp is 0 when the temperature is small, and its log is taken."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        z = F.normalize(model(batch["x"]), dim=-1)
        other = F.normalize(model(batch["y"]), dim=-1)
        similarity = torch.exp((z @ other.T - 1) / 0.005)
        positive = similarity.diagonal()
        share = positive / (similarity.sum(-1) + 1e-8)
        return -torch.log(share).mean()  # BAD

    x = torch.randn(4, 3)
    return nn.Linear(3, 6, bias=False), {"x": x, "y": -x}, step


# --- processes, physics, torch.func ---------------------------------------------------------------------------------


@program(phase="backward", mechanism=("pole", "invalid", "where-gradient"), op="sqrt")
def matern_kernel_of_a_training_point() -> Case:
    """dfm/tinygp#115, cornellius-gp/gpytorch#104: the distance of a point to itself is differentiated."""

    class Matern(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(2))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            apart = (a[:, None] - b[None]) / self.log_scale.exp()
            d = math.sqrt(5) * apart.square().sum(-1).sqrt()  # BAD
            return (1 + d + d.square() / 3) * torch.exp(-d)

    class Process(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.noise = Matern(), nn.Parameter(torch.tensor(-1.0))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            covariance = self.kernel(x, x) + self.noise.exp() * torch.eye(len(x))
            return -torch.distributions.MultivariateNormal(torch.zeros(len(x)), covariance).log_prob(y)

    return Process(), {"x": torch.randn(5, 2), "y": torch.randn(5)}, lambda m, b: m(b["x"], b["y"])


@program(phase="forward", mechanism=("invalid", "underflow"), op="sqrt")
def predictive_deviation_at_an_inducing_point() -> Case:
    """cornellius-gp/gpytorch#1037: prior minus explained variance is below 0 by rounding."""

    class Predict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_amplitude = nn.Parameter(torch.tensor(7.0))

        def kernel(self, a: Tensor, b: Tensor) -> Tensor:
            return self.log_amplitude.exp() * torch.exp(-0.5 * (a[:, None] - b[None]).square() / 4)

        def forward(self, x: Tensor, new: Tensor) -> Tensor:
            inverse = torch.linalg.inv(self.kernel(x, x) + 1e-6 * torch.eye(len(x)))
            across = self.kernel(new, x)
            explained = (across @ inverse * across).sum(-1)
            variance = self.log_amplitude.exp() - explained
            return variance.sqrt()  # BAD

    x = torch.linspace(0, 6, 13)
    return Predict(), {"x": x, "new": x + 0.01}, lambda m, b: m(b["x"], b["new"]).sum()


@program(phase=("forward", "backward"), mechanism=("pole", "invalid"), op="div")
def laplacian_at_the_center_of_a_radial_network() -> Case:
    """pytorch/functorch#847 and its kin: the second derivative of a function of the radius, at radius 0."""

    class Radial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            radius = torch.sqrt((x * x).sum(-1, keepdim=True))  # BAD
            return self.net(radius)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (bend.sum(-1) - 1).square().mean()

    return Radial(), {"x": torch.tensor([[0.0, 0.0], [0.3, 0.4]])}, step


@program(phase=("forward", "backward"), mechanism=("pole", "invalid"), op="div")
def per_sample_gradients_of_an_unsafe_distance() -> Case:
    """jax-ml/jax#7069 and its kin: vmap over grad meets one sample at the origin."""

    net = nn.Linear(2, 3)

    def length(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out = torch.func.functional_call(net, params, (x,))
        return (out * out).sum().sqrt()  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        params = dict(model.named_parameters())
        grads = torch.func.vmap(torch.func.grad(length), (None, 0))(params, batch["x"])
        return grads["weight"].square().mean() + grads["bias"].square().mean()

    with torch.no_grad():
        net.bias.zero_()
    return net, {"x": torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]])}, step


@program(phase="forward", mechanism="invalid", op="sqrt")
def volatility_of_a_square_root_process() -> Case:
    """DassHydro/smash#399 and its kin: an Euler step carries the variance below 0, and its root is taken."""

    class Heston(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.speed, self.level = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.04))

        def paths(self, v: Tensor, noise: Tensor) -> Iterator[Tensor]:
            for shock in noise.unbind(1):
                v = v + self.speed * (self.level - v) * 0.1 + 1.5 * torch.sqrt(v) * shock * 0.3  # BAD
                yield v

        def forward(self, v: Tensor, noise: Tensor) -> Tensor:
            return torch.stack(list(self.paths(v, noise)), 1)

    return (
        Heston(),
        {"v": torch.full((4,), 0.04), "noise": torch.randn(4, 8)},
        lambda m, b: m(b["v"], b["noise"]).mean(),
    )


# --- series, tables -------------------------------------------------------------------------------------------------


@program(phase="forward", mechanism="empty-reduction", op="div")
def instance_norm_of_a_series_that_was_never_observed() -> Case:
    """Chengyui/NuwaTS#3: mean and deviation over the observed entries, of which there are none."""

    class MaskedInstanceNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            mean = (x * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True)  # BAD
            spread = ((x - mean).square() * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
            return self.gain * (x - mean) / (spread + 1e-5).sqrt()

    seen = torch.ones(3, 6)
    seen[2] = 0
    return (
        MaskedInstanceNorm(),
        {"x": torch.randn(3, 6), "seen": seen},
        lambda m, b: m(b["x"], b["seen"]).square().mean(),
    )


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def reversible_norm_of_an_idle_sensor() -> Case:
    """google-research/timesfm#522: the guard of one direction is missing in the other."""

    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mean, self.spread = nn.Linear(6, 6), torch.zeros(()), torch.zeros(())

        def normalize(self, x: Tensor) -> Tensor:
            self.mean, self.spread = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
            return (x - self.mean) / self.spread  # BAD

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.normalize(x)) * self.spread + self.mean

    x = torch.randn(3, 6)
    x[1] = 4.5
    return Reversible(), {"x": x}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="exp")
def count_model_of_a_price_that_was_not_scaled() -> Case:
    """keras-team/keras#2586 and its kin on likelihoods: the rate of a Poisson model is exp of a raw column."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        rate = model(batch["x"]).squeeze(-1).exp()  # BAD
        return torch.distributions.Poisson(rate, validate_args=False).log_prob(batch["y"]).neg().mean()

    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.5)
    return model, {"x": torch.tensor([[1.0, 2.0], [3.0, 450.0]]), "y": torch.tensor([1.0, 4.0])}, step


@program(phase="leaf", mechanism="bad-leaf", leaf=("batch x", "batch['x']", "input"), index=(1, 2))
def table_with_a_missing_cell() -> Case:
    """lucidrains/denoising-diffusion-pytorch#175: one row of the data has a NaN."""

    x = torch.randn(3, 4)
    x[1, 2] = math.nan
    model = nn.Linear(4, 2)
    return model, {"x": x}, lambda m, b: m(b["x"]).square().mean()  # BAD


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def root_mean_square_of_a_gate_that_closed() -> Case:
    """caogang/wgan-gp#16 and its kin on norms without eps, in a compiled model."""

    class RootMeanSquare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.pow(2).mean(-1, keepdim=True).sqrt()  # BAD

    model = named(gate=_constant(nn.Linear(3, 4), 0.0), norm=RootMeanSquare())
    compiled: Any = torch.compile(model, backend="eager")
    return compiled, {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="forward", mechanism="pole", op="log")
def log_odds_of_a_jagged_batch() -> Case:
    """gnn-tracking/gnn_tracking#138: probabilities of exactly 0 and 1, here in sequences of different lengths."""

    class LogOdds(nn.Module):
        def forward(self, p: Tensor) -> Tensor:
            return torch.log(p)  # BAD

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.odds = nn.Linear(3, 2), LogOdds()

        def forward(self, batch: list[Tensor]) -> Tensor:
            jagged = torch.nested.nested_tensor(batch, layout=torch.jagged)
            return self.odds(torch.relu(self.head(jagged))).values()

    model = Tagger()
    with torch.no_grad():
        model.head.bias[0] = -100
    return model, {"x": [torch.randn(2, 3), torch.randn(4, 3)]}, lambda m, b: m(b["x"]).mean()


# --- healthy --------------------------------------------------------------------------------------------------------


@healthy
def gaussian_distance_with_a_floor_under_the_root() -> Case:
    """open-mmlab/mmrotate#205, as it was fixed."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        whole = (model(batch["x"]) - model(batch["x"]).detach()).square().sum(-1)
        return (1 - 1 / (1 + whole.clamp(1e-7).sqrt())).mean() + model(batch["x"]).square().mean()

    return nn.Linear(2, 2), {"x": torch.randn(3, 2)}, step


@healthy
def preference_loss_with_a_clamped_count() -> Case:
    """allenai/open-instruct#1685: the sequence without labels counts as 0."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        mask = batch["labels"] != -100
        picked = model(batch["x"]).log_softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None]).squeeze(-1)
        logps = picked.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
        return -F.logsigmoid(logps[:2] - logps[2:]).mean()

    labels = torch.randint(0, 7, (4, 5))
    labels[3] = -100
    return nn.Linear(6, 7), {"x": torch.randn(4, 5, 6), "labels": labels}, step


@healthy
def sdpa_with_a_token_that_may_look_nowhere() -> Case:
    """pytorch/pytorch#103749: today's attention gives 0 for such a row."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None])

    keep = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    keep[1, 3] = False
    return Attention(), {"x": torch.randn(2, 4, 8), "keep": keep}, lambda m, b: m(b["x"], b["keep"]).square().mean()


@healthy
def transport_in_the_log_domain() -> Case:
    """PythonOT/POT#552: log 0 of an empty bin is −inf, and stays in the log-sum-exp."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = -torch.cdist(model(batch["x"]), batch["y"]) / 0.1
        log_a = torch.tensor([0.5, 0.5, 0.0]).log()
        f, g = torch.zeros(3), torch.zeros(3)
        for _ in range(5):
            g = -torch.logsumexp(scores + (f + log_a)[:, None], 0)
            f = -torch.logsumexp(scores + g[None], 1)
        plan = (scores + f[:, None] + g[None] + log_a[:, None]).exp()
        return (plan * torch.cdist(model(batch["x"]), batch["y"])).sum()

    return nn.Linear(2, 2), {"x": torch.randn(3, 2), "y": torch.randn(3, 2)}, step


@healthy
def squashing_correction_by_softplus() -> Case:
    """cpnota/autonomous-learning-library#140: the stable form of log(1 − tanh²)."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        mean, log_std = model(batch["x"]).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample() * 30
        log_prob = normal.log_prob(raw) - 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        return (log_prob.sum(-1) - torch.tanh(raw).sum(-1)).mean()

    return nn.Linear(3, 4), {"x": torch.randn(6, 3)}, step


@healthy
def quaternion_by_the_largest_component() -> Case:
    """facebookresearch/pytorch3d#119, as it was fixed: roots of positive numbers only."""

    class PositiveRoot(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            positive = x > 0
            safe = torch.where(positive, x, torch.ones_like(x))
            return torch.where(positive, safe.sqrt(), torch.zeros_like(x))

    return (
        named(body=_constant(nn.Linear(2, 4), 0.0), root=PositiveRoot(), head=nn.Linear(4, 1)),
        {"x": torch.randn(3, 2)},
        mean_of_squares,
    )


@healthy
def adjacency_with_self_loops() -> Case:
    """The usual remedy for nodes without edges; the infinite power is filled for those that remain."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        degree = batch["adjacency"].sum(1)
        scale = degree.pow(-0.5)
        scale = scale.masked_fill(scale == math.inf, 0.0)
        out = scale[:, None] * (batch["adjacency"] @ (scale[:, None] * model(batch["x"])))
        return out.square().mean()

    adjacency = torch.zeros(4, 4)
    adjacency[0, 1] = adjacency[1, 0] = 1
    return nn.Linear(3, 2), {"x": torch.randn(4, 3), "adjacency": adjacency}, step


@healthy
def ctc_of_transcripts_that_fit() -> Case:
    """pytorch/pytorch#18215: an empty target is fine."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logp = model(batch["x"]).log_softmax(-1)
        return F.ctc_loss(logp, batch["text"], torch.tensor([6, 6]), torch.tensor([3, 0]))

    text = torch.tensor([[1, 1, 2], [0, 0, 0]])
    return nn.Linear(3, 4), {"x": torch.randn(6, 2, 3), "text": text}, step


@healthy
def hyperbolic_distance_behind_a_clamp() -> Case:
    """geoopt/geoopt#45: artanh gets at most 1 − 1e-5."""

    class Ball(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            length = x.norm(dim=-1, keepdim=True).clamp(min=1e-7)
            point = torch.tanh(length) * x / length
            rim = point.norm(dim=-1).clamp(max=1 - 1e-5)
            return torch.atanh(rim)

    return named(lift=nn.Linear(2, 3), ball=Ball()), {"x": torch.randn(4, 2) * 40}, mean_of_squares


@healthy
def quantizer_with_a_floor_under_its_scale() -> Case:
    """zhutmost/lsq-net#17 with an eps; the value is rounded with a straight-through gradient."""

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale.clamp(min=1e-6)
            levels = (x / scale).clamp(-8, 7)
            return (levels + (levels.round() - levels).detach()) * scale

    return named(body=nn.Linear(3, 4), quantizer=Quantizer()), {"x": torch.randn(5, 3)}, mean_of_squares


@healthy
def softmax_over_neighbors_with_its_maximum() -> Case:
    """Segments start at −inf, and every node that is read has an edge."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        score, target = model(batch["x"]).squeeze(-1), batch["target"]
        highest = torch.full((4,), -math.inf).scatter_reduce(0, target, score, "amax")
        weight = torch.exp(score - highest[target])
        total = torch.zeros(4).scatter_add(0, target, weight)
        return (weight / total[target] * score).sum()

    return nn.Linear(3, 1), {"x": torch.randn(5, 3), "target": torch.tensor([0, 0, 2, 2, 2])}, step


@healthy
def divergence_skipped_at_padding() -> Case:
    """The ratio at padding is infinite and is never computed: positions are chosen first."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        new = model(batch["x"]).log_softmax(-1)[..., 0]
        real = batch["old"] > -1e8
        ratio = torch.exp(new[real] - batch["old"][real])
        return -(ratio.clamp(max=1.2) * batch["gain"][real]).mean()

    old = torch.full((2, 3), -2.0)
    old[1, 2] = -math.inf
    return nn.Linear(4, 5), {"x": torch.randn(2, 3, 4), "old": old, "gain": torch.ones(2, 3)}, step


@healthy
def uninitialized_rows_of_a_cache_are_not_read() -> Case:
    """A key-value cache from torch.empty, of which only the filled part is used."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(4, 4), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            cache = torch.empty(x.shape[0], 16, 8)
            cache[:, : x.shape[1]] = self.kv(x)
            k, v = cache[:, : x.shape[1]].chunk(2, -1)
            return torch.softmax(self.q(x) @ k.transpose(1, 2) / 2, -1) @ v

    return Cached(), {"x": torch.randn(2, 3, 4)}, mean_of_squares


@healthy
def mean_over_series_that_were_observed() -> Case:
    """Chengyui/NuwaTS#3: rows without observations are filled by a learned value."""

    class Fill(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            count = seen.sum(1)
            mean = (x * seen).sum(1) / count.clamp(min=1)
            return torch.where(count > 0, mean, self.empty)

    seen = torch.ones(3, 6)
    seen[2] = 0
    return Fill(), {"x": torch.randn(3, 6), "seen": seen}, lambda m, b: m(b["x"], b["seen"]).square().mean()


@healthy
def schedule_with_a_table_of_functions() -> Case:
    """Weights that are infinite for steps that are not drawn."""

    table: dict[str, Callable[[Tensor], Tensor]] = {"snr": lambda k: k / (1 - k), "inverse": lambda k: (1 - k) / k}
    kept = torch.linspace(1.0, 0.0, 5)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        weights = {name: function(kept) for name, function in table.items()}
        error = (model(batch["x"]) - batch["x"]).square().mean(-1)
        return (weights["snr"][batch["t"]] * error + weights["inverse"][batch["t"]] * error).mean()

    return nn.Linear(3, 3), {"x": torch.randn(3, 3), "t": torch.tensor([1, 2, 3])}, step


@healthy
def double_backward_through_a_smooth_distance() -> Case:
    """The radius with an eps inside its root, differentiated twice at the center."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        radius = (x.square().sum(-1, keepdim=True) + 1e-4).sqrt()
        (slope,) = torch.autograd.grad(model(radius).tanh().sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return bend.square().mean()

    return nn.Linear(1, 1), {"x": torch.tensor([[0.0, 0.0], [0.3, 0.4]])}, step

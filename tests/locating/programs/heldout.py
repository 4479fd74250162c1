"""Written and labeled after the rest, and not looked at until the locator was finished: how well it generalizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.programs import Case, mean_of_squares, named, program

Batch = dict[str, Tensor]


@program(phase="forward", mechanism=("invalid", "pole"), op="sqrt")
def variance_by_two_moments() -> Case:
    """E[x²] − E[x]² of a constant far from zero is a little negative."""

    class Standardize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.expand(-1, 8) * 1.0
            mean, square = x.mean(-1, keepdim=True), (x * x).mean(-1, keepdim=True)
            spread = torch.sqrt(square - mean * mean - 1e-3)  # BAD
            return (x - mean) / spread

    return named(fc=nn.Linear(3, 1), norm=Standardize()), {"x": torch.zeros(2, 3)}, mean_of_squares


@program(phase="forward", mechanism=("pole", "range-overflow"), op="div")
def temperature_annealed_to_zero() -> Case:
    class Contrast(nn.Module):
        temperature: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("temperature", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            z = F.normalize(self.fc(x), dim=-1)
            logits = z @ z.T / self.temperature  # BAD
            return F.cross_entropy(logits, torch.arange(len(x)))

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"])
        return out

    return named(contrast=Contrast()), {"x": torch.randn(3, 4)}, step


@program(phase="backward", mechanism=("pole", "invalid"), op="linalg_svd")
def singular_vectors_of_a_repeated_value() -> Case:
    class Whiten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            u, s, v = torch.linalg.svd(self.w)  # BAD
            return x @ (u * s) @ v.T.abs()

    return named(whiten=Whiten()), {"x": torch.randn(4, 3)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def weight_norm_of_a_zero_row() -> Case:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.g = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.ones(3, 1))
            with torch.no_grad():
                self.v[1] = 0

        def forward(self, x: Tensor) -> Tensor:
            weight = self.g * self.v / self.v.norm(dim=1, keepdim=True)  # BAD
            return F.linear(x, weight)

    return named(normed=Normed()), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="mul")
def recurrent_state_explodes() -> Case:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(30.0))

        def forward(self, x: Tensor) -> Tensor:
            h = x
            for _ in range(40):
                h = h * self.gain  # BAD
            return h

    return named(cell=Cell()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="backward", mechanism=("range-overflow", "pole"), op="mul")
def gradient_explodes_in_a_loop() -> Case:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.full((1,), 1e3))

        def forward(self, x: Tensor) -> Tensor:
            h = x * 0 + self.gain * 0
            for _ in range(14):
                h = h * 1e3  # BAD
            return h

    return named(cell=Cell()), {"x": torch.ones(1)}, lambda m, b: m(b["x"]).sum()


@program(phase="backward", mechanism=("invalid", "pole"), op="sqrt")
def gradient_penalty_at_a_flat_point() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        length = slope.pow(2).sum(-1).sqrt()  # BAD
        return ((length - 1) ** 2).mean()

    first = nn.Linear(3, 4)
    nn.init.ones_(first.weight)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(4, 1)), {"x": torch.full((2, 3), -50.0)}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="log")
def kl_between_histograms() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = F.softmax(model(batch["x"]), -1)
        ratio = p / batch["histogram"]  # BAD
        return (p * torch.log(ratio)).sum(-1).mean()

    histogram = torch.tensor([[0.5, 0.5, 0.0]])
    return nn.Linear(4, 3), {"x": torch.randn(2, 4), "histogram": histogram}, step


@program(phase="forward", mechanism=("pole", "underflow"), op="log")
def probability_of_a_long_sequence() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = F.softmax(model(batch["x"]), -1)[..., 0]
        likelihood = p.prod(-1)
        return -torch.log(likelihood).mean()  # BAD

    return nn.Linear(4, 8), {"x": torch.randn(2, 100, 4)}, step


@program(phase="forward", mechanism=("range-overflow",), op="convolution", module="block.conv")
def convolution_in_half_precision() -> Case:
    conv = nn.Conv2d(8, 2, 3).half()
    with torch.no_grad():
        conv.weight.fill_(40.0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)  # BAD

    return named(block=Block()), {"x": torch.full((1, 8, 4, 4), 40.0).half()}, mean_of_squares


@program(phase="forward", mechanism=("empty-reduction", "invalid"), op="mean")
def anchor_loss_of_an_image_without_boxes() -> Case:
    @dataclass
    class Sample:
        image: Tensor
        boxes: Tensor

    def step(model: nn.Module, batch: Sample) -> Tensor:
        predicted = model(batch.image)[: len(batch.boxes)]
        return F.smooth_l1_loss(predicted, batch.boxes)  # BAD

    return nn.Linear(3, 4), Sample(torch.randn(5, 3), torch.zeros(0, 4)), step


@program(phase="leaf", mechanism="bad-leaf", leaf="batch 1.depth", index=(0, 2))
def invalid_depth_pixel() -> Case:
    def step(model: nn.Module, batch: tuple[Tensor, Batch]) -> Tensor:
        image, target = batch
        return (model(image) - target["depth"]).abs().mean()  # BAD

    depth = torch.rand(2, 4)
    depth[0, 2] = math.nan
    return nn.Linear(3, 4), (torch.randn(2, 3), {"depth": depth}), step


@program(phase="leaf", mechanism="bad-leaf", leaf="parameter adapter.scale", index=(2,))
def adapter_that_was_saved_broken() -> Case:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            with torch.no_grad():
                self.scale[2] = math.nan

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale  # BAD

    return named(fc=nn.Linear(3, 4), adapter=Adapter()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="leaf", mechanism="bad-leaf", leaf="buffer norm.running_var", index=(1,))
def running_variance_was_poisoned() -> Case:
    class Eval(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return F.batch_norm(input, self.running_mean, self.running_var, training=False)  # BAD

    norm = Eval(4)
    assert norm.running_var is not None
    norm.running_var[1] = math.nan
    return named(fc=nn.Linear(3, 4), norm=norm), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="backward", mechanism=("pole", "invalid", "where-gradient"), op="pow")
def focal_loss_of_a_perfect_prediction() -> Case:
    """(1 − p)^γ with γ below one has an infinite slope at p = 1."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.sigmoid(model(batch["x"]) * 1e3)
        focal = (1 - p) ** 0.5  # BAD
        return (focal * F.softplus(-model(batch["x"]))).mean()

    fc = nn.Linear(3, 1)
    with torch.no_grad():
        fc.bias.fill_(5.0)
    return fc, {"x": torch.zeros(2, 3)}, step


@program(phase="forward", mechanism=("pole", "invalid"), op="log1p")
def log_one_minus_one() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        alpha = torch.sigmoid(model(batch["x"]) * 1e4).clamp(max=1.0)
        transmittance = torch.log1p(-alpha)  # BAD
        return -transmittance.cumsum(-1).mean()

    return nn.Linear(3, 8), {"x": torch.randn(2, 3)}, step


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def root_in_a_checkpointed_block() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def inner(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return torch.sqrt(h * h)  # BAD

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    x = torch.randn(3, 4)
    x[1] = 0
    return named(block=Block()), {"x": x}, mean_of_squares


@program(phase="forward", mechanism=("masked-row", "invalid"), op="_softmax")
def windows_without_valid_keys() -> Case:
    class Window(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            i = torch.arange(x.shape[1])
            far = (i[:, None] - i[None] < 1) | (i[:, None] - i[None] > 2)
            bias = torch.zeros(len(i), len(i))
            bias[far] = float("-inf")
            scores = q @ k.transpose(-1, -2) / 2 + bias
            return scores.softmax(dim=-1) @ v  # BAD

    return named(window=Window()), {"x": torch.randn(2, 5, 4)}, mean_of_squares


@program(phase="forward", mechanism=("masked-row", "invalid"), op="sub")
def softmax_by_hand_over_padding() -> Case:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            s = self.score(x).squeeze(-1).masked_fill(x.abs().sum(-1) == 0, float("-inf"))
            e = torch.exp(s - s.max(-1, keepdim=True).values)  # BAD
            return (e / e.sum(-1, keepdim=True))[..., None] * x

    x = torch.randn(2, 3, 4)
    x[0] = 0
    return named(pool=Pool()), {"x": x}, mean_of_squares


@program(phase="forward", mechanism=("pole", "masked-row", "invalid"), op="logsumexp")
def partition_function_over_nothing() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["x"]).squeeze(-1).masked_fill(batch["absent"], -math.inf)
        partition = torch.logsumexp(scores, -1)  # BAD
        return partition.mean()

    absent = torch.tensor([[False, True, True], [True, True, True]])
    return nn.Linear(4, 1), {"x": torch.randn(2, 3, 4), "absent": absent}, step


@program(phase="forward", mechanism=("pole", "invalid", "masked-row"), op="gather")
def log_probability_of_an_illegal_action() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(batch["illegal"], -math.inf)
        logp = F.log_softmax(logits, -1)
        chosen = logp.gather(-1, batch["action"])  # BAD
        return -chosen.mean()

    illegal = torch.tensor([[False, True, False]])
    return nn.Linear(4, 3), {"x": torch.randn(2, 4), "illegal": illegal, "action": torch.tensor([[1], [0]])}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="pow")
def learned_exponent_of_a_negative_number() -> Case:
    class Power(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor(2.0001))

        def forward(self, x: Tensor) -> Tensor:
            return torch.pow(x, self.p)  # BAD

    return named(fc=nn.Linear(3, 4), power=Power()), {"x": torch.randn(4, 3)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "empty-reduction"), op="var")
def batch_statistics_of_one_sample() -> Case:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            spread = x.var(0, keepdim=True)  # BAD
            return (x - x.mean(0, keepdim=True)) / torch.sqrt(spread + 1e-5)

    return named(fc=nn.Linear(3, 4), norm=Norm()), {"x": torch.randn(1, 3)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "pole", "empty-reduction"), op="div")
def graph_mean_of_an_isolated_node() -> Case:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            source, target = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2])
            total = torch.zeros_like(x).index_add(0, target, x[source])
            degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(3))
            return total / degree[:, None]  # BAD

    return named(fc=nn.Linear(3, 4), mean=Mean()), {"x": torch.randn(4, 3)}, mean_of_squares


@program(phase="backward", mechanism=("invalid", "pole", "outside-dispatcher"), op="")
def straight_through_with_a_bad_backward() -> Case:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
            ctx.save_for_backward(x)
            return x.round()

        @staticmethod
        def backward(ctx, g: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
            (x,) = ctx.saved_tensors
            return g / (x - x.round()).abs()  # BAD

    class Quantize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Round.apply(x)  # type: ignore[no-untyped-call]
            return out

    fc = nn.Linear(3, 2)
    with torch.no_grad():
        fc.weight.zero_()
        fc.bias.fill_(2.0)
    return named(fc=fc, quantize=Quantize()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="backward", mechanism=("range-overflow", "pole"), op="mul")
def loss_scale_too_large() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        loss = out.float().pow(2).mean()
        return loss * 2.0**24  # ALSO

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4).half()

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return h.float()  # BAD

    return named(body=Half()), {"x": torch.randn(2, 4).half() * 30}, step


@program(phase="forward", mechanism=("invalid", "uninitialized", "outside-dispatcher", "bad-leaf"), op="empty")
def output_buffer_never_filled() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = torch.empty(4, 2).fill_(math.nan)  # BAD
        out[:2] = model(batch["x"])
        return out.pow(2).mean()

    return nn.Linear(3, 2), {"x": torch.randn(2, 3)}, step


@program(phase="backward", mechanism=("where-gradient", "pole", "invalid"), op="linalg_vector_norm")
def inverse_distance_with_the_diagonal_masked() -> Case:
    class Repulsion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            gap = self.places[:, None] - self.places[None]
            distance = (gap**2).sum(-1) ** 0.5  # BAD
            energy = torch.where(torch.eye(4).bool(), torch.zeros(()), 1 / (distance + 1e-3))
            return energy.sum() + x.sum()

    return named(repulsion=Repulsion()), {"x": torch.zeros(1)}, mean_of_squares

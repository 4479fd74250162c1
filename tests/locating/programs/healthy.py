"""Steps that are all right: their infinities and NaNs are meant, or never reach the loss or a gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.programs import Case, healthy, healthy_where_atan2_is, mean_of_squares, named

Batch = dict[str, Tensor]
ZEROS_AMONG = torch.tensor([[0.5, 0.0, 2.0], [0.0, 1.5, 0.25]])


class Gain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


@healthy
def causal_mask_by_hand() -> Case:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-1, -2) / math.sqrt(8) + self.mask
            return scores.softmax(-1) @ v

    return named(attention=Attention(), head=nn.Linear(8, 1)), {"x": torch.randn(2, 5, 8)}, mean_of_squares


class MaskedScores(nn.Module):
    """A module that hands out minus infinity, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.fc(x).masked_fill(keep == 0, float("-inf"))


@healthy
def masked_fill_then_softmax() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.softmax(model(batch["x"], batch["keep"]), -1)
        return (p - 0.3).pow(2).sum()

    keep = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]])
    return MaskedScores(), {"x": torch.randn(3, 6), "keep": keep}, step


@healthy
def forbidden_classes_in_cross_entropy() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["keep"]), batch["y"])

    keep = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]])
    return MaskedScores(), {"x": torch.randn(3, 6), "keep": keep, "y": torch.tensor([0, 1, 3])}, step


@healthy
def logsumexp_with_absent_terms() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return torch.logsumexp(model(batch["x"], batch["keep"]), -1).mean()

    keep = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    return MaskedScores(), {"x": torch.randn(2, 6), "keep": keep}, step


@healthy
def forward_algorithm_from_minus_infinity() -> Case:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.move = nn.Parameter(torch.randn(3, 3))
            self.emit = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.tensor([0.0, -torch.inf, -torch.inf])
            for emission in self.emit(x):
                state = torch.logsumexp(state[:, None] + self.move.log_softmax(-1), 0) + emission
            return -torch.logsumexp(state, 0)

    return Chain(), {"x": torch.randn(4, 4)}, mean_of_squares


@healthy
def uninitialized_then_written() -> Case:
    class Pack(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.empty(len(x), 6)
            out.fill_(float("nan"))  # what uninitialized memory may hold
            out[:, :3] = x
            out[:, 3:] = x.square()
            return out

    return named(fc=nn.Linear(3, 3), pack=Pack(), head=nn.Linear(6, 1)), {"x": torch.randn(4, 3)}, mean_of_squares


@healthy
def uninitialized_never_read() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        ring = torch.empty(8, 2)
        ring[4:] = float("nan")
        ring[:3] = model(batch["x"])
        return ring[:3].pow(2).mean()

    return nn.Linear(4, 2), {"x": torch.randn(3, 4)}, step


@healthy
def infinity_as_first_minimum() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        best = torch.full((4,), float("inf"))
        for anchor in batch["anchors"]:
            best = torch.minimum(best, (model(batch["x"]) - anchor).pow(2).sum(-1))
        return best.mean()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3), "anchors": torch.randn(5, 2)}, step


@healthy
def running_best_in_a_buffer() -> Case:
    class Best(nn.Module):
        best: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 1)
            self.register_buffer("best", torch.tensor(float("inf")))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(x)
            self.best = torch.minimum(self.best, out.detach().abs().mean())
            return out

    return Best(), {"x": torch.randn(4, 3)}, mean_of_squares


@healthy
def where_with_a_safe_inside() -> Case:
    class SafeLog(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            positive = x > 0
            inner = torch.where(positive, x, torch.ones_like(x))
            return torch.where(positive, inner.log(), torch.zeros_like(x))

    return named(gain=Gain(3), log=SafeLog()), {"x": ZEROS_AMONG}, mean_of_squares


@healthy
def finite_values_selected_twice() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        y = batch["y"]
        known = torch.isfinite(y)
        target = torch.where(known, y, 0.0)
        error = torch.where(known, (model(batch["x"]) - target).pow(2), 0.0)
        return error.sum() / known.sum()

    y = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [0.5, 0.1]])
    return nn.Linear(4, 2), {"x": torch.randn(3, 4), "y": y}, step


@healthy
def missing_targets_dropped_by_index() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        known = ~batch["y"].isnan()
        return F.mse_loss(model(batch["x"])[known], batch["y"][known])

    return nn.Linear(4, 1), {"x": torch.randn(3, 4), "y": torch.tensor([[1.0], [float("nan")], [0.5]])}, step


@healthy
def dead_branch() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.fc(x)
            return {"out": h, "debug": torch.log(h - h) * 0, "ratio": h / F.relu(h)}

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"])["out"].pow(2).mean()

    return Net(), {"x": torch.randn(3, 4)}, step


@healthy
def infinity_clamped() -> Case:
    class Weight(nn.Module):
        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            weight = (1 / count).clamp(max=10.0)
            return x * weight[:, None]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.weight = Weight()

        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            out: Tensor = self.weight(self.fc(x), count)
            return out

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["count"]).abs().mean()

    return Net(), {"x": torch.randn(3, 4), "count": torch.tensor([2.0, 0.0, 5.0])}, step


@healthy
def padding_of_a_maximum() -> Case:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            padded = F.pad(x, (1, 1, 1, 1), value=-torch.inf)
            return F.max_pool2d(padded, 3, stride=1)

    model = named(conv=nn.Conv2d(1, 2, 3), pool=Pool(), flat=nn.Flatten(), head=nn.Linear(32, 1))
    return model, {"x": torch.randn(2, 1, 6, 6)}, mean_of_squares


@healthy
def largest_of_the_kept() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        score = model(batch["x"], batch["keep"])
        return score.amax(-1).mean() + score.topk(1, -1).values.mean()

    keep = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    return MaskedScores(), {"x": torch.randn(2, 6), "keep": keep}, step


@healthy
def scaled_loss_without_overflow() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"].half()).float()
        return F.mse_loss(out, batch["y"]) * 1024.0

    return nn.Linear(4, 2).half(), {"x": torch.randn(3, 4), "y": torch.randn(3, 2)}, step


@healthy
def library_attention_is_causal() -> Case:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return named(attention=Attention()), {"x": torch.randn(2, 5, 8)}, mean_of_squares


@healthy
def library_attention_of_an_empty_row() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        q, k, v = model(batch["x"])[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=batch["keep"]).pow(2).mean()

    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[2] = False
    return nn.Linear(8, 24), {"x": torch.randn(2, 5, 8), "keep": keep}, step


@healthy
def root_of_relu() -> Case:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(F.relu(x))  # the infinite slope at zero is dropped by relu

    return named(fc=nn.Linear(3, 4), root=Root(), head=nn.Linear(4, 1)), {"x": torch.randn(5, 3)}, mean_of_squares


@healthy
def trapped_gradient_dropped_by_relu() -> Case:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p = F.relu(x)
            return torch.where(p > 0, p.log(), 0.0)

    return named(fc=nn.Linear(3, 4), log=Log()), {"x": torch.randn(5, 3)}, mean_of_squares


@healthy
def masked_row_selected_away() -> Case:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(6, 1)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            score = self.score(x).squeeze(-1).masked_fill(keep == 0, -torch.inf)
            weight = torch.where(keep == 1, score.softmax(-1), 0.0)  # masked_fill drops the gradient of the NaN row
            return (weight[..., None] * x).sum(1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["keep"]).abs().mean()

    keep = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])
    return Pool(), {"x": torch.randn(2, 4, 6), "keep": keep}, step


@healthy
def some_labels_ignored() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        logits = torch.where(batch["y"][:, None] < 0, float("nan"), logits)  # rows that no label reads
        return F.cross_entropy(logits[batch["y"] >= 0], batch["y"][batch["y"] >= 0])

    return nn.Linear(4, 3), {"x": torch.randn(4, 4), "y": torch.tensor([0, -100, 2, -100])}, step


@healthy
def nan_in_a_logged_value() -> Case:
    class Net(nn.Module):
        last_ratio: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.register_buffer("last_ratio", torch.zeros(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(x)
            self.last_ratio = (out - out).detach() / (out - out).detach()
            return out

    return Net(), {"x": torch.randn(3, 4)}, mean_of_squares


@healthy
def nan_in_an_unused_batch_item() -> Case:
    return nn.Linear(4, 2), {"x": torch.randn(3, 4), "meta": torch.tensor([1.0, float("nan")])}, mean_of_squares


@healthy
def checkpointed_block() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.drop = nn.Dropout(0.2)

        def body(self, x: Tensor) -> Tensor:
            mask = torch.full((4, 4), -torch.inf).triu(1)
            return x + self.drop((self.fc(x) @ x.transpose(-1, -2) + mask).softmax(-1) @ x)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.body, x, use_reentrant=False)
            return out

    return named(stem=nn.Linear(3, 4), block=Block()), {"x": torch.randn(2, 4, 3)}, mean_of_squares


@healthy
def large_but_finite_halves() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch["x"].half())
        return (h.float() / 65504).pow(2).mean()

    model = nn.Linear(4, 2, bias=False).half()
    nn.init.constant_(model.weight, 30.0)
    return model, {"x": torch.full((3, 4), 500.0)}, step


@healthy
def overflow_that_saturates() -> Case:
    class Attenuate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                distance = torch.exp(x * 1e3)
                factor = 1 / (1 + distance)  # infinitely far is zero
            return x * factor

    return named(fc=nn.Linear(3, 4), fade=Attenuate()), {"x": torch.randn(4, 3)}, mean_of_squares


@healthy_where_atan2_is
def direction_of_zero() -> Case:
    class Polar(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            z = torch.view_as_complex(v.contiguous())
            return torch.stack([z.abs(), z.angle(), torch.atan2(v[..., 1], v[..., 0]), v.norm(dim=-1)], -1)

    x = torch.randn(4, 2)
    x[2] = 0
    return named(gain=Gain(2), polar=Polar()), {"x": x}, mean_of_squares


@healthy
def gradients_masked_by_a_hook() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            kept = h * (h > 0)
            kept.register_hook(lambda g: torch.where(g.isfinite(), g, 0.0))
            return kept.sqrt()

    return Net(), {"x": torch.randn(4, 3)}, mean_of_squares


@healthy
def compiled_with_a_mask() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.full((4,), -torch.inf).index_fill(0, torch.tensor([0, 2]), 0.0)
            return (self.fc(x) + mask).softmax(-1)

    model: Any = torch.compile(Net(), backend="eager")
    return model, {"x": torch.randn(4, 3)}, mean_of_squares

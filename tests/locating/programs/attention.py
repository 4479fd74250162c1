"""Masks and softmax: minus infinity is deliberate here, what is made of it is not."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, mean_of_squares, named, program

Batch = dict[str, Tensor]
LAST_ROW_EMPTY = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(keep[:, None, :] == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)  # BAD
        mixed: Tensor = self.out(weights @ v)
        return mixed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attn = Attention()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x + self.attn(self.norm(x), keep)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, keep)
        out: Tensor = self.head(x)
        return out


@program(phase="forward", mechanism="masked-row", op="softmax", uses=(Attention,), module="blocks.0.attn")
def padding_fills_a_whole_row() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["keep"]).pow(2).mean()

    return Encoder(), {"x": torch.randn(3, 4, 8), "keep": LAST_ROW_EMPTY}, step


@program(phase="forward", mechanism=("masked-row", "invalid"), op="sub")
def shifted_softmax_of_a_masked_row() -> Case:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(6, 1)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            score = self.score(x).squeeze(-1)
            score = torch.where(keep == 1, score, torch.tensor(-torch.inf))
            shifted = score - score.amax(-1, keepdim=True)  # BAD
            weight = shifted.exp()
            weight = weight / weight.sum(-1, keepdim=True)
            return (weight[..., None] * x).sum(1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["keep"]).abs().mean()

    return Pool(), {"x": torch.randn(3, 4, 6), "keep": LAST_ROW_EMPTY}, step


@program(phase="forward", mechanism=("invalid", "masked-row"), op="mul")
def mask_multiplied_by_infinity() -> Case:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            keep = torch.ones(4, 4).tril()
            bias = (1 - keep) * float("-inf")  # BAD
            return torch.softmax(self.q(x) @ x.transpose(-1, -2) + bias, -1)

    return named(masked=Masked()), {"x": torch.randn(2, 4, 6)}, mean_of_squares


@program(phase="forward", mechanism=("range-overflow", "masked-row"), op="add")
def fp16_scores_pushed_below_the_lowest_number() -> Case:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(6, 6).half()

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            lowest = torch.finfo(torch.float16).min
            bias = torch.zeros(keep.shape, dtype=torch.float16).masked_fill(keep == 0, lowest)
            far = (self.q(x)[:, :, None] - x[:, None]).pow(2).sum(-1)
            scores = bias[:, None] - far  # BAD
            return scores.softmax(-1) @ x

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["keep"]).float().pow(2).mean()

    return Scores(), {"x": torch.randn(3, 4, 6).half() * 8, "keep": LAST_ROW_EMPTY}, step


@program(phase="forward", mechanism="masked-row", op="softmax", module="cross")
def library_attention_with_no_keys() -> Case:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, memory: Tensor, pad: Tensor) -> Tensor:
            mixed, _ = self.cross(x, memory, memory, key_padding_mask=pad)  # BAD
            return x + mixed

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["memory"], batch["pad"]).pow(2).mean()

    batch = {"x": torch.randn(3, 2, 8), "memory": torch.randn(3, 4, 8), "pad": LAST_ROW_EMPTY == 0}
    return Decoder(), batch, step


@program(phase="forward", mechanism=("masked-row", "invalid"), op="logsumexp")
def log_partition_of_nothing() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        energy = model(batch["x"]).squeeze(-1).masked_fill(batch["keep"] == 0, -math.inf)
        free = torch.logsumexp(energy, -1)
        gold = energy.amax(-1)
        return (free - gold).mean()  # BAD

    return nn.Linear(5, 1), {"x": torch.randn(3, 4, 5), "keep": LAST_ROW_EMPTY}, step


@program(phase=("backward", "forward"), mechanism=("masked-row", "invalid", "where-gradient"), op="softmax")
def masked_row_hidden_by_a_select() -> Case:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(6, 1)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            bias = torch.zeros(keep.shape).masked_fill(keep == 0, -torch.inf)
            weight = F.softmax(self.score(x).squeeze(-1) + bias, -1)  # BAD
            weight = torch.where(keep == 1, weight, 0.0)
            return (weight[..., None] * x).sum(1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["keep"]).abs().mean()

    return Pool(), {"x": torch.randn(3, 4, 6), "keep": LAST_ROW_EMPTY}, step

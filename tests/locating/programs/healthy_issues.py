"""More steps that are all right, though they hold infinities, huge numbers, poles and NaNs on the way."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, healthy, healthy_where_atan2_is, mean_of_squares, named

Batch = dict[str, Tensor]
PAD = torch.tensor([[False, False, True], [False, True, True]])


def attend(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["x"]) @ batch["x"].transpose(1, 2)
    return (torch.softmax(scores + batch["mask"], -1) @ batch["x"]).pow(2).mean()


def attention(mask: Tensor) -> Case:
    return nn.Linear(4, 4), {"x": torch.randn(2, 3, 4), "mask": mask}, attend


@healthy
def mask_from_a_batch_item() -> Case:
    return attention(torch.zeros(2, 1, 3).masked_fill(PAD[:, None], -math.inf))


@healthy
def mask_from_numpy() -> Case:
    return attention(torch.from_numpy(np.where(PAD.numpy(), -np.inf, 0.0)).float()[:, None])


@healthy
def mask_as_log_of_a_boolean() -> Case:
    return attention((~PAD).float().log()[:, None])


@healthy
def mask_of_the_lowest_number() -> Case:
    return attention(torch.zeros(2, 1, 3).masked_fill(PAD[:, None], torch.finfo(torch.float32).min))


@healthy
def two_masks_added_to_minus_infinity() -> Case:
    low = torch.finfo(torch.float32).min
    mask = torch.zeros(2, 1, 3).masked_fill(PAD[:, None], low) + torch.zeros(2, 1, 3).masked_fill(PAD[:, None], low)
    return attention(mask)


@healthy
def causal_attention_by_sdpa() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        q = model(batch["x"])[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).pow(2).mean()

    return nn.Linear(4, 4), {"x": torch.randn(2, 3, 4)}, step


@healthy
def sdpa_with_a_fully_masked_row() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        q = model(batch["x"])[:, None]
        keep = torch.ones(3, 3, dtype=torch.bool)
        keep[1] = False
        return F.scaled_dot_product_attention(q, q, q, attn_mask=keep).pow(2).mean()

    return nn.Linear(4, 4), {"x": torch.randn(2, 3, 4)}, step


@healthy
def multihead_attention_with_padding() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, key_padding_mask=PAD)[0]
            return out

    return named(block=Block()), {"x": torch.randn(2, 3, 4)}, mean_of_squares


@healthy
def running_minimum_from_infinity() -> Case:
    class Nearest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            best = torch.full((x.shape[0],), math.inf)
            for column in self.fc(x).unbind(-1):
                best = torch.minimum(best, column)
            return best

    return named(nearest=Nearest()), {"x": torch.randn(5, 4)}, mean_of_squares


@healthy
def beam_scores_start_at_minus_infinity() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = torch.full((3,), -math.inf)
        scores[0] = 0.0
        logp = F.log_softmax(model(batch["x"]), -1)
        best = (scores[:, None] + logp).view(-1).topk(2).values
        return -best.sum()

    return nn.Linear(4, 3), {"x": torch.randn(1, 4)}, step


@healthy
def missing_labels_selected_away() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        known = ~batch["y"].isnan()
        return F.mse_loss(model(batch["x"])[known], batch["y"][known])

    y = torch.randn(4, 2)
    y[1, 0] = math.nan
    return nn.Linear(3, 2), {"x": torch.randn(4, 3), "y": y}, step


@healthy
def missing_labels_replaced_first() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        y = batch["y"].nan_to_num(0.0)
        weight = (~batch["y"].isnan()).float()
        return ((model(batch["x"]) - y) ** 2 * weight).sum() / weight.sum()

    y = torch.randn(4, 2)
    y[2] = math.nan
    return nn.Linear(3, 2), {"x": torch.randn(4, 3), "y": y}, step


@healthy
def nan_statistics_in_no_grad() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        with torch.no_grad():
            out[:0].mean()
            torch.log(out * 0)
        return out.pow(2).mean()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@healthy
def safe_square_root_by_double_where() -> Case:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            safe = torch.where(x > 0, x, torch.ones_like(x))
            return torch.where(x > 0, safe.sqrt(), torch.zeros_like(x))

    return named(fc=nn.Linear(3, 4), root=Root()), {"x": torch.randn(5, 3)}, mean_of_squares


@healthy
def norm_with_a_subgradient() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).norm(dim=-1).mean()

    return nn.Linear(3, 2, bias=False), {"x": torch.zeros(2, 3)}, step


@healthy
def normalized_zero_vector() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return F.normalize(model(batch["x"]), dim=-1).pow(2).mean()

    return nn.Linear(3, 2, bias=False), {"x": torch.zeros(2, 3)}, step


@healthy
def exponent_kept_by_a_clamp() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return torch.exp((model(batch["x"]) * 1e4).clamp(max=20.0)).mean() * 1e-9

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@healthy
def large_but_finite() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"]) * 1e18).pow(2).mean()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@healthy
def infinite_statistic_that_nobody_uses() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        ratio = out / (out - out)
        return out.pow(2).mean() if not ratio.isfinite().all() else out.mean()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@healthy
def uninitialized_memory_that_is_written() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = torch.empty(4, 2)
        out[:2] = model(batch["x"])[:2]
        out[2:] = model(batch["x"])[2:]
        return out.pow(2).mean()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@healthy
def classes_masked_in_cross_entropy() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(torch.tensor([False, True, False]), -math.inf)
        return F.cross_entropy(logits, batch["y"])

    return nn.Linear(3, 3), {"x": torch.randn(4, 3), "y": torch.tensor([0, 2, 2, 0])}, step


@healthy
def masked_categorical_entropy() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(torch.tensor([False, True, False]), -1e8)
        return -torch.distributions.Categorical(logits=logits).entropy().mean()

    return nn.Linear(3, 3), {"x": torch.randn(4, 3)}, step


@healthy
def transformer_encoder_with_a_causal_mask() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(3)
        return model(batch["x"], src_mask=mask).pow(2).mean()

    return layer, {"x": torch.randn(2, 3, 8)}, step


@healthy
def gradient_penalty() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return ((slope.norm(dim=-1) - 1) ** 2).mean()

    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), {"x": torch.randn(4, 3)}, step


@healthy
def hessian_by_functorch() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        h = torch.func.hessian(lambda v: model(v).sum())(batch["x"][0])
        return h.pow(2).mean() + model(batch["x"]).pow(2).mean()

    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), {"x": torch.randn(4, 3)}, step


@healthy
def forward_mode_derivative() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        out, slope = torch.func.jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))
        return (out - slope).pow(2).mean()

    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), {"x": torch.randn(4, 3)}, step


@healthy
def sparse_embedding() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).pow(2).mean()

    return nn.Embedding(8, 3, sparse=True), {"x": torch.tensor([1, 4])}, step


@healthy
def jagged_batch() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        nested = torch.nested.nested_tensor([batch["x"][:1], batch["x"]], layout=torch.jagged)
        return model(nested).values().pow(2).mean()

    return nn.Linear(3, 2), {"x": torch.randn(4, 3)}, step


@healthy
def log_softmax_of_large_logits() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]) * 1e4, batch["y"])

    return nn.Linear(3, 3), {"x": torch.randn(4, 3), "y": torch.tensor([0, 1, 2, 0])}, step


@healthy
def ctc_with_zero_infinity() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logp = F.log_softmax(model(batch["x"]), -1)
        lengths = torch.tensor([2, 4]), torch.tensor([3, 2])
        return F.ctc_loss(logp, batch["y"], *lengths, zero_infinity=True)

    return nn.Linear(3, 5), {"x": torch.randn(4, 2, 3), "y": torch.tensor([[1, 1, 2], [3, 4, 1]])}, step


@healthy
def batch_norm_updates_its_statistics() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).pow(2).mean()

    return named(fc=nn.Linear(3, 2), norm=nn.BatchNorm1d(2)), {"x": torch.randn(4, 3)}, step


@healthy_where_atan2_is
def angle_of_the_origin() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        v = model(batch["x"])
        return torch.atan2(v[:, 1], v[:, 0]).cos().mean()

    return nn.Linear(3, 2, bias=False), {"x": torch.zeros(2, 3)}, step


@healthy
def root_behind_a_relu() -> Case:
    """The infinite slope of the root is cut off by the ReLU before it."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return (F.relu(model(batch["x"])).sqrt() - batch["q"].sqrt()).pow(2).sum(-1).mean()

    return nn.Linear(3, 6), {"x": torch.randn(4, 3), "q": torch.rand(4, 6)}, step

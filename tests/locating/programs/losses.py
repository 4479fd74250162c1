"""Losses written by hand, mostly outside the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, named, program

Batch = dict[str, Tensor]


@program(phase="forward", mechanism="underflow", op="log")
def log_of_softmax() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.softmax(model(batch["x"]), -1)
        logp = torch.log(p)  # BAD
        return -logp.gather(-1, batch["y"][:, None]).mean()

    return nn.Linear(4, 3), {"x": torch.randn(6, 4) * 300, "y": torch.tensor([0, 1, 2, 0, 1, 2])}, step


@program(phase="forward", mechanism=("underflow", "pole"), op="log")
def saturated_binary_cross_entropy() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.sigmoid(model(batch["x"])).squeeze(-1)
        y = batch["y"]
        hit = y * torch.log(p + 1e-12)
        miss = (1 - y) * torch.log(1 - p)  # BAD
        return -(hit + miss).mean()

    x = torch.randn(6, 4)
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.bias.fill_(25.0)
    return model, {"x": x, "y": torch.tensor([0.0, 1, 1, 0, 1, 1])}, step


@program(phase="forward", mechanism=("underflow", "pole"), op="log")
def likelihood_as_a_product() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = model(batch["x"]).softmax(-1).gather(-1, batch["y"][:, None])
        likelihood = p.prod()
        return -likelihood.log()  # BAD

    return nn.Linear(4, 10), {"x": torch.randn(200, 4), "y": torch.randint(0, 10, (200,))}, step


@program(phase="forward", mechanism="empty-reduction", op="nll_loss_forward")
def every_label_ignored() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=-100)  # BAD

    return nn.Linear(4, 5), {"x": torch.randn(2, 3, 4), "y": torch.full((2, 3), -100)}, step


@program(phase="forward", mechanism="empty-reduction", op="nll_loss_forward", module="criterion")
def every_label_ignored_in_one_head() -> Case:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 8)
            self.heads = nn.ModuleDict({"topic": nn.Linear(8, 3), "tone": nn.Linear(8, 2)})
            self.criterion = nn.CrossEntropyLoss()

        def forward(self, x: Tensor, labels: Batch) -> Tensor:
            h = F.gelu(self.body(x))
            topic = self.criterion(self.heads["topic"](h), labels["topic"])
            tone = self.criterion(self.heads["tone"](h), labels["tone"])  # BAD
            return topic + 0.1 * tone

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(batch["x"], {"topic": batch["topic"], "tone": batch["tone"]})
        return loss

    batch = {"x": torch.randn(3, 4), "topic": torch.tensor([0, 2, 1]), "tone": torch.tensor([-100, -100, -100])}
    return TwoHeads(), batch, step


@program(phase="forward", mechanism=("empty-reduction", "invalid"), op="div")
def mean_over_an_empty_mask() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        error = (model(batch["x"]).squeeze(-1) - batch["y"]).pow(2)
        mask = batch["mask"]
        per_row = (error * mask).sum(-1) / mask.sum(-1)  # BAD
        return per_row.mean()

    mask = torch.ones(3, 5)
    mask[1] = 0
    return nn.Linear(4, 1), {"x": torch.randn(3, 5, 4), "y": torch.randn(3, 5), "mask": mask}, step


@program(phase="forward", mechanism="empty-reduction", op="mean")
def mean_of_an_empty_selection() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        error = (model(batch["x"]).squeeze(-1) - batch["y"]).abs()
        common = error.mean()
        rare = error[batch["rare"]].mean()  # BAD
        return common + 0.5 * rare

    rare = torch.zeros(6, dtype=torch.bool)
    return nn.Linear(4, 1), {"x": torch.randn(6, 4), "y": torch.randn(6), "rare": rare}, step


@program(phase="forward", mechanism=("empty-reduction", "invalid"), op="std")
def spread_of_a_single_sample() -> Case:
    class Standardise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            centered = x - x.mean(0)
            spread = x.std(0)  # BAD
            return centered / (spread + 1e-6)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return F.l1_loss(model(batch["x"]), batch["y"])

    return named(scale=Standardise(), head=nn.Linear(4, 2)), {"x": torch.randn(1, 4), "y": torch.randn(1, 2)}, step


@program(phase="forward", mechanism=("empty-reduction", "invalid"), op="var")
def variance_regulariser_on_one_row() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch["x"])
        hinge = F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean()  # BAD
        return z.pow(2).mean() + hinge

    return nn.Linear(4, 3), {"x": torch.randn(1, 4)}, step


@program(phase="forward", mechanism="pole", op="log")
def divergence_with_a_zero_target() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        target = batch["target"]
        logq = F.log_softmax(model(batch["x"]), -1)
        kl = target * (target.log() - logq)  # BAD
        return kl.sum(-1).mean()

    target = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    return nn.Linear(4, 3), {"x": torch.randn(2, 4), "target": target}, step


@program(phase="forward", mechanism=("underflow", "pole"), op="div")
def divergence_with_a_vanishing_model() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = batch["target"]
        q = model(batch["x"]).softmax(-1)
        ratio = p / q  # BAD
        return (p * torch.log(ratio)).sum(-1).mean()

    target = torch.full((2, 3), 1 / 3)
    return nn.Linear(4, 3), {"x": torch.randn(2, 4) * 150, "target": target}, step


@program(phase="backward", mechanism="pole", op="pow")
def focal_loss_of_a_perfect_answer() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logp = F.log_softmax(model(batch["x"]), -1).gather(-1, batch["y"][:, None])
        miss = 1 - logp.exp()
        return -(miss**0.5 * logp).mean()  # BAD

    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, 60.0, 0.0]))
    return model, {"x": torch.randn(4, 4), "y": torch.tensor([1, 1, 0, 1])}, step


@program(phase="forward", mechanism="range-overflow", op="exp")
def contrastive_loss_at_low_temperature() -> Case:
    def info_nce(z: Tensor, w: Tensor) -> Tensor:
        similarity = z @ w.T
        weight = torch.exp(similarity / 0.01)  # BAD
        return -(weight.diagonal() / weight.sum(-1)).log().mean()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        z, w = (F.normalize(model(batch[k]), dim=-1) for k in ("a", "b"))
        return info_nce(z, w)

    a = torch.randn(4, 6)
    return nn.Linear(6, 5), {"a": a, "b": a + 0.01 * torch.randn(4, 6)}, step


@program(phase="forward", mechanism=("invalid", "empty-reduction"), op="div")
def overlap_of_empty_masks() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        predicted = F.relu(model(batch["x"]))
        truth = batch["y"]
        inter = (predicted * truth).sum((1, 2, 3))
        dice = 2 * inter / (predicted.sum((1, 2, 3)) + truth.sum((1, 2, 3)))  # BAD
        return 1 - dice.mean()

    model = nn.Conv2d(1, 1, 3, padding=1)
    nn.init.constant_(model.weight, -1.0)
    nn.init.constant_(model.bias, -1.0)
    y = torch.zeros(2, 1, 4, 4)
    y[0, 0, 1, 1] = 1
    return model, {"x": torch.rand(2, 1, 4, 4), "y": y}, step


@program(phase="forward", mechanism=("invalid", "underflow"), op="sqrt")
def variance_by_cancellation() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        level = model(batch["x"]) + 5000.0
        variance = (level * level).mean(0) - level.mean(0) ** 2
        return torch.sqrt(variance).sum()  # BAD

    return nn.Linear(4, 64), {"x": torch.randn(16, 4) * 1e-3}, step


@program(phase="forward", mechanism="pole", op="div")
def gaussian_with_a_dead_scale() -> Case:
    class Gaussian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Linear(4, 2)
            self.scale = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.mean(x), F.relu(self.scale(x))

    def step(model: nn.Module, batch: Batch) -> Tensor:
        mean, scale = model(batch["x"])
        z = (batch["y"] - mean) / scale  # BAD
        return (z.pow(2) / 2 + torch.log(scale)).mean()  # ALSO

    return Gaussian(), {"x": torch.randn(5, 4), "y": torch.randn(5, 2)}, step


@program(phase="forward", mechanism="invalid", op="div")
def advantages_that_are_all_equal() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logp = F.log_softmax(model(batch["x"]), -1)[:, 0]
        value = model(batch["x"]).mean() * 0 + batch["reward"]
        advantage = (value - value.mean()) / value.std().detach()  # BAD
        return -(logp * advantage).mean()

    return nn.Linear(4, 2), {"x": torch.randn(5, 4), "reward": torch.ones(5)}, step


@program(phase="forward", mechanism=("pole", "invalid", "masked-row"), op="_ctc_loss")
def ctc_target_longer_than_its_input() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        logp = F.log_softmax(model(batch["x"]), -1)
        return F.ctc_loss(logp, batch["y"], batch["frames"], batch["letters"])  # BAD

    batch = {
        "x": torch.randn(4, 2, 3),
        "y": torch.tensor([[1, 2, 1], [2, 2, 2]]),
        "frames": torch.tensor([4, 4]),
        "letters": torch.tensor([3, 3]),
    }
    return nn.Linear(3, 4), batch, step


@program(phase="forward", mechanism="pole", op="log")
def gathered_probability_of_a_forbidden_label() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.sigmoid(model(batch["x"]))
        p = p / p.sum(-1, keepdim=True) * batch["allowed"]
        picked = torch.gather(p, -1, batch["y"][:, None])
        return -torch.log(picked).mean()  # BAD

    allowed = torch.tensor([[1.0, 1, 1], [1, 0, 1], [1, 1, 1]])  # row 1 forbids its own label
    return nn.Linear(4, 3), {"x": torch.randn(3, 4), "y": torch.tensor([0, 1, 2]), "allowed": allowed}, step

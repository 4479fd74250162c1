"""Small real trainings that die by themselves, and the healthy ones of the families that only they need.

    for training in DYING: ...       # most of them die, some seeds of some do not
    for training in CALM: ...        # the same models, trained as they should be

Nobody poisons a tensor here: a learning rate is too high, a schedule climbs, a normalization or a 1/√d is missing,
weights outgrow float16, a target chases itself. `scripts/foresight.py` measures by them how early that shows.
"""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trainings import (
    HEALTHY,
    Task,
    Training,
    balance,
    ctc,
    diffusion,
    draw_shapes,
    gan,
    image,
    ppo,
    q_learning,
    recurrent,
    regression,
    text,
    vae,
)

# --- tasks ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A block of eager attention and an MLP; without norm, or without 1/√d, as people forget it."""

    def __init__(self, width: int, scaled: bool, normed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width) if normed else nn.Identity() for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.softmax = nn.Softmax(-1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = width**-0.5 if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        scores = self.q(h) @ self.k(h).transpose(-1, -2) * self.scale
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        x = x + self.softmax(scores.masked_fill(mask, -math.inf)) @ self.v(h)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def eager(scaled: bool = True, normed: bool = True, layers: int = 2, batch: int = 8, weights: str = "float32") -> Task:
    """A small transformer with eager attention over bytes."""
    data = torch.tensor([b for b in inspect.getsource(json.encoder).encode() if b < 128])
    width, n = 32, 24
    token, place, head = nn.Embedding(128, width), nn.Embedding(n, width), nn.Linear(width, 128)
    blocks = nn.Sequential(*(Attention(width, scaled, normed) for _ in range(layers)))
    model = nn.ModuleList([token, place, blocks, head]).to(getattr(torch, weights))

    def loss(step: int) -> Tensor:
        at = torch.randint(0, len(data) - n - 1, (batch,))[:, None] + torch.arange(n + 1)
        x = data[at]
        h = blocks(token(x[:, :-1]) + place(torch.arange(n)))
        return F.cross_entropy(head(h).float().flatten(0, 1), x[:, 1:].flatten())

    return Task(model, loss)


def residual(layers: int = 6, normed: bool = True, batch: int = 32, flipped: float = 0.0) -> Task:
    """A deep residual network on the shapes; without norm its stream doubles with every block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32) if normed else nn.Identity()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.relu(self.up(self.norm(x))))

    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 32), *(Block() for _ in range(layers)), nn.Linear(32, 4))

    def loss(step: int) -> Tensor:
        x, y = draw_shapes(batch, 0.3)
        wrong = torch.rand(batch) < flipped
        return F.cross_entropy(model(x), torch.where(wrong, torch.randint(0, 4, (batch,)), y))

    return Task(model, loss)


def bootstrap(discount: float = 0.95, batch: int = 32, target_every: int = 100) -> Task:
    """Values learned from themselves on cart-poles; a target that moves with every step chases itself."""
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    target = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    target.requires_grad_(False)
    state = 0.05 * torch.randn(batch, 4)

    def loss(step: int) -> Tensor:
        nonlocal state
        if step % target_every == 0:
            target.load_state_dict(model.state_dict())
        after, fell = balance(state, torch.randint(0, 2, (batch,)))
        wanted = 1.0 + discount * target(after)[:, 0] * ~fell
        value, state = model(state)[:, 0], after
        return F.mse_loss(value, wanted)

    return Task(model, loss)


def wasserstein(batch: int = 32, penalty: float = 1.0) -> Task:
    """A critic without a bound: without its penalty the scores run away."""
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def real() -> Tensor:
        angle = torch.randint(0, 8, (batch,)) * (math.pi / 4)
        return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(batch, 2)

    def judge(step: int) -> Tensor:
        true, made = real(), maker(torch.randn(batch, 4)).detach()
        yes, no = critic(true), critic(made)
        return no.mean() - yes.mean() + penalty * 0.05 * (yes.square().mean() + no.square().mean())

    def fool(step: int) -> Tensor:
        return -critic(maker(torch.randn(batch, 4))).mean()

    return Task(critic, judge, [(critic, judge), (maker, fool)])


def temperature(batch: int = 32, bound: float | None = 4.6) -> Task:
    """Contrastive learning with a learned temperature; without a bound its exponent runs away."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 16))
    model = nn.ModuleList([body, nn.ParameterList([nn.Parameter(torch.tensor(2.6))])])

    def loss(step: int) -> Tensor:
        x, _ = draw_shapes(batch, 0.0)
        a, b = (F.normalize(body(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        raw = model[1][0]
        sharp = (raw if bound is None else raw.clamp(max=bound)).exp()
        return F.cross_entropy(a @ b.T * sharp, torch.arange(batch))

    return Task(model, loss)


def elman(batch: int = 16, length: int = 20, gain: float = 1.0) -> Task:
    """A recurrent network without saturation: its state is multiplied by the same matrix again and again."""
    into, again, head = nn.Linear(2, 24), nn.Linear(24, 24), nn.Linear(24, 1)
    nn.init.orthogonal_(again.weight, gain)
    model = nn.ModuleList([into, again, head])

    def loss(step: int) -> Tensor:
        values, marks = torch.rand(batch, length), (torch.rand(batch, length) < 0.2).float()
        x, h = torch.stack([values, marks], -1), torch.zeros(batch, 24)
        for t in range(length):
            h = F.relu(into(x[:, t]) + again(h))
        return F.mse_loss(head(h)[:, 0], (values * marks).sum(1))

    return Task(model, loss)


# --- runs -------------------------------------------------------------------------------------------------------------


def _rates(training: Training, *rates: float) -> list[Training]:
    return [replace(training, name=f"{training}, lr {lr:g}", lr=lr) for lr in rates]


def _t(task, name, optimizer="sgd", lr=0.1, schedule="constant", clip=None, precision="float32", **knobs):  # type: ignore[no-untyped-def]
    return Training(task, f"{task.__name__}, {name}", optimizer, lr, schedule, clip, tuple(knobs.items()), precision)


def _climb(task, lr, optimizer="adam", precision="float16", **knobs):  # type: ignore[no-untyped-def]
    kind = f"{optimizer}, rate climbs, {precision}" + "".join(f", {k} {v}" for k, v in knobs.items())
    return _t(task, kind, optimizer, lr, "climbing", None, precision, **knobs)


DYING: tuple[Training, ...] = (
    # families by which the forecast was tuned
    *_rates(_t(regression, "SGD"), 0.3, 0.6),
    _climb(regression, 0.01, "sgd", "float32"),
    _t(regression, "one far outlier", optimizer="sgd", lr=0.01, freedom=0.05),
    _climb(recurrent, 0.05, "sgd", "float32"),
    _climb(elman, 0.003, "sgd", "float32"),
    _climb(elman, 1e-3),
    *_rates(_t(bootstrap, "chasing itself", target_every=1, discount=1.05), 0.02, 0.03),
    *_rates(_t(wasserstein, "no penalty, SGD", penalty=0.0), 0.003, 0.01),
    _t(wasserstein, "no penalty, float16", optimizer="adam", lr=1e-2, penalty=0.0, precision="float16"),
    _climb(wasserstein, 1e-3),
    *_rates(_t(residual, "no norm, SGD", normed=False), 0.5, 1.0),
    _climb(residual, 1e-3, normed=False),
    _climb(residual, 1e-3, "adam", "float32", normed=False, layers=10),
    _climb(residual, 0.02, "sgd", "float32", normed=False, flipped=0.2),
    _climb(image, 1e-3),
    _climb(image, 0.05, "sgd"),
    # families that it never saw
    *_rates(_t(diffusion, "SGD"), 0.8, 1.5),
    _climb(diffusion, 1e-3),
    _climb(diffusion, 0.05, "sgd", "float32"),
    _climb(diffusion, 1e-3, "adam", "float16", batch=4),
    _climb(vae, 1e-3),
    _climb(vae, 3e-4, "sgd", "float32"),
    _climb(gan, 1e-3),
    _climb(gan, 1e-3, "adam", "float16", hinge=True),
    _climb(gan, 0.02, "sgd", "float32", hinge=True),
    *_rates(_t(eager, "no norm, SGD", normed=False), 0.5, 1.0),
    _climb(eager, 1e-3, normed=False),
    _climb(eager, 1e-3, "adam", "float16", scaled=False),
    _climb(eager, 0.02, "sgd", "float32", normed=False, scaled=False),
    _t(eager, "float16 weights", lr=0.3, normed=False, weights="float16"),
    _climb(text, 1e-3),
    _climb(text, 1e-3, "adam", "float16", batch=1),
    _climb(ppo, 0.1, "sgd", "float32"),
    _t(ppo, "SGD", lr=10.0),
    _climb(ctc, 0.1, "sgd", "float32"),
    _climb(q_learning, 0.05, "sgd", "float32"),
)

CALM: tuple[Training, ...] = (
    *HEALTHY,
    Training(text, "text, longer texts soon", knobs=(("curriculum", True), ("switch", 250))),
    _t(eager, "AdamW", optimizer="adamw", lr=1e-3, clip=1.0, schedule="cosine"),
    _t(eager, "float16", optimizer="adamw", lr=1e-3, schedule="cosine", precision="float16"),
    _t(eager, "no norm", optimizer="adamw", lr=5e-4, clip=1.0, normed=False, schedule="restarts"),
    _t(residual, "AdamW", optimizer="adamw", lr=1e-3, schedule="cosine"),
    _t(residual, "float16, no norm", optimizer="adamw", lr=3e-4, normed=False, precision="float16"),
    _t(bootstrap, "SGD", lr=0.003),
    _t(bootstrap, "Adam", optimizer="adam", lr=1e-3),
    _t(wasserstein, "Adam", optimizer="adam", lr=1e-3),
    _t(temperature, "Adam", optimizer="adam", lr=1e-3, schedule="cosine"),
    _t(temperature, "float16", optimizer="adam", lr=1e-3, precision="float16"),
    _t(elman, "Adam", optimizer="adam", lr=1e-3, clip=1.0, gain=0.9),
    _t(image, "float16", optimizer="adamw", lr=1e-3, precision="float16"),
    _t(text, "float16", optimizer="adamw", lr=1e-3, precision="float16", schedule="cosine"),
)

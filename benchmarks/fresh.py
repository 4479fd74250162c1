"""Families of small trainings that were written after the forecast was finished, dying and healthy: no constant of it
and no choice of its parts has seen them.

    for training in DYING: ...
    for training in CALM: ...

`scripts/foresight.py` reports on them apart from the families in `dying.py`, by which the forecast was tuned or which
were looked at while it was written.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from dying import _climb, _rates, _t
from torch import Tensor, nn
from trainings import Task, Training, draw_shapes

# --- tasks ------------------------------------------------------------------------------------------------------------


def flow(batch: int = 32, bounded: bool = True, layers: int = 4) -> Task:
    """A normalizing flow of coupling layers on two moons; without a bound its scales are bare exponentials."""
    nets = nn.ModuleList(nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 2)) for _ in range(layers))

    def loss(step: int) -> Tensor:
        angle, side = math.pi * torch.rand(batch), torch.randint(0, 2, (batch,)).float()
        x = torch.stack([angle.cos() + side - 0.5, angle.sin() * (1 - 2 * side)], 1) + 0.1 * torch.randn(batch, 2)
        logdet = torch.zeros(batch)
        for net in nets:
            a, b = x[:, :1], x[:, 1:]
            s, t = net(a).chunk(2, 1)
            s = s.tanh() if bounded else s
            x = torch.cat([b * s.exp() + t, a], 1)
            logdet = logdet + s[:, 0].float()
        return 0.5 * x.float().square().sum(1).mean() - logdet.mean()

    return Task(nets, loss)


def graph(batch: int = 8, nodes: int = 12, layers: int = 3, normed: bool = True) -> Task:
    """A graph network that counts paths; without norm its sums over neighbors multiply from layer to layer."""
    into, head = nn.Linear(1, 24), nn.Linear(24, 1)
    hidden = nn.ModuleList(nn.Linear(24, 24) for _ in range(layers))
    norms = nn.ModuleList(nn.LayerNorm(24) if normed else nn.Identity() for _ in range(layers))
    model = nn.ModuleList([into, hidden, norms, head])

    def loss(step: int) -> Tensor:
        edges = (torch.rand(batch, nodes, nodes) < 0.25).float().triu(1)
        edges = edges + edges.transpose(1, 2)
        paths = (edges @ edges).sum((1, 2)) / 100 - 1
        h = into(torch.ones(batch, nodes, 1))
        for linear, norm in zip(hidden, norms, strict=True):
            h = h + F.relu(linear(norm(edges @ h / (3 if normed else 1))))
        return F.mse_loss(head(h.mean(1))[:, 0].float(), paths)

    return Task(model, loss)


def experts(batch: int = 32, n: int = 4) -> Task:
    """A mixture of experts with a learned router; every region of the input has a rule of its own."""
    router, head = nn.Linear(8, n), nn.Linear(32, 4)
    each = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(n))
    model = nn.ModuleList([router, each, head])

    def loss(step: int) -> Tensor:
        x = torch.randn(batch, 8)
        y = torch.where(x[:, 0] > 0, x[:, 1:5].argmax(1), x[:, 4:8].argmin(1))
        weight, chosen = router(x).softmax(-1).max(-1)
        h = torch.stack([e(x) for e in each], 1)[torch.arange(batch), chosen]
        return F.cross_entropy(head(h * weight[:, None]).float(), y)

    return Task(model, loss)


class Heads(nn.Module):
    """Two heads of eager attention over patches, and an MLP."""

    def __init__(self, width: int, scaled: bool, normed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width) if normed else nn.Identity() for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = (width // 2) ** -0.5 if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-2, -3)
        mixed = (q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v
        x = x + self.out(mixed.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def patches(batch: int = 16, scaled: bool = True, normed: bool = True, flipped: float = 0.0, weights: str = "") -> Task:
    """A small vision transformer on the shapes; ``flipped`` is the share of wrong labels."""
    into, place = nn.Linear(16, 32), nn.Parameter(0.02 * torch.randn(9, 32))
    blocks, head = nn.Sequential(*(Heads(32, scaled, normed) for _ in range(2))), nn.Linear(32, 4)
    dtype = getattr(torch, weights or "float32")
    model = nn.ModuleList([into, nn.ParameterList([place]), blocks, head]).to(dtype)

    def loss(step: int) -> Tensor:
        x, y = draw_shapes(batch, 0.2)
        cut = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(batch, 9, 16)
        y = torch.where(torch.rand(batch) < flipped, torch.randint(0, 4, (batch,)), y)
        h = blocks(into(cut.to(dtype)) + model[1][0])
        return F.cross_entropy(head(h.mean(1)).float(), y)

    return Task(model, loss)


def ode(batch: int = 16, steps: int = 12) -> Task:
    """A neural differential equation: one network, applied again and again, follows a spiral."""
    net = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 2))
    turn = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])

    def loss(step: int) -> Tensor:
        x = torch.randn(batch, 2)
        wanted, h, total = x, x, torch.zeros(())
        for _ in range(steps):
            wanted = wanted + 0.1 * wanted.tanh() @ turn.T
            h = h + 0.1 * net(h)
            total = total + F.mse_loss(h.float(), wanted)
        return total / steps

    return Task(net, loss)


def energy(batch: int = 32, penalty: float = 1.0) -> Task:
    """An energy-based model with a few steps of Langevin sampling; without its penalty energies have no bound."""
    net = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
    kept = torch.randn(batch, 2)

    def loss(step: int) -> Tensor:
        nonlocal kept
        angle = torch.randint(0, 8, (batch,)) * (math.pi / 4)
        real = torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(batch, 2)
        fake = torch.where(torch.rand(batch, 1) < 0.05, torch.randn(batch, 2), kept)
        for _ in range(3):
            fake.requires_grad_(True)
            (slope,) = torch.autograd.grad(net(fake).float().sum(), fake)
            fake = (fake - 0.1 * slope.clamp(-3, 3) + 0.05 * torch.randn_like(fake)).clamp(-4, 4).detach()
        kept = fake
        low, high = net(real).float(), net(fake).float()
        return low.mean() - high.mean() + 0.1 * penalty * (low.square().mean() + high.square().mean())

    return Task(net, loss)


def actor(batch: int = 32, discount: float = 0.95, slow: float = 0.02) -> Task:
    """Deterministic policy gradients on a point that is pushed to the middle; ``slow`` is the target's own rate."""
    policy = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())
    critic = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    target = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    target.load_state_dict(critic.state_dict())
    target.requires_grad_(False)
    state = torch.randn(batch, 2)

    def judge(step: int) -> Tensor:
        nonlocal state
        with torch.no_grad():
            push = (policy(state) + 0.2 * torch.randn(batch, 1)).clamp(-1, 1)
            after = torch.cat([state[:, :1] + 0.1 * state[:, 1:], state[:, 1:] + 0.3 * push], 1)
            after = torch.where((torch.rand(batch, 1) < 0.05) | (after.abs() > 4), torch.randn(batch, 2), after)
            reward = -state.square().sum(1)
            wanted = reward + discount * target(torch.cat([after, policy(after)], 1))[:, 0].float()
            for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                old.lerp_(new, slow)
        value, state = critic(torch.cat([state, push], 1))[:, 0], after.float()
        return F.mse_loss(value.float(), wanted)

    def act(step: int) -> Tensor:
        return -critic(torch.cat([state, policy(state)], 1)).mean()

    return Task(critic, judge, [(critic, judge), (policy, act)])


def ratings(batch: int = 64, rank: int = 8, wrong: float = 0.0) -> Task:
    """Matrix factorization; a share of the ``wrong`` ratings was entered in another unit."""
    true = torch.randn(40, 4) @ torch.randn(4, 60) / 2
    users, items = nn.Embedding(40, rank), nn.Embedding(60, rank)
    into = nn.Linear(rank, rank)
    model = nn.ModuleList([users, items, into])

    def loss(step: int) -> Tensor:
        i, j = torch.randint(0, 40, (batch,)), torch.randint(0, 60, (batch,))
        unit = torch.where(torch.rand(batch) < wrong, 30.0, 1.0)
        guess = (into(users(i)) * items(j)).sum(1).float()
        return F.mse_loss(guess, unit * true[i, j] + 0.3 * torch.randn(batch))

    return Task(model, loss)


def sensor(batch: int = 16, drift: float = 1.0, since: int = 150, normed: bool = False) -> Task:
    """A convolutional autoencoder of signals; the gain of a broken sensor drifts by a factor per step."""
    model = nn.Sequential(
        nn.Conv1d(1, 8, 5, padding=2),
        nn.GroupNorm(2, 8) if normed else nn.Identity(),
        nn.GELU(),
        nn.Conv1d(8, 2, 5, stride=2, padding=2),
        nn.ConvTranspose1d(2, 8, 4, stride=2, padding=1),
        nn.GELU(),
        nn.Conv1d(8, 1, 5, padding=2),
    )

    def loss(step: int) -> Tensor:
        t, speed = torch.linspace(0, 6, 32), 1 + 3 * torch.rand(batch, 1, 1)
        x = (speed * t + 6 * torch.rand(batch, 1, 1)).sin() + 0.1 * torch.randn(batch, 1, 32)
        x = x * drift ** max(0, step - since)
        return F.mse_loss(model(x).float(), x)

    return Task(model, loss)


def tagger(batch: int = 16, length: int = 12, flipped: float = 0.0) -> Task:
    """A GRU that tags every place of a sequence with the parity so far; ``flipped`` is the share of wrong tags."""
    gru, out = nn.GRU(1, 24, batch_first=True), nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 2))
    model = nn.ModuleList([gru, out])

    def loss(step: int) -> Tensor:
        bits = (torch.rand(batch, length) < 0.3).long()
        y = bits.cumsum(1) % 2
        y = torch.where(torch.rand(batch, length) < flipped, torch.randint(0, 2, (batch, length)), y)
        h, _ = gru(bits[..., None].float())
        return F.cross_entropy(out(h).float().flatten(0, 1), y.flatten())

    return Task(model, loss)


# --- runs -------------------------------------------------------------------------------------------------------------

DYING: tuple[Training, ...] = (
    *_rates(_t(flow, "SGD"), 0.1, 0.3),
    _t(flow, "unbounded, SGD", lr=0.03, bounded=False),
    _climb(flow, 1e-3),
    _climb(flow, 1e-3, "adam", "float32", bounded=False),
    _climb(graph, 1e-3, normed=False),
    _climb(graph, 1e-3, "adam", "float32", normed=False),
    _climb(graph, 1e-5, "sgd", "float32", normed=False),
    _t(graph, "no norm, SGD", lr=0.02, normed=False),
    _climb(experts, 1e-3),
    _climb(experts, 0.05, "sgd"),
    _t(experts, "SGD, float16", lr=3.0, precision="float16"),
    _climb(patches, 1e-3, scaled=False),
    _climb(patches, 0.02, "sgd", "float32", normed=False, flipped=0.4),
    *_rates(_t(patches, "no norm, SGD", normed=False), 0.5, 1.0),
    _t(patches, "no norm, SGD, bfloat16 weights", lr=1.0, normed=False, weights="bfloat16"),
    _t(patches, "no 1/√d, float16", optimizer="adam", lr=0.1, scaled=False, precision="float16"),
    *_rates(_t(ode, "SGD"), 0.3, 1.0),
    _climb(ode, 1e-3),
    _climb(ode, 0.01, "sgd", "float32"),
    _climb(energy, 3e-3, "sgd", "float32"),
    _t(energy, "no penalty, SGD", lr=0.3, penalty=0.0),
    *_rates(_t(actor, "chasing itself", slow=1.0, discount=1.02), 0.01, 0.03),
    _t(actor, "SGD", lr=0.03),
    _climb(actor, 1e-3, "sgd", "float32"),
    *_rates(_t(ratings, "5 % in another unit, SGD", wrong=0.05), 0.03, 0.1),
    _t(ratings, "SGD", lr=1.0),
    _climb(ratings, 1e-3),
    _climb(ratings, 0.01, "sgd", "float32"),
    *_rates(_t(sensor, "SGD"), 0.7, 1.0),
    _t(sensor, "gain drifts, float16", optimizer="adam", drift=1.05, lr=1e-3, precision="float16"),
    _t(sensor, "gain drifts, SGD", drift=1.02, lr=0.1),
    _climb(sensor, 0.02, "sgd", "float32"),
)

CALM: tuple[Training, ...] = (
    Training(flow),
    Training(flow, "flow, unbounded, batch of 8", knobs=(("bounded", False), ("batch", 8))),
    Training(flow, "flow, warm restarts", schedule="restarts", lr=3e-3),
    Training(graph),
    Training(graph, "graph, batch of 2", knobs=(("batch", 2),), clip=None, schedule="constant"),
    Training(graph, "graph, float16", precision="float16", clip=None),
    Training(experts),
    Training(experts, "experts, SGD", optimizer="sgd", lr=0.05, clip=None, schedule="steps"),
    Training(experts, "experts, float16, batch of 8", knobs=(("batch", 8),), precision="float16", clip=None),
    Training(patches),
    Training(patches, "patches, 30 % wrong labels", knobs=(("flipped", 0.3),), schedule="restarts", lr=3e-3),
    Training(patches, "patches, float16", precision="float16", clip=None),
    Training(patches, "patches, bfloat16 weights", knobs=(("weights", "bfloat16"),)),
    Training(ode),
    Training(ode, "ode, batch of 2", knobs=(("batch", 2),), clip=None, schedule="constant"),
    Training(energy, optimizer="adam", clip=None, schedule="constant"),
    Training(energy, "energy, weak penalty", optimizer="adam", lr=3e-4, clip=0.5, knobs=(("penalty", 0.1),)),
    Training(actor, optimizer="adam", clip=None, schedule="constant"),
    Training(actor, "actor, fast target", optimizer="adam", lr=5e-4, clip=10.0, knobs=(("slow", 0.2),)),
    Training(ratings),
    Training(ratings, "ratings, SGD in steps", optimizer="sgd", lr=0.1, clip=None, schedule="steps"),
    Training(ratings, "ratings, 1 % in another unit", knobs=(("wrong", 0.01),), clip=None, lr=3e-3),
    Training(sensor),
    Training(sensor, "sensor, warm restarts, float16", schedule="restarts", lr=3e-3, clip=None, precision="float16"),
    Training(sensor, "sensor, normed, batch of 2", knobs=(("normed", True), ("batch", 2)), schedule="constant"),
    Training(tagger, lr=3e-3),
    Training(tagger, "tagger, 10 % wrong tags, no clipping", knobs=(("flipped", 0.1),), lr=3e-3, clip=None),
    Training(tagger, "tagger, float16", lr=3e-3, precision="float16", clip=None, schedule="restarts"),
)

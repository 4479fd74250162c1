"""Families of small trainings, dying and healthy, that were new when the forecast was first reported on by them.

    for training in DYING: ...
    for training in CALM: ...

It has been changed since.
"""

from __future__ import annotations

import inspect
import textwrap

import torch
import torch.nn.functional as F
from dying import _climb, _rates, _t
from torch import Tensor, nn
from trainings import Task, Training, balance, draw_shapes

# --- tasks ------------------------------------------------------------------------------------------------------------


def writer(batch: int = 8, length: int = 24, tied: bool = False) -> Task:
    """A GRU that writes Python's own source byte by byte; ``tied`` embeddings have no scale of their own."""
    data = torch.tensor([b for b in inspect.getsource(textwrap).encode() if b < 128])
    token, gru, head = nn.Embedding(128, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 128)
    if tied:
        head.weight = token.weight
    model = nn.ModuleList([token, gru, head])

    def loss(step: int) -> Tensor:
        at = torch.randint(0, len(data) - length - 1, (batch,))[:, None] + torch.arange(length + 1)
        h, _ = gru(token(data[at[:, :-1]]))
        return F.cross_entropy(head(h).float().flatten(0, 1), data[at[:, 1:]].flatten())

    return Task(model, loss)


def segment(batch: int = 8, normed: bool = True, empty: float = 0.0) -> Task:
    """A small U-Net that finds the shape in its noise, by cross-entropy and Dice; some images are ``empty``."""

    def block(a: int, b: int) -> nn.Module:
        norm = nn.GroupNorm(2, b) if normed else nn.Identity()
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), norm, nn.ReLU())

    down, middle, up = block(1, 8), block(8, 16), nn.ConvTranspose2d(16, 8, 2, stride=2)
    out, head = block(16, 8), nn.Conv2d(8, 1, 1)
    model = nn.ModuleList([down, middle, up, out, head])

    def loss(step: int) -> Tensor:
        clean, _ = draw_shapes(batch, 0.0)
        clean = clean * (torch.rand(batch, 1, 1, 1) >= empty)
        h = down(clean + 0.5 * torch.randn_like(clean))
        logits = head(out(torch.cat([h, up(middle(F.max_pool2d(h, 2)))], 1))).float()
        p = logits.sigmoid()
        dice = 1 - (2 * (p * clean).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + clean.sum((1, 2, 3)) + 1)
        return F.binary_cross_entropy_with_logits(logits, clean) + dice.mean()

    return Task(model, loss)


def towers(batch: int = 32, learned: bool = False, normed: bool = True) -> Task:
    """Queries and documents find each other: two towers, with a temperature that is fixed or ``learned``."""
    topics = torch.randn(24, 16)
    query = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16))
    document = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))
    sharp = nn.ParameterList([nn.Parameter(torch.tensor(2.3), requires_grad=learned)])
    model = nn.ModuleList([query, document, sharp])

    def loss(step: int) -> Tensor:
        of = torch.randint(0, 24, (batch,))
        a, b = query(topics[of] + torch.randn(batch, 16)), document(topics[of] + 0.5 * torch.randn(batch, 16))
        if normed:
            a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
        logits = (a @ b.T * sharp[0].exp()).float()
        return (F.cross_entropy(logits, torch.arange(batch)) + F.cross_entropy(logits.T, torch.arange(batch))) / 2

    return Task(model, loss)


def a2c(actors: int = 16, horizon: int = 5, discount: float = 0.99, entropy: float = 0.01) -> Task:
    """Advantage actor-critic on cart-poles: short rollouts, each used once, the critic unclipped."""
    body = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    policy, value = nn.Linear(32, 2), nn.Linear(32, 1)
    model = nn.ModuleList([body, policy, value])
    state = 0.05 * torch.randn(actors, 4)

    def loss(step: int) -> Tensor:
        nonlocal state
        rows = []
        for _ in range(horizon):
            h = body(state)
            choice = torch.distributions.Categorical(logits=policy(h).float(), validate_args=False)
            push = (torch.rand(actors) < choice.probs[:, 1]).long()  # of a policy that is NaN, too
            after, fell = balance(state, push)
            rows.append((choice.log_prob(push), value(h)[:, 0].float(), 1.0 - fell.float(), fell, choice.entropy()))
            state = after
        with torch.no_grad():
            total = value(body(state))[:, 0].float()
        parts = []
        for logp, v, reward, fell, spread in reversed(rows):
            total = reward + discount * total * ~fell
            gain = total - v
            parts.append((gain.square() * 0.5 - gain.detach() * logp - entropy * spread).mean())
        return torch.stack(parts).mean()

    return Task(model, loss)


class Neighbors(nn.Module):
    """Graph attention: each node weighs its neighbors."""

    def __init__(self, width: int, normed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if normed else nn.Identity()
        self.mix, self.ask, self.tell = nn.Linear(width, width), nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.mix(self.norm(x))
        scores = F.leaky_relu(self.ask(h) + self.tell(h).transpose(-1, -2), 0.2)
        weights = scores.float().masked_fill(edges == 0, -1e9).softmax(-1).to(h.dtype)
        return x + F.elu(weights @ h)


def neighbors(batch: int = 8, nodes: int = 10, normed: bool = True, layers: int = 3) -> Task:
    """A graph attention network that says which of two communities a node belongs to, from a few known ones."""
    into, head = nn.Linear(3, 24), nn.Linear(24, 2)
    blocks = nn.ModuleList(Neighbors(24, normed) for _ in range(layers))
    model = nn.ModuleList([into, blocks, head])

    def loss(step: int) -> Tensor:
        y = torch.randint(0, 2, (batch, nodes))
        same = y[:, :, None] == y[:, None, :]
        edges = (torch.rand(batch, nodes, nodes) < torch.where(same, 0.6, 0.1)).float().triu(1)
        edges = edges + edges.transpose(1, 2) + torch.eye(nodes)
        known = (torch.rand(batch, nodes) < 0.3).float()
        h = into(torch.stack([known, known * y, torch.ones(batch, nodes)], -1))
        for one in blocks:
            h = one(h, edges)
        return F.cross_entropy(head(h).float().flatten(0, 1), y.flatten())

    return Task(model, loss)


def counts(batch: int = 16, busy: float = 1.0) -> Task:
    """Poisson regression with a network and a log link: rare events, and rates that are exponentials."""
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
    weights = torch.randn(6) * 0.6

    def loss(step: int) -> Tensor:
        x = torch.randn(batch, 6)
        seen = torch.poisson(busy * (x @ weights).clamp(max=4).exp())
        return F.poisson_nll_loss(model(x)[:, 0].float(), seen)

    return Task(model, loss)


def adapter(batch: int = 32, rank: int = 4, gain: float = 1.0) -> Task:
    """Low-rank adapters, one side zero at the start, beside frozen layers: new labels for known shapes."""
    frozen = [nn.Linear(144, 64).requires_grad_(False), nn.Linear(64, 64).requires_grad_(False)]
    down = nn.ModuleList(nn.Linear(f.in_features, rank, bias=False) for f in frozen)
    up = nn.ModuleList(nn.Linear(rank, f.out_features, bias=False) for f in frozen)
    for one in up:
        nn.init.zeros_(one.weight)
    head = nn.Linear(64, 4)
    model = nn.ModuleList([nn.ModuleList(frozen), down, up, head])

    def loss(step: int) -> Tensor:
        h, y = draw_shapes(batch, 0.3)
        h = h.flatten(1)
        for f, a, b in zip(frozen, down, up, strict=True):
            h = F.relu(f(h) + gain * b(a(h)))
        return F.cross_entropy(head(h).float(), (y + 1) % 4)

    return Task(model, loss)


def physics(batch: int = 32, weight: float = 1.0) -> Task:
    """A network that solves u'' = -4u from its residual and two values: gradients of gradients."""
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(step: int) -> Tensor:
        x = (2 * torch.rand(batch, 1)).requires_grad_(True)
        u = net(x).float()
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        ends = net(torch.tensor([[0.0], [0.7854]])).float()[:, 0]
        return (second + 4 * u).square().mean() + weight * (ends - torch.tensor([0.0, 1.0])).square().sum()

    return Task(net, loss)


def mixture(batch: int = 32, n: int = 3, floor: float = 0.01) -> Task:
    """A mixture density network of an S-curve; without a ``floor`` a component may collapse onto a point."""
    body, out = nn.Sequential(nn.Linear(1, 32), nn.Tanh()), nn.Linear(32, 3 * n)
    model = nn.ModuleList([body, out])

    def loss(step: int) -> Tensor:
        y = torch.rand(batch, 1)
        x = y + 0.3 * (6.28 * y).sin() + 0.05 * torch.randn(batch, 1)
        weight, mean, log_scale = out(body(x)).float().chunk(3, 1)
        scale = log_scale.exp() + floor
        each = -0.5 * ((y - mean) / scale).square() - scale.log()
        return -(weight.log_softmax(1) + each).logsumexp(1).mean()

    return Task(model, loss)


def ranker(batch: int = 16, length: int = 6, noise: float = 0.2) -> Task:
    """Learning to rank: lists of documents, the relevant ones first, by the softmax over a list."""
    net = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    true = torch.randn(10)

    def loss(step: int) -> Tensor:
        x = torch.randn(batch, length, 10)
        wanted = (x @ true + noise * torch.randn(batch, length)).softmax(-1)
        return -(wanted * net(x)[..., 0].float().log_softmax(-1)).sum(-1).mean()

    return Task(net, loss)


def tree(batch: int = 16, depth: int = 4, normed: bool = True) -> Task:
    """A network that folds a sequence pair by pair into one vector, the same weights at every level."""
    into, fold, head = nn.Linear(1, 24), nn.Linear(48, 24), nn.Linear(24, 1)
    norm = nn.LayerNorm(24) if normed else nn.Identity()
    model = nn.ModuleList([into, fold, norm, head])

    def loss(step: int) -> Tensor:
        x = torch.randn(batch, 2**depth, 1)
        h = into(x)
        for _ in range(depth):
            pairs = h.unflatten(1, (-1, 2))
            h = norm(F.relu(fold(pairs.flatten(2))) + pairs.sum(2))
        return F.mse_loss(head(h[:, 0])[:, 0].float(), x.amax((1, 2)))

    return Task(model, loss)


# --- runs -------------------------------------------------------------------------------------------------------------

DYING: tuple[Training, ...] = (
    _climb(adapter, 1e-3),
    _climb(adapter, 0.02, "sgd", "float32"),
    *_rates(_t(adapter, "SGD, gain of 8", gain=8.0), 0.3, 1.0),
    _climb(physics, 1e-3, "sgd", "float32"),
    _climb(physics, 1e-3, "adam", "float32", weight=30.0),
    *_rates(_t(physics, "SGD"), 0.05, 0.2),
    _climb(mixture, 1e-3),
    _climb(mixture, 0.003, "sgd", "float32", floor=0.0),
    _t(mixture, "no floor, SGD", lr=0.1, floor=0.0),
    _climb(ranker, 1e-3),
    _climb(ranker, 0.05, "sgd", "float32"),
    _t(ranker, "SGD, float16", lr=10.0, precision="float16"),
    _climb(tree, 1e-3, normed=False),
    _climb(tree, 0.001, "sgd", "float32", normed=False),
    *_rates(_t(tree, "no norm, SGD", normed=False), 0.02, 0.1),
    _climb(writer, 1e-3),
    _climb(writer, 0.05, "sgd", "float32"),
    _climb(writer, 1e-3, "adam", "float32", tied=True),
    _climb(segment, 1e-3, normed=False),
    _climb(segment, 0.02, "sgd", "float32", normed=False),
    *_rates(_t(segment, "no norm, SGD", normed=False), 1.0, 3.0),
    _climb(segment, 1e-3, "adam", "float32", normed=False, empty=0.3),
    _climb(towers, 1e-3, normed=False),
    _climb(towers, 0.02, "sgd", "float32", normed=False),
    _t(towers, "no norm, SGD", lr=0.5, normed=False),
    _climb(towers, 1e-3, "adam", "float32", learned=True),
    _climb(a2c, 1e-3, "sgd", "float32"),
    _climb(a2c, 1e-3),
    *_rates(_t(a2c, "SGD"), 0.03, 0.1),
    _t(a2c, "discount over 1", lr=0.01, discount=1.2),
    _climb(neighbors, 1e-3, normed=False),
    _climb(neighbors, 0.02, "sgd", "float32", normed=False),
    _t(neighbors, "no norm, SGD", lr=2.0, normed=False, layers=5),
    *_rates(_t(counts, "SGD"), 0.1, 0.3),
    _climb(counts, 1e-3),
    _climb(counts, 0.003, "sgd", "float32"),
    _t(counts, "busy, SGD", lr=0.02, busy=20.0),
)

CALM: tuple[Training, ...] = (
    Training(adapter),
    Training(adapter, "adapter, SGD in steps", optimizer="sgd", lr=0.05, clip=None, schedule="steps"),
    Training(adapter, "adapter, float16, batch of 4", knobs=(("batch", 4),), precision="float16", clip=None),
    Training(physics),
    Training(physics, "physics, heavy ends, no clipping", knobs=(("weight", 30.0),), clip=None, schedule="constant"),
    Training(physics, "physics, warm restarts, batch of 4", knobs=(("batch", 4),), schedule="restarts", lr=2e-3),
    Training(mixture, lr=2e-3),
    Training(mixture, "mixture, batch of 4, no clipping", knobs=(("batch", 4),), clip=None),
    Training(mixture, "mixture, RMSprop", optimizer="rmsprop", lr=5e-4, schedule="constant"),
    Training(ranker),
    Training(ranker, "ranker, SGD in steps", optimizer="sgd", lr=0.05, clip=None, schedule="steps"),
    Training(ranker, "ranker, float16, restarts", precision="float16", schedule="restarts", lr=3e-3),
    Training(tree),
    Training(tree, "tree, no norm", knobs=(("normed", False),), lr=5e-4),
    Training(tree, "tree, batch of 2, no clipping", knobs=(("batch", 2),), clip=None, schedule="constant"),
    Training(writer, lr=3e-3),
    Training(writer, "writer, tied, batch of 2", knobs=(("tied", True), ("batch", 2)), schedule="constant"),
    Training(writer, "writer, warm restarts, float16", lr=3e-3, schedule="restarts", precision="float16"),
    Training(segment),
    Training(segment, "segment, batch of 2, a third empty", knobs=(("batch", 2), ("empty", 0.3)), clip=None),
    Training(segment, "segment, no norm, float16", knobs=(("normed", False),), precision="float16"),
    Training(segment, "segment, SGD in steps", optimizer="sgd", lr=0.05, clip=None, schedule="steps"),
    Training(towers),
    Training(towers, "towers, learned temperature", knobs=(("learned", True),), lr=3e-3, clip=None),
    Training(towers, "towers, no norm, restarts", knobs=(("normed", False),), schedule="restarts", lr=2e-3),
    Training(a2c, clip=0.5, schedule="constant"),
    Training(a2c, "a2c, RMSprop", optimizer="rmsprop", lr=7e-4, clip=0.5),
    Training(a2c, "a2c, no clipping, long rollouts", clip=None, lr=5e-4, knobs=(("horizon", 12),)),
    Training(neighbors),
    Training(neighbors, "neighbors, batch of 2", knobs=(("batch", 2),), clip=None, lr=3e-3, schedule="constant"),
    Training(neighbors, "neighbors, no norm, float16", knobs=(("normed", False),), precision="float16"),
    Training(counts),
    Training(counts, "counts, batch of 4", knobs=(("batch", 4),), clip=None, schedule="constant"),
    Training(counts, "counts, busy, SGD in steps", optimizer="sgd", lr=2e-4, clip=1.0, knobs=(("busy", 5.0),)),
    Training(counts, "counts, warm restarts", schedule="restarts", lr=5e-3),
)

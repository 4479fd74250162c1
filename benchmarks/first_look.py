"""Families of small trainings, dying and healthy, that were written after the forecast was last changed.

    for training in DYING: ...
    for training in CALM: ...

Rates of dying runs were set by whether a run dies and by nothing else; healthy runs are as they were written. No curve
of them was looked at. Once they have been, they belong with those in `unseen.py`, and new ones come here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from dying import _climb, _t
from torch import Tensor, nn
from trainings import Task, Training, draw_shapes

# --- tasks ------------------------------------------------------------------------------------------------------------


class Cross(nn.Module):
    """Attention of one sequence on another, or on itself, with residuals; normalized after, before, or not at all."""

    def __init__(self, width: int, scaled: bool, norm: str) -> None:
        super().__init__()
        self.norm = nn.Identity() if norm == "none" else nn.LayerNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.scale, self.post = (width**-0.5 if scaled else 1.0), norm == "post"

    def forward(self, x: Tensor, to: Tensor, mask: Tensor | None = None) -> Tensor:
        h = x if self.post else self.norm(x)
        k, v = self.kv(to).chunk(2, -1)
        scores = self.q(h) @ k.transpose(-1, -2) * self.scale
        scores = scores if mask is None else scores.masked_fill(mask, -math.inf)
        x = x + self.out(torch.softmax(scores, -1) @ v)
        x = x + self.mlp(self.norm(x) if not self.post else x)
        return self.norm(x) if self.post else x


def translator(batch: int = 16, scaled: bool = True, norm: str = "pre", flipped: float = 0.0) -> Task:
    """An encoder and a decoder that turn sequences around; ``flipped`` is the share of wrong symbols."""
    n, width = 10, 32
    token, place, head = nn.Embedding(12, width), nn.Parameter(0.1 * torch.randn(n, width)), nn.Linear(width, 12)
    encode, own, cross = (nn.ModuleList(Cross(width, scaled, norm) for _ in range(2)) for _ in range(3))
    model = nn.ModuleList([token, nn.ParameterList([place]), encode, own, cross, head])
    causal = torch.ones(n, n, dtype=torch.bool).triu(1)

    def loss(step: int) -> Tensor:
        x = torch.randint(1, 12, (batch, n))
        y = x.flip(1)
        h = token(x) + model[1][0]
        for one in encode:
            h = one(h, h)
        said = token(torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)) + model[1][0]
        for a, b in zip(own, cross, strict=True):
            said = b(a(said, said, causal), h)
        wrong = torch.rand(y.shape) < flipped
        y = torch.where(wrong, torch.randint(1, 12, y.shape), y)
        return F.cross_entropy(head(said).float().flatten(0, 1), y.flatten())

    return Task(model, loss)


def teacher(batch: int = 32, slow: float = 0.01, gain: float = 1.0, normed: bool = True) -> Task:
    """A student that follows the average of its own past on other views; targets too large by a ``gain`` drift away."""

    def body() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 16))

    student, guide, guess = body(), body().requires_grad_(False), nn.Linear(16, 16)
    guide.load_state_dict(student.state_dict())
    model = nn.ModuleList([student, guess])

    def loss(step: int) -> Tensor:
        x, _ = draw_shapes(batch, 0.0)
        with torch.no_grad():
            for old, new in zip(guide.parameters(), student.parameters(), strict=True):
                old.lerp_(new, slow)
            wanted = gain * guide(x + 0.2 * torch.randn_like(x)).float()
        said = guess(student(x + 0.2 * torch.randn_like(x))).float()
        if normed:
            said, wanted = F.normalize(said, dim=1), F.normalize(wanted, dim=1)
        return F.mse_loss(said, wanted) * (16 if normed else 1)

    return Task(model, loss)


def states(batch: int = 16, length: int = 40, bounded: bool = True, width: int = 16) -> Task:
    """A linear state space: each state is multiplied by a learned factor per step; unbounded, it may exceed 1."""
    into, out = nn.Linear(1, width), nn.Linear(width, 1)
    raw = nn.Parameter(torch.linspace(1.0, 4.0, width) if bounded else torch.linspace(0.7, 0.98, width))
    model = nn.ModuleList([into, out, nn.ParameterList([raw])])

    def loss(step: int) -> Tensor:
        x = torch.randn(batch, length, 1)
        keep = model[2][0].sigmoid() if bounded else model[2][0]
        u, h, said = into(x), torch.zeros(batch, width), []
        for t in range(length):
            h = keep * h + u[:, t]
            said.append(out(h)[:, 0])
        wanted = x[..., 0].unfold(1, 8, 1).mean(-1) * 2.8
        return F.mse_loss(torch.stack(said, 1)[:, 7:].float(), wanted)

    return Task(model, loss)


def codec(batch: int = 16, beta: float = 1.0, grows: float = 1.0, bounded: bool = True, learned: bool = False) -> Task:
    """A convolutional VAE; the weight of its KL term may grow per step, its noise may be learned without a floor."""
    encoder = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16))
    decoder = nn.Sequential(
        nn.Linear(8, 288), nn.ReLU(), nn.Unflatten(1, (8, 6, 6)), nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1)
    )
    noise = nn.ParameterList([nn.Parameter(torch.zeros(()), requires_grad=learned)])
    model = nn.ModuleList([encoder, decoder, noise])

    def loss(step: int) -> Tensor:
        x, _ = draw_shapes(batch, 0.0)
        mean, log_var = encoder(x).float().chunk(2, 1)
        log_var = log_var.clamp(-8, 8) if bounded else log_var
        again = decoder(mean + (0.5 * log_var).exp() * torch.randn_like(mean)).float()
        scale = noise[0].clamp(min=-4) if bounded else noise[0]
        off = 0.5 * ((x - again) / scale.exp()).square() + scale
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp())
        return (off.sum() + beta * grows**step * kl.sum()) / batch

    return Task(model, loss)


def denoiser(batch: int = 16, clamp: float = 20.0, normed: bool = True) -> Task:
    """Diffusion of signals by a residual network, weighted by the signal-to-noise ratio up to a ``clamp``."""
    into, out = nn.Conv1d(2, 16, 5, padding=2), nn.Conv1d(16, 1, 5, padding=2)
    blocks = nn.ModuleList(
        nn.Sequential(
            nn.GroupNorm(4, 16) if normed else nn.Identity(),
            nn.SiLU(),
            nn.Conv1d(16, 16, 5, padding=2),
            nn.SiLU(),
            nn.Conv1d(16, 16, 5, padding=2),
        )
        for _ in range(3)
    )
    model = nn.ModuleList([into, blocks, out])

    def loss(step: int) -> Tensor:
        t, speed = torch.linspace(0, 6, 24), 1 + 2 * torch.rand(batch, 1, 1)
        x = (speed * t + 6 * torch.rand(batch, 1, 1)).sin()
        level = torch.rand(batch, 1, 1) ** 2
        h = into(torch.cat([(1 - level).sqrt() * x + level.sqrt() * torch.randn_like(x), level.expand_as(x)], 1))
        for block in blocks:
            h = h + block(h)
        weight = ((1 - level) / (level + 1e-5)).clamp(max=clamp)
        return (weight * (out(h).float() - x).square()).mean()

    return Task(model, loss)


def soft_critic(batch: int = 32, discount: float = 0.95, slow: float = 0.02, reward: float = 1.0) -> Task:
    """A critic and a stochastic actor with a learned entropy bonus, on a mass that is pushed to the middle."""

    def value() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))

    critic, target, policy = value(), value().requires_grad_(False), nn.Sequential(nn.Linear(2, 32), nn.ReLU())
    target.load_state_dict(critic.state_dict())
    heads, bonus = nn.Linear(32, 2), nn.ParameterList([nn.Parameter(torch.tensor(-2.0))])
    player = nn.ModuleList([policy, heads, bonus])
    state = torch.randn(batch, 2)

    def act(s: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = heads(policy(s)).float().chunk(2, 1)
        log_std = log_std.clamp(-4, 1)
        raw = mean + log_std.exp() * torch.randn_like(mean)
        likely = -0.5 * ((raw - mean) / log_std.exp()).square() - log_std
        return raw.tanh(), (likely - (1 - raw.tanh().square() + 1e-4).log())[:, 0]

    def judge(step: int) -> Tensor:
        nonlocal state
        with torch.no_grad():
            push, _ = act(state)
            after = torch.cat([state[:, :1] + 0.1 * state[:, 1:], state[:, 1:] + 0.3 * push], 1)
            after = torch.where((torch.rand(batch, 1) < 0.05) | (after.abs() > 4), torch.randn(batch, 2), after)
            then, likely = act(after)
            future = target(torch.cat([after, then], 1))[:, 0].float() - bonus[0].exp() * likely
            wanted = -reward * state.square().sum(1) + discount * future
            for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                old.lerp_(new, slow)
        said, state = critic(torch.cat([state, push], 1))[:, 0], after
        return F.mse_loss(said.float(), wanted)

    def improve(step: int) -> Tensor:
        push, likely = act(state)
        gained = critic(torch.cat([state, push], 1))[:, 0].float() - bonus[0].exp().detach() * likely
        return -gained.mean() - bonus[0] * (likely.detach() - 1.0).mean()

    return Task(critic, judge, [(critic, judge), (player, improve)])


def rollouts(batch: int = 16, epochs: int = 4, clipped: bool = True, gain: float = 1.0) -> Task:
    """A GRU that is rewarded for writing rising sequences; each batch is used again, the ratio clipped or not."""
    token, gru, head = nn.Embedding(9, 24), nn.GRU(24, 24, batch_first=True), nn.Linear(24, 8)
    model = nn.ModuleList([token, gru, head])
    kept: list[Tensor] = []

    def likely(words: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.cat([torch.full_like(words[:, :1], 8), words[:, :-1]], 1)
        logits = head(gru(token(before))[0]).float().log_softmax(-1)
        return logits.gather(2, words[..., None])[..., 0], -(logits.exp() * logits).sum(-1)

    @torch.no_grad()
    def write() -> None:
        word, h, words = torch.full((batch, 1), 8), None, []
        for _ in range(8):
            o, h = gru(token(word), h)
            word = torch.multinomial(torch.nan_to_num(head(o)[:, 0].float().softmax(-1), nan=0.125) + 1e-9, 1)
            words.append(word)
        text = torch.cat(words, 1)
        score = gain * (text[:, 1:] > text[:, :-1]).float().sum(1)
        kept[:] = [text, likely(text)[0], (score - score.mean()) / (score.std() + 1e-6) * gain]

    def loss(step: int) -> Tensor:
        if step % epochs == 0:
            write()
        text, old, score = kept
        new, spread = likely(text)
        ratio = (new - old).exp()
        gained = ratio * score[:, None]
        if clipped:
            gained = torch.minimum(gained, ratio.clamp(0.8, 1.2) * score[:, None])
        return -gained.mean() - 0.01 * spread.mean()

    return Task(model, loss)


def dual(batch: int = 32, grows: float = 1.0, rate: float = 0.01, most: float = 100.0) -> Task:
    """Classification under a constraint, by a multiplier that rises while it is broken; its penalty may grow, too."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 48), nn.Tanh(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 4))
    multiplier, penalty = 0.0, 0.1

    def loss(step: int) -> Tensor:
        nonlocal multiplier, penalty
        x, y = draw_shapes(batch, 0.3)
        logits = net(x).float()
        broken = logits.square().mean() - 0.5  # scores are to stay small
        multiplier = min(most, max(0.0, multiplier + rate * float(broken.detach())))
        penalty = min(most, penalty * grows)
        return F.cross_entropy(logits, y) + multiplier * broken + penalty * F.relu(broken).square()

    return Task(net, loss)


def adapting(batch: int = 8, inner: float = 0.1, steps: int = 3, learned: bool = False) -> Task:
    """Meta-learning of sine waves: gradients through a few steps of training, with a fixed or a learned inner rate."""
    shapes = [(32, 1), (32,), (32, 32), (32,), (1, 32), (1,)]
    weights = [nn.Parameter(torch.randn(s) / math.sqrt(s[-1]) if len(s) > 1 else torch.zeros(s)) for s in shapes]
    pace = nn.Parameter(torch.tensor(math.log(inner)), requires_grad=learned)
    model = nn.ModuleList([nn.ParameterList([*weights, pace])])

    def run(ws: list[Tensor], x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x, ws[0], ws[1]))
        return F.linear(torch.tanh(F.linear(h, ws[2], ws[3])), ws[4], ws[5]).float()

    def loss(step: int) -> Tensor:
        total = torch.zeros(())
        for _ in range(batch // 2):
            high, shift = 0.5 + 2 * torch.rand(()), 3 * torch.rand(())
            x = 6 * torch.rand(16, 1) - 3
            y = high * (x + shift).sin()
            ws: list[Tensor] = list(model[0][:6])
            for _ in range(steps):
                slopes = torch.autograd.grad(F.mse_loss(run(ws, x[:8]), y[:8]), ws, create_graph=True)
                ws = [w - model[0][6].exp() * s for w, s in zip(ws, slopes, strict=True)]
            total = total + F.mse_loss(run(ws, x[8:]), y[8:])
        return total / (batch // 2)

    return Task(model, loss)


def hyper(batch: int = 32, scale: float = 0.1, normed: bool = True) -> Task:
    """A network that writes the weights of another: what two learn is multiplied."""
    context = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16 * 8 + 16))
    into, head = nn.Linear(6, 8), nn.Linear(16, 1)
    norm = nn.LayerNorm(16) if normed else nn.Identity()
    model = nn.ModuleList([context, into, norm, head])
    mix = torch.randn(4, 6)

    def loss(step: int) -> Tensor:
        z, x = torch.randn(batch, 4), torch.randn(batch, 6)
        w, b = (scale * context(z)).split([128, 16], 1)
        h = torch.einsum("bij,bj->bi", w.unflatten(1, (16, 8)), F.relu(into(x))) + b
        return F.mse_loss(head(F.relu(norm(h)))[:, 0].float(), ((z @ mix) * x).sum(1) / 2)

    return Task(model, loss)


# --- runs -------------------------------------------------------------------------------------------------------------

DYING: tuple[Training, ...] = (
    _t(translator, "no 1/√d, float16, long warm-up", "adamw", 0.05, "late", precision="float16", scaled=False),
    _t(translator, "no norm, SGD", lr=1.0, schedule="late", norm="none"),
    _climb(translator, 1e-3, norm="none", flipped=0.3),
    _climb(translator, 0.02, "sgd", "float32", norm="none", scaled=False),
    _t(teacher, "targets grow, SGD", lr=2.0, normed=False, gain=2.0, slow=0.5),
    _t(teacher, "targets grow, Adam, float16", "adam", 0.01, precision="float16", normed=False, gain=3.0, slow=1.0),
    _climb(teacher, 0.02, "sgd", "float32", normed=False),
    _t(states, "unbounded, SGD", lr=0.02, schedule="late", bounded=False),
    _climb(states, 1e-3, "adam", "float32", bounded=False),
    _t(codec, "KL weight grows, SGD", lr=1e-4, grows=1.03, bounded=False),
    _climb(codec, 1e-3, "adam", "float32", bounded=False),
    _climb(codec, 1e-5, "sgd", "float32", bounded=False),
    _t(denoiser, "no clamp, SGD, long warm-up", lr=1e-3, schedule="late", clamp=1e6, normed=False),
    _climb(denoiser, 1e-3, normed=False),
    _climb(denoiser, 1e-3, "sgd", "float32", normed=False),
    _t(soft_critic, "chasing itself, SGD", lr=0.02, slow=1.0, discount=1.02),
    _t(soft_critic, "rewards of 100, SGD", lr=1e-3, reward=100.0, slow=1.0),
    _climb(soft_critic, 1e-3, "sgd", "float32"),
    _t(dual, "penalty grows, SGD", lr=0.02, grows=1.02, most=1e30),
    _t(dual, "multiplier rises, SGD", lr=1.0, schedule="late", rate=10.0, most=1e30),
    _climb(dual, 0.01, "sgd", "float32"),
    _t(adapting, "inner rate learned, SGD", lr=0.1, schedule="late", learned=True),
    _climb(adapting, 1e-3, "sgd", "float32"),
    _t(hyper, "no norm, SGD, long warm-up", lr=0.5, schedule="late", normed=False, scale=1.0),
    _climb(hyper, 0.01, normed=False),
    _climb(hyper, 1e-3, "sgd", "float32", normed=False),
)

CALM: tuple[Training, ...] = (
    Training(translator),
    Training(translator, "translator, normalized after, 10 % wrong", knobs=(("norm", "post"), ("flipped", 0.1))),
    Training(translator, "translator, float16, restarts", precision="float16", schedule="restarts", clip=None),
    Training(teacher),
    Training(teacher, "teacher, not normalized, batch of 8", knobs=(("normed", False), ("batch", 8)), clip=None),
    Training(teacher, "teacher, fast average, SGD", optimizer="sgd", lr=0.05, clip=None, knobs=(("slow", 0.1),)),
    Training(states),
    Training(states, "states, unbounded, clipped", knobs=(("bounded", False),), schedule="late"),
    Training(states, "states, batch of 2", knobs=(("batch", 2),), clip=None, schedule="constant"),
    Training(codec),
    Training(codec, "codec, learned noise", knobs=(("learned", True),), clip=None, lr=2e-3),
    Training(codec, "codec, float16, restarts", precision="float16", clip=None, schedule="restarts"),
    Training(denoiser),
    Training(denoiser, "denoiser, batch of 2, no clipping", knobs=(("batch", 2),), clip=None, schedule="constant"),
    Training(denoiser, "denoiser, no norm, float16", knobs=(("normed", False),), precision="float16"),
    Training(soft_critic, optimizer="adam", clip=None, schedule="constant"),
    Training(soft_critic, "soft critic, rewards of 10", optimizer="adam", knobs=(("reward", 10.0),), schedule="late"),
    Training(rollouts, lr=3e-3, clip=0.5, schedule="constant"),
    Training(rollouts, "rollouts, batch of 4, no clipping", optimizer="adam", knobs=(("batch", 4),), clip=None),
    Training(dual),
    Training(dual, "dual, SGD in steps", optimizer="sgd", lr=0.02, clip=None, schedule="steps"),
    Training(dual, "dual, penalty grows to 10", knobs=(("grows", 1.02), ("most", 10.0)), clip=None),
    Training(adapting, clip=None),
    Training(adapting, "adapting, learned inner rate", knobs=(("learned", True),), schedule="restarts"),
    Training(hyper),
    Training(hyper, "hyper, no norm, batch of 4", knobs=(("normed", False), ("batch", 4)), schedule="constant"),
    Training(hyper, "hyper, float16, SGD", optimizer="sgd", lr=0.02, clip=None, precision="float16"),
)

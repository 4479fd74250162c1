"""Small real trainings of many kinds: what healthy runs look like, with all their usual noise.

    for training in HEALTHY:
        for step, loss, norm in train(training, seed=0): ...

Nothing here is a curve that was drawn: models learn from data made on the spot, with small batches, warm restarts,
curricula that change, label noise and losses that reach their floor. `scripts/spikes.py` judges the guard's limits
by them.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 3000


@dataclass
class Task:
    """A model and its loss at a step; several optimizers take turns where ``parts`` says so."""

    model: nn.Module
    loss: Callable[[int], Tensor]
    parts: list[tuple[nn.Module, Callable[[int], Tensor]]] = field(default_factory=list)


@dataclass(frozen=True)
class Training:
    """A task with its settings."""

    task: Callable[..., Task]
    name: str = ""
    optimizer: str = "adamw"
    lr: float = 1e-3
    schedule: str = "cosine"
    clip: float | None = 1.0
    knobs: tuple[tuple[str, Any], ...] = ()
    precision: str = "float32"

    def __str__(self) -> str:
        return self.name or self.task.__name__

    @property
    def family(self) -> str:
        return self.task.__name__


def train(training: Training, seed: int, steps: int = STEPS) -> Iterator[tuple[int, float, float]]:
    """Train, and yield (step, loss, gradient norm before clipping) of every update of the first part."""
    torch.manual_seed(seed)
    task = training.task(**dict(training.knobs))
    parts = task.parts or [(task.model, task.loss)]
    optimizers = [make_optimizer(training, model) for model, _ in parts]
    for step in range(steps):
        for i, ((model, loss_of), optimizer) in enumerate(zip(parts, optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = training.lr * rate(training.schedule, step, steps)
            loss = loss_of(step)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(model.parameters(), training.clip or math.inf)
            optimizer.step()
            if i == 0:
                yield step, loss.item(), norm.item()


def make_optimizer(training: Training, model: nn.Module) -> torch.optim.Optimizer:
    if training.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=training.lr, momentum=0.9)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}[training.optimizer]
    return kind(model.parameters(), lr=training.lr)


def rate(schedule: str, step: int, steps: int) -> float:
    """The factor on the learning rate."""
    warm = min(1.0, (step + 1) / 100)
    match schedule:
        case "constant":
            return warm
        case "restarts":  # cosine with warm restarts: the rate jumps back up five times
            return 0.5 + 0.5 * math.cos(math.pi * (step % (steps // 5)) / (steps // 5))
        case "late":  # a warm-up over two thirds of the run: the rate at which it breaks comes slowly
            return min(1.0, (step + 1) / 400)
        case "climbing":  # doubled every forty steps: a warm-up that nobody has set an end to
            return 2.0 ** (step / 40)
        case "steps":  # divided by ten at half time and at three quarters
            return warm * 0.1 ** ((step > steps // 2) + (step > 3 * steps // 4))
        case _:
            return warm * (0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))


# --- tasks ------------------------------------------------------------------------------------------------------------


def draw_shapes(n: int, noise: float) -> tuple[Tensor, Tensor]:
    """Images of a bar, a cross, a frame or a dot, somewhere, in noise."""
    kind = torch.randint(0, 4, (n,))
    x, y = torch.randint(2, 10, (2, n))
    grid = torch.arange(12)
    dx, dy = (grid[None, :, None] - x[:, None, None]).abs(), (grid[None, None, :] - y[:, None, None]).abs()
    near = torch.maximum(dx, dy)
    pictures = torch.stack([(dx == 0) & (dy < 3), ((dx == 0) | (dy == 0)) & (near < 3), near == 2, near < 2])
    image = pictures[kind, torch.arange(n)].float()
    return image[:, None] + noise * torch.randn(n, 1, 12, 12), kind


def image(batch: int = 32, noise: float = 0.3, flipped: float = 0.0) -> Task:
    """Classification with BatchNorm; ``flipped`` is the share of wrong labels."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 4),
    )

    def loss(step: int) -> Tensor:
        x, y = draw_shapes(batch, noise)
        wrong = torch.rand(batch) < flipped
        return F.cross_entropy(model(x), torch.where(wrong, torch.randint(0, 4, (batch,)), y))

    return Task(model, loss)


class Transformer(nn.Module):
    """A small causal transformer over bytes."""

    def __init__(self, width: int = 32, layers: int = 2, context: int = 48) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(128, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        h = self.token(x) + self.place(torch.arange(n))
        return self.head(self.blocks(h, mask=mask, is_causal=True))


def text(batch: int = 8, curriculum: bool = False, half: bool = False, switch: int = STEPS // 3) -> Task:
    """Next byte of Python's own source; a curriculum makes the texts longer at the step ``switch``."""
    data = torch.tensor([b for b in inspect.getsource(json.decoder).encode() if b < 128])
    model = Transformer()

    def loss(step: int) -> Tensor:
        n = 12 if curriculum and step < switch else 40
        at = torch.randint(0, len(data) - n - 1, (batch,))[:, None] + torch.arange(n + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(data[at[:, :-1]])
        return F.cross_entropy(logits.float().flatten(0, 1), data[at[:, 1:]].flatten())

    return Task(model, loss)


def recurrent(batch: int = 16, length: int = 16) -> Task:
    """An LSTM that adds up the marked numbers of a sequence: flat for long, then it understands."""
    lstm, head = nn.LSTM(2, 32, batch_first=True), nn.Linear(32, 1)
    model = nn.ModuleList([lstm, head])

    def loss(step: int) -> Tensor:
        values, marks = torch.rand(batch, length), (torch.rand(batch, length) < 0.2).float()
        h, _ = lstm(torch.stack([values, marks], -1))
        return F.mse_loss(head(h[:, -1])[:, 0], (values * marks).sum(1))

    return Task(model, loss)


def diffusion(batch: int = 32, weighted: bool = False) -> Task:
    """Noise prediction on points of two moons; ``weighted`` by the signal-to-noise ratio, as some papers do."""
    model = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def loss(step: int) -> Tensor:
        angle, side = math.pi * torch.rand(batch), torch.randint(0, 2, (batch,)).float()
        x = torch.stack([angle.cos() + side, angle.sin() * (1 - 2 * side)], 1) + 0.05 * torch.randn(batch, 2)
        t = torch.rand(batch, 1)
        keep = torch.cos(0.5 * math.pi * t).clamp(min=0.02)
        noise = torch.randn_like(x)
        guess = model(torch.cat([keep * x + (1 - keep**2).sqrt() * noise, t], 1))
        weight = (keep**2 / (1 - keep**2 + 0.01)).clamp(max=50) if weighted else 1.0
        return (weight * (guess - noise) ** 2).mean()

    return Task(model, loss)


def gan(batch: int = 32, hinge: bool = False) -> Task:
    """A ring of eight Gaussians; discriminator and generator take turns."""
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def real() -> Tensor:
        angle = torch.randint(0, 8, (batch,)) * (math.pi / 4)
        return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(batch, 2)

    def judge(step: int) -> Tensor:
        yes, no = critic(real()), critic(maker(torch.randn(batch, 4)).detach())
        return (F.relu(1 - yes) + F.relu(1 + no)).mean() if hinge else (F.softplus(-yes) + F.softplus(no)).mean()

    def fool(step: int) -> Tensor:
        said = critic(maker(torch.randn(batch, 4)))
        return -said.mean() if hinge else F.softplus(-said).mean()

    return Task(critic, judge, [(critic, judge), (maker, fool)])


def balance(state: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
    """One step of many cart-poles; those that fall start again."""
    x, v, a, w = state.unbind(1)
    force = torch.where(push > 0, 10.0, -10.0)
    part = (force + 0.05 * w**2 * a.sin()) / 1.1
    turn = (9.8 * a.sin() - a.cos() * part) / (0.5 * (4 / 3 - 0.1 * a.cos() ** 2 / 1.1))
    move = part - 0.05 * turn * a.cos() / 1.1
    after = torch.stack([x + 0.02 * v, v + 0.02 * move, a + 0.02 * w, w + 0.02 * turn], 1)
    fell = (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.21)
    return torch.where(fell[:, None], 0.05 * torch.randn_like(after), after), fell


def ppo(actors: int = 16, horizon: int = 32, epochs: int = 4) -> Task:
    """Proximal policy optimization on cart-poles: each rollout is used for several updates."""
    body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
    model = nn.ModuleList([body, nn.Linear(32, 2), nn.Linear(32, 1)])
    state = 0.05 * torch.randn(actors, 4)
    kept: list[Tensor] = []

    @torch.no_grad()
    def collect() -> None:
        nonlocal state
        rows = []
        for _ in range(horizon):
            h = body(state)
            choice = torch.distributions.Categorical(logits=model[1](h))
            push = choice.sample()
            after, fell = balance(state, push)
            rows.append((state, push, choice.log_prob(push), 1.0 - fell.float(), fell, model[2](h)[:, 0]))
            state = after
        s, p, logp, reward, fell, value = (torch.stack(column) for column in zip(*rows, strict=True))
        total, returns = model[2](body(state))[:, 0], []
        for i in reversed(range(horizon)):
            total = reward[i] + 0.99 * total * ~fell[i]
            returns.append(total)
        target = torch.stack(returns[::-1])
        gain = target - value
        kept[:] = [t.flatten(0, 1) for t in (s, p, logp, target, (gain - gain.mean()) / (gain.std() + 1e-8))]

    def loss(step: int) -> Tensor:
        if step % epochs == 0:
            collect()
        s, push, old, target, gain = kept
        h = body(s)
        choice = torch.distributions.Categorical(logits=model[1](h))
        ratio = (choice.log_prob(push) - old).exp()
        gained = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return F.mse_loss(model[2](h)[:, 0], target) * 0.01 - gained - 0.01 * choice.entropy().mean()

    return Task(model, loss)


def q_learning(batch: int = 32) -> Task:
    """Q-learning on cart-poles with a target network that jumps every 250 steps."""
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    target = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).requires_grad_(False)
    state = 0.05 * torch.randn(16, 4)
    memory: list[tuple[Tensor, ...]] = []

    def loss(step: int) -> Tensor:
        nonlocal state
        if step % 250 == 0:
            target.load_state_dict(model.state_dict())
        with torch.no_grad():
            push = torch.where(torch.rand(16) < 0.2, torch.randint(0, 2, (16,)), model(state).argmax(1))
            after, fell = balance(state, push)
            memory.append((state, push, 1.0 - fell.float(), fell, after))
            del memory[:-500]
            state = after
            rows = [memory[int(i)] for i in torch.randint(0, len(memory), (batch // 16,))]
            s, p, reward, fell, after = (torch.cat(column) for column in zip(*rows, strict=True))
            wanted = reward + 0.99 * target(after).amax(1) * ~fell
        return F.smooth_l1_loss(model(s).gather(1, p[:, None])[:, 0], wanted)

    return Task(model, loss)


def vae(batch: int = 16) -> Task:
    """A variational autoencoder of the shapes."""
    encoder, decoder = nn.Sequential(nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 16)), nn.Linear(8, 64)
    out = nn.Linear(64, 144)
    model = nn.ModuleList([encoder, decoder, out])

    def loss(step: int) -> Tensor:
        x = draw_shapes(batch, 0.0)[0].flatten(1)
        mean, log_var = encoder(x).chunk(2, 1)
        z = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        again = F.binary_cross_entropy_with_logits(out(decoder(z).relu()), x, reduction="sum") / batch
        return again - 0.5 * (1 + log_var - mean**2 - log_var.exp()).sum() / batch

    return Task(model, loss)


def contrastive(batch: int = 32, temperature: float = 0.07) -> Task:
    """Two noisy views of an image find each other among the others of the batch."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 16))

    def loss(step: int) -> Tensor:
        x, _ = draw_shapes(batch, 0.0)
        a, b = (F.normalize(model(x + 0.3 * torch.randn_like(x)), dim=1) for _ in range(2))
        return F.cross_entropy(a @ b.T / temperature, torch.arange(batch))

    return Task(model, loss)


def ctc(batch: int = 8) -> Task:
    """Sequences of strokes to labels, by CTC: near zero at the end, with single hard samples."""
    lstm, head = nn.LSTM(8, 32, batch_first=True, bidirectional=True), nn.Linear(64, 6)
    model = nn.ModuleList([lstm, head])
    glyphs = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(7))

    def loss(step: int) -> Tensor:
        labels = torch.randint(0, 5, (batch, 5))
        x = glyphs[labels].flatten(1, 2) + 0.8 * torch.randn(batch, 15, 8)
        logits = head(lstm(x)[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, labels + 1, torch.full((batch,), 15), torch.full((batch,), 5))

    return Task(model, loss)


def regression(batch: int = 8, freedom: float = 2.5) -> Task:
    """Targets with heavy tails under squared error: now and then a batch is far off, and is meant to be."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    tails = torch.distributions.StudentT(freedom)

    def loss(step: int) -> Tensor:
        x = torch.randn(batch, 4)
        return F.mse_loss(model(x)[:, 0], (x.sin().sum(1)) + 0.3 * tails.sample((batch,)))

    return Task(model, loss)


def finetune(batch: int = 8, rows: int = 256) -> Task:
    """A model that knows the task learns a small set by heart, wrong labels included: the loss ends at its floor."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    start = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(300):
        x, y = draw_shapes(64, 0.3)
        start.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        start.step()
    x, y = draw_shapes(rows, 0.3)
    y = torch.where(torch.rand(rows) < 0.1, torch.randint(0, 4, (rows,)), y)

    def loss(step: int) -> Tensor:
        at = torch.randint(0, rows, (batch,))
        return F.cross_entropy(model(x[at] + 0.1 * torch.randn(batch, 1, 12, 12)), y[at])

    return Task(model, loss)


def rare(batch: int = 16, share: float = 0.002) -> Task:
    """A class that comes once in many batches: nearly all losses are tiny, one in thirty is not."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def loss(step: int) -> Tensor:
        y = (torch.rand(batch) < share).long()
        return F.cross_entropy(model(torch.randn(batch, 8) + 0.8 * y[:, None]), y)

    return Task(model, loss)


HEALTHY = (
    Training(image),
    Training(image, "image, SGD in steps", optimizer="sgd", lr=0.05, schedule="steps", clip=None),
    Training(image, "image, batch of 4", knobs=(("batch", 4),)),
    Training(image, "image, warm restarts", schedule="restarts", lr=3e-3),
    Training(image, "image, 30 % wrong labels", knobs=(("flipped", 0.3),)),
    Training(text),
    Training(text, "text, warm restarts", schedule="restarts", lr=3e-3),
    Training(text, "text, batch of 1", knobs=(("batch", 1),)),
    Training(text, "text, longer texts later", knobs=(("curriculum", True),)),
    Training(text, "text, bf16", knobs=(("half", True),)),
    Training(recurrent, lr=3e-3),
    Training(recurrent, "recurrent, no clipping", lr=3e-3, clip=None, schedule="constant"),
    Training(diffusion),
    Training(diffusion, "diffusion, weighted", knobs=(("weighted", True),)),
    Training(diffusion, "diffusion, batch of 4", knobs=(("batch", 4),), schedule="constant"),
    Training(gan, optimizer="adam", clip=None, schedule="constant"),
    Training(gan, "gan, hinge", optimizer="adam", clip=None, schedule="constant", knobs=(("hinge", True),)),
    Training(gan, "gan, RMSprop", optimizer="rmsprop", lr=5e-4, clip=None),
    Training(ppo, lr=3e-3, clip=0.5),
    Training(ppo, "ppo, 10 epochs", lr=1e-3, clip=0.5, knobs=(("epochs", 10),)),
    Training(ppo, "ppo, short rollouts", lr=1e-3, clip=None, knobs=(("horizon", 8),)),
    Training(q_learning, clip=None, schedule="constant"),
    Training(q_learning, "q_learning, 5e-3", lr=5e-3, clip=10.0, schedule="constant"),
    Training(vae),
    Training(contrastive),
    Training(contrastive, "contrastive, cold", knobs=(("temperature", 0.02),), lr=3e-3),
    Training(ctc, lr=3e-3),
    Training(ctc, "ctc, warm restarts", lr=5e-3, schedule="restarts", clip=5.0),
    Training(regression),
    Training(regression, "regression, batch of 2", knobs=(("batch", 2),), clip=None),
    Training(finetune, lr=3e-4),
    Training(finetune, "finetune, batch of 1", lr=1e-3, knobs=(("batch", 1),)),
    Training(rare, clip=None),
    Training(rare, "rare, SGD", optimizer="sgd", lr=0.05, clip=None, schedule="constant"),
)

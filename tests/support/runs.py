"""Small training runs with faults that can be placed exactly, and one digest over all of a run's state."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nanproof import Guard, Policy
from nanproof.guard import Records, Watch

torch.set_num_threads(1)

FAULTS = {"nan": float("nan"), "+inf": float("inf"), "-inf": float("-inf"), "spike": 1e5}


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor
    fault: str | None = None
    """What goes wrong with this batch: a key of FAULTS at the loss, or "grad:" and such a key."""


class Net(nn.Module):
    """Everything that makes exactness hard: batch statistics, dropout, a counter buffer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(width, 4, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def make_batches(n: int, seed: int = 0, size: int = 6) -> list[Batch]:
    g = torch.Generator().manual_seed(seed)
    return [Batch(torch.randn(size, 8, generator=g), torch.randint(0, 4, (size,), generator=g)) for _ in range(n)]


def with_faults(batches: list[Batch], faults: dict[int, str]) -> list[Batch]:
    """Insert bad copies before the given positions, so that removing them leaves the clean list."""
    found: list[Batch] = []
    for i, batch in enumerate(batches):
        if i in faults:
            found.append(replace(batches[(i + 1) % len(batches)], fault=faults[i]))
        found.append(batch)
    return found


class _Break(torch.autograd.Function):
    """Passes values through; in the backward pass one gradient element becomes ``value`` or grows by it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        broken = grads[0].clone()
        broken.view(-1)[0] = ctx.value * 1e3 if ctx.value == FAULTS["spike"] else ctx.value
        return broken, None


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch.x)
    fault = batch.fault
    if fault and fault.startswith("grad:"):
        out = _Break.apply(out, FAULTS[fault.removeprefix("grad:")])
    loss = nn.functional.cross_entropy(out.float(), batch.y)
    if fault in FAULTS:
        loss = loss * FAULTS[fault] if fault != "spike" else loss * FAULTS[fault] + 1e6
    return loss


def seed_everything(seed: int = 0) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def digest(model: nn.Module, optimizers: Iterable[Any], *others: Any, rng: bool = True) -> str:
    """SHA-256 over parameters, buffers, all optimizer state, whatever else has a state, and the random states."""
    h = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            value = getattr(value, "_local_tensor", value).detach()
            h.update(str(value.dtype).encode() + str(tuple(value.shape)).encode())
            h.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        elif isinstance(value, dict):
            for k, v in value.items():
                h.update(str(k).encode())
                feed(v)
        elif isinstance(value, list | tuple):
            for v in value:
                feed(v)
        else:
            h.update(repr(value).encode())

    feed(dict(model.named_parameters()))
    feed(dict(model.named_buffers()))
    for optimizer in optimizers:
        feed(optimizer.state_dict())
    for other in others:
        feed(other.state_dict() if other is not None else None)
    if rng:
        feed(torch.get_rng_state())
        feed(random.getstate())
        feed([a.tolist() if isinstance(a, np.ndarray) else a for a in np.random.get_state()])
    return h.hexdigest()


@dataclass
class Run:
    """A guarded training run of the small net, ready to be fed."""

    model: nn.Module
    optimizer: Any
    scheduler: Any
    ema: Any
    guard: Guard

    def feed(self, batches: list[Batch]) -> list[str]:
        return [self.guard.step(lambda b=b: loss_of(self.model, b), batch=b).kind for b in batches]

    def digest(self) -> str:
        return digest(self.model, [self.optimizer], self.scheduler, self.ema)


def guarded(model: Any, optimizer: Any, **options: Any) -> Guard:
    """A guard whose policy, watch and records are given field by field."""
    policy = options.pop("policy", "default")
    policy = Policy.named(policy) if isinstance(policy, str) else policy
    groups: dict[str, Any] = {}
    for name, group in (("policy", Policy), ("watch", Watch), ("records", Records)):
        fields = {f.name for f in dataclasses.fields(group)}
        groups[name] = {k: options.pop(k) for k in list(options) if k in fields}
    policy = dataclasses.replace(policy, **groups["policy"])
    watch, records = Watch(**groups["watch"]), Records(**groups["records"])
    return Guard(model, optimizer, policy=policy, watch=watch, records=records, **options)


def make_run(
    make_optimizer: Callable[[Iterable[Tensor]], Any] | None = None,
    *,
    with_ema: bool = True,
    seed: int = 0,
    **options: Any,
) -> Run:
    seed_everything(seed)
    model = Net()
    optimizer = (make_optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True) if with_ema else None
    options = {"max_norm": 1.0, "spike_window": 16, **options}
    guard = guarded(model, optimizer, scheduler=scheduler, ema=ema, **options)
    return Run(model, optimizer, scheduler, ema, guard)

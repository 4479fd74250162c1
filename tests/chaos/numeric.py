"""Tier A: random faults in random runs on two ranks; the guarded run ends in the state of one that never saw them.

A trial is a plain torch loop, the same loop with bad batches put in, and the guarded loop with the same bad batches.
The oracle is the plain one: nothing of nanproof takes part in it. The second shows that the faults do harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from chaos.workers import Workers
from nanproof import Policy
from nanproof.guard.external import attach
from support.runs import Batch, Net, digest, guarded, make_batches, seed_everything

WINDOWS = 18
LAYOUTS = ("single", "ddp", "nested", "fsdp2", "hsdp", "pipeline")
"""nested: DDP inside another module. hsdp: replicated over two ranks, each a group of shards of its own."""
DDPS, SHARDED = ("ddp", "nested"), ("fsdp2", "hsdp")
FIRST = 10
"""Faults come when the guard knows what is normal; before that there are no spikes."""
NAN, INF = float("nan"), float("inf")
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
}
SITES: dict[str, dict[str, float]] = {
    "input": {"nan": NAN, "+inf": INF, "-inf": -INF},
    "activation": {"nan": NAN, "+inf": INF},
    "loss": {"nan": NAN, "+inf": INF, "-inf": -INF, "spike": 1e6},
    "gradient": {"nan": NAN, "+inf": INF, "-inf": -INF, "spike": 1e8, "huge": 1e30},
    "transient": {"nan": NAN, "+inf": INF},  # the loss, once: the same batch is good when it is run again
    "statistics": {"huge": 1e30},  # finite everywhere but in BatchNorm's running variance
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    window: int
    micro: int
    ranks: tuple[int, ...]
    site: str
    kind: str

    @property
    def value(self) -> float:
        return SITES[self.site][self.kind]


@dataclass(frozen=True, kw_only=True)
class Trial:
    seed: int
    layout: str
    precision: str
    optimizer: str
    accumulate: int
    drop: str
    closure: bool
    rerun: bool
    averaged: bool
    max_norm: float | None
    snapshot_every: int | None
    faults: tuple[Fault, ...]

    @property
    def scaled(self) -> bool:
        return self.precision == "fp16"


def draw(seed: int) -> Trial:
    """A trial from its seed; what is drawn together must make sense together."""
    dice = random.Random(f"numeric:{seed}")
    layout = dice.choice(LAYOUTS)
    if layout == "pipeline":
        return _draw_pipeline(seed, dice)
    precision = dice.choice(["fp32", "bf16", "bf16 weights", "fp16"])
    accumulate = dice.choice([1, 1, 2, 4])
    drop = dice.choice(["window", "microbatch"]) if accumulate > 1 else "window"
    sites = ["input", "activation", "loss", "gradient"]
    if accumulate == 1 and precision == "fp32":
        sites += ["transient"] + ["statistics"] * (layout not in SHARDED)
    site = dice.choice(sites)
    closure = dice.random() < 0.7 or site == "transient"
    if precision == "fp16":
        # without a second run, an infinite gradient under a scaler is GradScaler's ordinary overflow; and a fault in
        # float16 logits is one until the second run, without the scale, says otherwise
        closure = True
        sites = [s for s in sites if s != "gradient" or accumulate == 1]
    rerun = closure and (precision == "fp16" or site == "transient" or dice.random() < 0.5)
    where = [dice.randrange(FIRST, WINDOWS)] if site == "statistics" else dice.sample(range(FIRST, WINDOWS), 3)
    faults = []
    for window in where[: dice.randint(1, 3)]:
        here = site if site in ("transient", "statistics") else dice.choice([s for s in sites[:4] if s in sites])
        kinds = [k for k in SITES[here] if precision != "fp16" or k not in ("spike", "huge")]
        ranks = (0, 1) if layout == "single" else dice.choice([(0,), (1,), (0, 1)])
        faults.append(
            Fault(window=window, micro=dice.randrange(accumulate), ranks=ranks, site=here, kind=dice.choice(kinds))
        )
    able = [o for o in OPTIMIZERS if o != "adafactor" or layout not in SHARDED]  # torch's own cannot step shards
    return Trial(
        seed=seed,
        layout=layout,
        precision=precision,
        optimizer=dice.choice(able),
        accumulate=accumulate,
        drop=drop,
        closure=closure,
        rerun=rerun,
        averaged=layout not in SHARDED and dice.random() < 0.3,
        # torch takes the norm of bfloat16 gradients in bfloat16, the guard in float32: nearer to the truth, not equal
        max_norm=None if precision == "bf16 weights" else dice.choice([None, 0.1, 1.0, 100.0]),
        snapshot_every=1 if site == "statistics" else dice.choice([None, 3, 7]),
        faults=tuple(faults),
    )


def _draw_pipeline(seed: int, dice: random.Random) -> Trial:
    """Two stages: a bad input reaches both, a bad gradient only one; the loop is guarded from outside."""
    faults = []
    for window in dice.sample(range(FIRST, WINDOWS), dice.randint(1, 3)):
        site = dice.choice(["input", "gradient"])
        kind = dice.choice([k for k in SITES[site] if k != "spike"])
        faults.append(Fault(window=window, micro=0, ranks=(dice.randrange(2),), site=site, kind=kind))
    return Trial(
        seed=seed,
        layout="pipeline",
        precision="fp32",
        optimizer=dice.choice(["adamw", "sgd", "radam"]),
        accumulate=1,
        drop="window",
        closure=False,
        rerun=False,
        averaged=False,
        max_norm=None,
        snapshot_every=dice.choice([None, 3]),
        faults=tuple(faults),
    )


# --- the data: windows of micro-batches, each with the fault that it bears ------------------------------------------

Micro = tuple[Batch, Fault | None]
Window = list[Micro | None]
"""None stands for a micro-batch that was left out."""


def clean_windows(trial: Trial, rank: int) -> list[Window]:
    batches = make_batches(WINDOWS * trial.accumulate, seed=2 * trial.seed + rank)
    return [[(b, None) for b in batches[i : i + trial.accumulate]] for i in range(0, len(batches), trial.accumulate)]


def with_faults(trial: Trial, rank: int, *, shown: bool) -> list[Window]:
    """The windows with the bad ones put in; without ``shown``, what should be left of them."""
    found: list[Window] = []
    faults = {f.window: f for f in trial.faults}
    for i, window in enumerate(clean_windows(trial, rank)):
        fault = faults.get(i)
        if fault is not None:
            extra: Window = [(Batch(b.x.flip(0), b.y), None) for b, _ in filter(None, window)]
            hit = extra[fault.micro]
            assert hit is not None
            mine = rank in fault.ranks
            if shown:
                extra[fault.micro] = (hit[0], fault if mine else None)
                found += [extra] if fault.site != "statistics" else [extra, _like(window)]
            elif fault.site == "transient":
                found.append(extra)
            elif trial.drop == "microbatch":
                # DDP drops the bad one where it is; FSDP2 shards every gradient, so all ranks leave it out
                extra[fault.micro] = None if mine or trial.layout in SHARDED else hit
                found.append(extra)
        found.append(window)
    return found


def _like(window: Window) -> Window:
    """The step in which bad statistics are found is given up together with the one that made them."""
    return [(Batch(b.x.roll(1, 0), b.y), None) for b, _ in filter(None, window)]


# --- the loops ------------------------------------------------------------------------------------------------------


class Sharded(nn.Module):
    """For FSDP2, without the batch statistics that each rank keeps for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(torch.relu(self.first(x)), 0.2))


class Wrapper(nn.Module):
    """A module of somebody's own around DDP."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class _Break(torch.autograd.Function):
    """Passes values on; one element of the gradient on its way back becomes ``value``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        broken = grads[0].clone()
        broken.view(-1)[0] = ctx.value
        return broken, None


@dataclass
class Parts:
    model: nn.Module
    optimizer: Any
    scheduler: Any
    scaler: Any
    ema: Any

    def digest(self) -> str:
        return digest(self.model, [self.optimizer], self.scheduler, self.scaler, self.ema)


def build(trial: Trial, rank: int) -> Parts:
    seed_everything(trial.seed)
    model: nn.Module = Net() if trial.layout not in SHARDED else Sharded()
    if trial.precision == "bf16 weights":
        model.to(torch.bfloat16)
    if trial.layout in DDPS:
        model = DDP(model) if trial.layout == "ddp" else Wrapper(DDP(model))
    elif trial.layout in SHARDED:
        mesh = (
            init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if trial.layout == "hsdp" else None
        )
        for part in (model.first, model.last, model):
            fully_shard(part, mesh=mesh)
    optimizer = OPTIMIZERS[trial.optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if trial.scaled else None
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True) if trial.averaged else None
    torch.manual_seed(rank)  # dropout differs between ranks, as it does in a real run
    return Parts(model, optimizer, scheduler, scaler, ema)


def loss_of(parts: Parts, trial: Trial, micro: Micro, spent: set[int]) -> Tensor:
    batch, fault = micro
    site, value = (fault.site, fault.value) if fault is not None else ("", 0.0)
    x = batch.x
    if site in ("input", "statistics"):
        x = x.clone()
        x[0, 0] = value
    cast = torch.autocast("cpu", torch.float16 if trial.scaled else torch.bfloat16, trial.precision in ("bf16", "fp16"))
    with cast:
        out = parts.model(x.bfloat16() if trial.precision == "bf16 weights" else x)
    if site == "activation":
        out = torch.where(torch.arange(out.numel()).view_as(out) == 0, torch.tensor(value, dtype=out.dtype), out)
    elif site == "gradient":
        out = _Break.apply(out, value)
    loss = nn.functional.cross_entropy(out.float(), batch.y)
    if site == "loss":
        loss = loss * value
    elif site == "transient" and fault is not None and fault.window not in spent:
        spent.add(fault.window)
        loss = loss * value
    return loss


def train_plainly(trial: Trial, rank: int, windows: list[Window]) -> str:
    """The loop as it stands in any training script: no part of nanproof."""
    parts = build(trial, rank)
    by_hand = trial.layout in DDPS and trial.drop == "microbatch"
    wrapper: Any = parts.model.inner if trial.layout == "nested" else parts.model
    spent: set[int] = set()
    for window in windows:
        present = [m for m in window if m is not None]
        for i, micro in enumerate(present):
            last = i == len(present) - 1 and not by_hand
            if by_hand and i == 0:
                wrapper.require_forward_param_sync = True  # DDP shares buffers after an update, whoever reduces
            with wrapper.no_sync() if trial.layout in DDPS and not last else contextlib.nullcontext():
                loss = loss_of(parts, trial, micro, spent)
                (loss if parts.scaler is None else parts.scaler.scale(loss)).backward()
        count = _reduce(parts.model, len(present)) if by_hand else len(present)
        if parts.scaler is not None:
            parts.scaler.unscale_(parts.optimizer)
        for p in parts.model.parameters():
            if p.grad is not None and count > 1:
                p.grad.div_(count)
        if trial.max_norm is not None:
            nn.utils.clip_grad_norm_(parts.model.parameters(), trial.max_norm)
        if parts.scaler is None:
            parts.optimizer.step()
        else:
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()
        parts.scheduler.step()
        if parts.ema is not None:
            parts.ema.update_parameters(parts.model)
        parts.optimizer.zero_grad()
    return parts.digest()


def _reduce(model: nn.Module, count: int) -> int:
    total = torch.tensor([count])
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
    return int(total)


def train_guarded(trial: Trial, rank: int, windows: list[Window]) -> tuple[str, list[tuple[Any, ...]]]:
    """The guarded loop; its final state, and the verdict on each window."""
    parts = build(trial, rank)
    guard = guarded(
        parts.model,
        parts.optimizer,
        scheduler=parts.scheduler,
        scaler=parts.scaler,
        ema=parts.ema,
        max_norm=trial.max_norm,
        accumulate=trial.accumulate,
        on_bad_microbatch=trial.drop,
        spike_window=16,
        snapshot_every=trial.snapshot_every,
        policy=Policy(rerun=trial.rerun, lr_backoff=1.0),
        share="nothing" if trial.layout == "single" else "flags",
    )
    spent: set[int] = set()
    log = []
    with guard:
        for window in windows:
            for micro in window:
                assert micro is not None
                if trial.closure:
                    verdict = guard.step(lambda m=micro: loss_of(parts, trial, m, spent), batch=micro[0])
                else:
                    guard.backward(loss_of(parts, trial, micro, spent), batch=micro[0])
                    verdict = guard.step()
            log.append((verdict.kind, verdict.level, verdict.rank, verdict.origin))
    return parts.digest(), log


def run(rank: int, trial: Trial) -> dict[str, Any]:
    """One trial, on one rank."""
    if trial.layout == "pipeline":
        return run_pipeline(rank, trial)
    with _quietly():
        oracle = train_plainly(trial, rank, with_faults(trial, rank, shown=False))
        harmed = train_plainly(trial, rank, with_faults(trial, rank, shown=True)) != oracle
        state, log = train_guarded(trial, rank, with_faults(trial, rank, shown=True))
    return {"harmed": harmed, "equal": state == oracle, "log": log}


def train_pipeline(
    trial: Trial, rank: int, windows: list[Window], *, watched: bool
) -> tuple[str, list[tuple[Any, ...]]]:
    """Two stages under 1F1B; each rank steps its own optimizer."""
    seed_everything(trial.seed)
    whole = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    part = whole[:2] if rank == 0 else whole[2:]
    schedule = Schedule1F1B(
        PipelineStage(part, rank, 2, torch.device("cpu")), n_microbatches=2, loss_fn=nn.functional.cross_entropy
    )
    optimizer = OPTIMIZERS[trial.optimizer](part.parameters())
    policy = Policy(rerun=False, lr_backoff=1.0)
    loop = attach(part, optimizer, policy=policy) if watched else None
    now: list[Fault | None] = [None]

    def poison(gradient: Tensor) -> Tensor:
        fault = now[0]
        if fault is None or fault.site != "gradient" or rank not in fault.ranks:
            return gradient
        broken = gradient.clone()
        broken.view(-1)[0] = fault.value
        return broken

    next(part.parameters()).register_hook(poison)
    log = []
    for (micro,) in windows:
        assert micro is not None
        (batch, now[0]), x = micro, micro[0].x
        if now[0] is not None and now[0].site == "input":
            x = x.clone()
            x[0, 0] = now[0].value
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=batch.y, losses=[])
        if loop is None:
            optimizer.step()
        else:
            loop.step(optimizer, optimizer.step)
            log.append(("ok" if loop.carried_out else "bad", loop.guard.tally.steps))
    if loop is not None:
        loop.close()
    return digest(part, [optimizer]), log


def run_pipeline(rank: int, trial: Trial) -> dict[str, Any]:
    """One trial of two stages; both see the same batches, and a fault belongs to a stage, not to a rank's data."""
    for_both = tuple(dataclasses.replace(f, ranks=(0, 1)) for f in trial.faults)
    shared, own = dataclasses.replace(trial, faults=for_both), {f.window: f for f in trial.faults}
    bad: list[Window] = [
        [(batch, own.get(fault.window) if fault is not None else None) for batch, fault in filter(None, window)]
        for window in with_faults(shared, 0, shown=True)
    ]
    with _quietly():
        oracle, _ = train_pipeline(trial, rank, with_faults(shared, 0, shown=False), watched=False)
        harmed = train_pipeline(trial, rank, bad, watched=False)[0] != oracle
        state, log = train_pipeline(trial, rank, bad, watched=True)
    return {"harmed": harmed, "equal": state == oracle, "log": log}


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def check(workers: Workers, trial: Trial) -> None:
    """Run a trial on both ranks; an AssertionError says what did not hold."""
    answers = workers.run(run, trial)
    assert any(a["harmed"] for a in answers), "void: without the guard the faults do no harm"
    for rank, answer in enumerate(answers):
        assert answer["equal"], f"rank {rank} is not in the state of the clean run; its verdicts: {answer['log']}"
    first, second = (a["log"] for a in answers)
    assert trial.layout == "single" or first == second, f"the ranks judged differently: {first} and {second}"
    bad = sum(entry[0] != "ok" for entry in first)
    if trial.drop == "window":
        assert bad == len(trial.faults), f"{bad} verdicts for {len(trial.faults)} faults: {first}"

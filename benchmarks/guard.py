"""What the guard costs: a guarded training step over a plain one that clips too, beside what people use instead."""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import Ratio, Times, count, cpu_seconds, interleave, ratio, summed, surplus, together
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nanproof import Guard, Policy
from nanproof.guard.foresight import BEGINNING

LAYERS, HEADS, CONTEXT, BATCH = 4, 4, 64, 2
PACKAGES = ("torch", "transformers", "lightning")
STEP_FIGURE, SNAPSHOT_FIGURE, WARNING_FIGURE, INTERVAL = 1.02, 0.035, 0.005, 200
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a model is; ``max_norm`` is small enough that every step is clipped."""

    width: int
    vocabulary: int
    max_norm: float
    layers: int = LAYERS


FULL = Size(width=256, vocabulary=8192, max_norm=1.0)
SMALL = Size(width=8, vocabulary=16, max_norm=0.01)
"""As many tensors as FULL, almost no arithmetic: what is left is the work per operation and per step."""


class Block(nn.Module):
    """A transformer block as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = split.movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A small GPT-2: learned positions, tied output, no dropout, so that all variants compute the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(CONTEXT, size.width)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        logits = F.linear(self.norm(self.blocks(h)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def make_batches(size: Size, n: int = 32) -> list[Batch]:
    text = torch.randint(size.vocabulary, (n, BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]


def make_run(size: Size, fused: bool = False) -> tuple[Transformer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer(size)
    # foreach is what torch picks by itself on a GPU; on a CPU it is the faster of the two that are not fused
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused, foreach=not fused)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A way to train: one step of it, and the model it trains."""

    step: Callable[[], Any]
    model: nn.Module
    guard: Guard | None = None


def plain(
    size: Size = FULL, *, fused: bool = False, check: bool = False, anomaly: bool = False, debug: bool = False
) -> Loop:
    """The usual loop; or with a hand-written check, under detect_anomaly, or under Hugging Face's debugger."""
    model, optimizer = make_run(size, fused)
    parameters, batches = list(model.parameters()), itertools.cycle(make_batches(size))
    if debug:
        from transformers.debug_utils import DebugUnderflowOverflow

        DebugUnderflowOverflow(model)  # lives on in the hooks that it registers

    def step() -> None:
        x, y = next(batches)
        with torch.autograd.detect_anomaly() if anomaly else contextlib.nullcontext():
            model(x, y).backward()
        if not check or all(torch.isfinite(p.grad).all() for p in parameters if p.grad is not None):
            nn.utils.clip_grad_norm_(parameters, size.max_norm)
            optimizer.step()
        optimizer.zero_grad()

    return Loop(step=step, model=model)


def guarded(folder: Path, size: Size = FULL, *, fused: bool = False, **options: Any) -> Loop:
    """The loop of the documentation, with every default and a run folder."""
    model, optimizer = make_run(size, fused)
    guard = Guard(model, optimizer, max_norm=size.max_norm, run_dir=folder, **options)
    batches = guard.batches(itertools.cycle(make_batches(size)))

    def step() -> None:
        x, y = next(batches)
        guard.step(lambda: model(x, y))

    state = guard.state_dict()  # a full window, as in a long run: spike limits are worked out at every step
    state["window"] = {"losses": [8.5 + i / 128 for i in range(128)], "norms": [1.5 + i / 64 for i in range(128)]}
    guard.load_state_dict(state)
    return Loop(step=step, model=model, guard=guard)


class Trainer:
    """Lightning's own Trainer, run for two batches at a time."""

    def __init__(self, *, anomaly: bool) -> None:
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # it greets, warns and advises at length
        net, optimizer = make_run(FULL)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def training_step(self, batch: Batch, _: int) -> Tensor:
                return self.net(*batch)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return optimizer

        class Clock(lightning.Callback):
            ends: list[float]

            def on_train_batch_end(self, *_: Any) -> None:
                self.ends.append(time.process_time())

        self._clock = Clock()
        self._module = Module()
        self._batches = itertools.cycle(make_batches(FULL))
        self._trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=0,
            gradient_clip_val=FULL.max_norm,
            detect_anomaly=anomaly,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[self._clock],
        )

    def fit(self, batches: int) -> float:
        """Train on some batches; the CPU seconds of the last, from the end of the one before to its own end."""
        self._clock.ends = [0.0]
        self._trainer.fit_loop.max_epochs += 1
        self._trainer.fit(self._module, DataLoader(list(itertools.islice(self._batches, batches)), batch_size=None))
        return self._clock.ends[-1] - self._clock.ends[-2]

    def count(self) -> tuple[int, int]:
        """Operations and host reads of one batch: those of a fit with two, less those of a fit with one."""
        one, two = count(lambda: self.fit(1)), count(lambda: self.fit(2))
        return two[0] - one[0], two[1] - one[1]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant over its plain twin: time, and what it adds to a step in operations and host reads."""

    name: str
    over: str
    ratio: Ratio
    ops: int
    reads: int

    def __str__(self) -> str:
        r = self.ratio
        spread = f"{r.low:.2f}–{r.high:.2f}"
        return f"| {self.name} | {self.over} | {r.show('{:.3f}')} | {spread} | {self.ops:+,} | {self.reads:+,} |"


PLAIN, FUSED, LIGHTNING = "plain", "plain, fused", "Lightning's Trainer"
AGAIN = "plain, a second copy (the noise)"
EXACT, OFF, LATE = "**nanproof, exact**", "nanproof, exact, snapshots off", "**nanproof, late**"


def make_row(times: Times, counts: dict[str, tuple[int, int]], name: str, over: str) -> Row:
    (ops, reads), (plain_ops, plain_reads) = counts[name], counts[over]
    return Row(name=name, over=over, ratio=ratio(times, name, over), ops=ops - plain_ops, reads=reads - plain_reads)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the guard costs over plain steps of the full model."""

    rows: list[Row]
    exact: Ratio
    """Both guarded loops over both plain ones: between snapshots they do the same, and four disturb less than two."""
    snapshot: Ratio
    """One snapshot, with its check, over one plain step."""
    unit: float


def measure_guard(folder: Path, seconds: float) -> Cost:
    """The guard in both timings, with and without snapshots, and what a snapshot takes."""
    loops = {
        PLAIN: plain(),
        AGAIN: plain(),
        EXACT: guarded(folder / "exact"),
        OFF: guarded(folder / "off", policy=Policy(snapshot_every=None)),
        FUSED: plain(fused=True),
        LATE: guarded(folder / "late", fused=True, timing="deferred"),
    }
    guard = loops[EXACT].guard
    assert guard is not None
    runs = {name: partial(cpu_seconds, loop.step) for name, loop in loops.items()}
    snap = partial(guard._context.snapshots.take, guard.tally.steps, guard.tally.updates)
    times = interleave({**runs, "snapshot": partial(cpu_seconds, snap)}, seconds=seconds, warmup=4)
    counts = {name: count(loop.step) for name, loop in loops.items()}
    twins = {AGAIN: PLAIN, EXACT: PLAIN, OFF: PLAIN, LATE: FUSED}
    for name in (EXACT, OFF, LATE):
        check_same(loops[name], loops[twins[name]])
    pooled = {"guarded": together(times, EXACT, OFF), "plain": together(times, PLAIN, AGAIN)}
    return Cost(
        rows=[make_row(times, counts, name, twin) for name, twin in twins.items()],
        exact=ratio(pooled, "guarded", "plain"),
        snapshot=ratio(times, "snapshot", PLAIN),
        unit=statistics.median(times[PLAIN]),
    )


def check_same(loop: Loop, twin: Loop) -> None:
    """A guarded run that did other work than its plain twin would compare nothing."""
    assert loop.guard is not None
    loop.guard.close()
    assert loop.guard.tally.clean, loop.guard.summary()
    pairs = zip(loop.model.parameters(), twin.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "the guard changed what was trained"


def measure_own(folder: Path, seconds: float, unit: float) -> tuple[Ratio, Ratio]:
    """What the guard does by itself in either timing, in plain steps of the full model: sharper than a ratio."""
    loops = {
        PLAIN: plain(SMALL),
        EXACT: guarded(folder / "exact", SMALL),
        FUSED: plain(SMALL, fused=True),
        LATE: guarded(folder / "late", SMALL, fused=True, timing="deferred"),
    }
    runs = {name: partial(cpu_seconds, loop.step) for name, loop in loops.items()}
    times = interleave(runs, seconds=seconds, warmup=10)
    for name, twin in ((EXACT, PLAIN), (LATE, FUSED)):
        check_same(loops[name], loops[twin])
    return surplus(times, EXACT, PLAIN, unit), surplus(times, LATE, FUSED, unit)


class Timed:
    """Calls a function and adds up the CPU time of it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed


class Blind:
    """What a guard has instead of its early warnings, to see what they cost."""

    hooks = ()

    def begin(self, step: int) -> None: ...

    def read(self, gradients: Any, norms: Any) -> list[Any]:
        return []

    def forecast(self, reading: Any, signals: Any) -> tuple[Any, None]:
        return reading, None

    def close(self) -> None: ...


def blinded(loop: Loop) -> Loop:
    assert loop.guard is not None
    loop.guard._engine.warnings.foresight.close()
    loop.guard._engine.warnings.foresight = Blind()  # type: ignore[assignment]
    return loop


def measure_warnings(folder: Path, seconds: float, unit: float) -> tuple[Ratio, Ratio, int, int]:
    """What early warnings cost, over ten steps, of which one is read: timed in place, and by leaving them out.

    In place: the calls of the guard and the hooks on modules, over the rest of the step. By leaving them out, which
    includes the longer copy: two guards of the small model side by side, in plain steps of the full one. And the
    operations and host reads that they add to ten steps.
    """
    loop, timed = guarded(folder / "timed"), Timed()
    assert loop.guard is not None
    for _ in range(BEGINNING):
        loop.step()
    early = loop.guard._engine.warnings.foresight
    for name in ("begin", "read", "forecast"):
        setattr(early, name, timed(getattr(early, name)))
    make_hook = early._outputs._hook
    early._outputs._hook = lambda name: timed(make_hook(name))  # type: ignore[method-assign]
    shares, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(shares) < 10:
        timed.seconds = 0.0
        total = sum(cpu_seconds(loop.step) for _ in range(10))
        shares.append(timed.seconds / (total - timed.seconds))
    loop.guard.close()
    small = {"seeing": guarded(folder / "seeing", SMALL), "blind": blinded(guarded(folder / "blind", SMALL))}

    def ten(one: Loop) -> Callable[[], None]:
        return lambda: [one.step() for _ in range(10)] and None

    runs = {name: partial(cpu_seconds, ten(one)) for name, one in small.items()}
    times = interleave(runs, seconds=seconds / 2, warmup=3)
    (ops, reads), (blind_ops, blind_reads) = (count(ten(one)) for one in small.values())
    for one in small.values():
        assert one.guard is not None
        one.guard.close()
    return summed(shares), surplus(times, "seeing", "blind", 10 * unit), ops - blind_ops, reads - blind_reads


def measure_peers(seconds: float) -> list[Row]:
    """What people do or switch on instead; these cost much, so fewer rounds do."""
    loops = {
        PLAIN: plain(),
        "`isfinite` on every gradient, by hand": plain(check=True),
        "`torch.autograd.detect_anomaly`": plain(anomaly=True),
        "Hugging Face `DebugUnderflowOverflow`": plain(debug=True),
    }
    trainers = {LIGHTNING: Trainer(anomaly=False), "Lightning `Trainer(detect_anomaly=True)`": Trainer(anomaly=True)}
    runs: dict[str, Callable[[], float]] = {name: partial(cpu_seconds, loop.step) for name, loop in loops.items()}
    runs |= {name: partial(trainer.fit, 2) for name, trainer in trainers.items()}
    times = interleave(runs, seconds=seconds, warmup=3)
    counts = {name: count(loop.step) for name, loop in loops.items()}
    counts |= {name: trainer.count() for name, trainer in trainers.items()}
    twins = {name: LIGHTNING if name in trainers else PLAIN for name in runs if name not in (PLAIN, LIGHTNING)}
    return [make_row(times, counts, name, twin) for name, twin in twins.items()]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """One thread, and no warnings that peers are slow: the table says so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def report() -> str:
    """Measure everything, in less than three minutes; the tables in Markdown."""
    with quiet(), tempfile.TemporaryDirectory() as folder:
        cost = measure_guard(Path(folder, "full"), seconds=92.0)
        own, own_late = measure_own(Path(folder, "small"), seconds=12.0, unit=cost.unit)
        early, left_out, ops, reads = measure_warnings(Path(folder, "warnings"), seconds=30.0, unit=cost.unit)
        peers = measure_peers(seconds=35.0)
    parameters = sum(p.numel() for p in Transformer(FULL).parameters())
    per_step = cost.snapshot.times(1 / INTERVAL)
    figures = [
        ("guarded / plain step, exact", f"≤ {STEP_FIGURE}", cost.exact.show("{:.3f}"), cost.exact.verdict(STEP_FIGURE)),
        (
            f"a snapshot, spread over its {INTERVAL} steps",
            f"≤ {SNAPSHOT_FIGURE:.1%}",
            per_step.show("{:.2%}"),
            per_step.verdict(SNAPSHOT_FIGURE),
        ),
        (
            "early warnings, over the rest of the step",
            f"≤ {WARNING_FIGURE:.1%}",
            early.show("{:.2%}"),
            early.verdict(WARNING_FIGURE),
        ),
        (
            "early warnings, by leaving them out",
            f"≤ {WARNING_FIGURE:.1%}",
            left_out.show("{:.2%}"),
            left_out.verdict(WARNING_FIGURE),
        ),
        ("early warnings, operations and host reads in ten steps", "", f"{ops:+,} and {reads:+,}", ""),
        ("the guard's own work, exact", "", own.show("{:.2%}"), ""),
        ("the guard's own work, late", "", own_late.show("{:.2%}"), ""),
    ]
    return "\n".join(
        [
            f"{parameters / 1e6:.1f}M parameters; {cost.exact.rounds} rounds, {peers[0].ratio.rounds} for the peers.",
            "",
            "| step | over | median | quartiles | extra operations | extra host reads |",
            "|---|---|---|---|---|---|",
            *(str(row) for row in cost.rows + peers),
            "",
            "| figure | to reach | measured | |",
            "|---|---|---|---|",
            *(f"| {' | '.join(cells)} |" for cells in figures),
        ]
    )


if __name__ == "__main__":
    print(report())

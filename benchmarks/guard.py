"""What the guard costs: a guarded training step over a plain one that clips too, beside what people use instead."""

from __future__ import annotations

import contextlib
import itertools
import logging
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
from measure import Ratio, Times, count, cpu_seconds, interleave, ratio
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nanproof import Guard

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT, BATCH = 4, 256, 4, 8192, 64, 2
MAX_NORM = 1.0
STEP_FIGURE, SNAPSHOT_FIGURE, INTERVAL = 1.02, 3.5, 200
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A transformer block as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = split.movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A small GPT-2: learned positions, tied output, no dropout, so that all variants compute the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        logits = F.linear(self.norm(self.blocks(h)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def make_batches(n: int = 32) -> list[Batch]:
    text = torch.randint(VOCABULARY, (n, BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]


def make_run(fused: bool = False) -> tuple[Transformer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer()
    # foreach is what torch picks by itself on a GPU; on a CPU it is the faster of the two that are not fused
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused, foreach=not fused)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A way to train: one step of it, and the model it trains."""

    step: Callable[[], Any]
    model: nn.Module
    guard: Guard | None = None


def plain(*, fused: bool = False, check: bool = False, anomaly: bool = False, debug: bool = False) -> Loop:
    """The usual loop; or with a hand-written check, under detect_anomaly, or under Hugging Face's debugger."""
    model, optimizer = make_run(fused)
    parameters, batches = list(model.parameters()), itertools.cycle(make_batches())
    if debug:
        from transformers.debug_utils import DebugUnderflowOverflow

        DebugUnderflowOverflow(model)  # lives on in the hooks that it registers

    def step() -> None:
        x, y = next(batches)
        with torch.autograd.detect_anomaly() if anomaly else contextlib.nullcontext():
            model(x, y).backward()
        if not check or all(torch.isfinite(p.grad).all() for p in parameters if p.grad is not None):
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()
        optimizer.zero_grad()

    return Loop(step=step, model=model)


def guarded(folder: Path, *, fused: bool = False, **options: Any) -> Loop:
    """The loop of the documentation, with every default and a run folder."""
    model, optimizer = make_run(fused)
    guard = Guard(model, optimizer, max_norm=MAX_NORM, run_dir=folder, **options)
    batches = guard.batches(itertools.cycle(make_batches()))

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
        net, optimizer = make_run()

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
        self._batches = itertools.cycle(make_batches())
        self._trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=0, gradient_clip_val=MAX_NORM, detect_anomaly=anomaly, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[self._clock],
        )  # fmt: skip

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
    name: str
    over: str
    ratio: Ratio
    ops: int
    reads: int

    def __str__(self) -> str:
        return f"| {self.name} | {self.over} | {self.ratio} | {self.ops:+,} | {self.reads:+,} |"


def measure_loops(folder: Path, seconds: float) -> tuple[list[Row], Ratio]:
    """The guard and the hand-written check, in many rounds; and one snapshot over one plain step."""
    loops = {
        "plain": plain(),
        "the same once more": plain(),
        "nanproof, exact, snapshots off": guarded(folder / "off", snapshot_every=None),
        "nanproof, exact": guarded(folder / "exact"),
        "`isfinite` on every gradient, by hand": plain(check=True),
        "plain, fused": plain(fused=True),
        "nanproof, late": guarded(folder / "late", fused=True, sync="late"),
    }
    guard = loops["nanproof, exact"].guard
    assert guard is not None
    runs = {name: partial(cpu_seconds, loop.step) for name, loop in loops.items()}
    snap = partial(guard._post.ring.take, guard.tally.steps, guard.tally.updates)
    times = interleave({**runs, "snapshot": partial(cpu_seconds, snap)}, seconds=seconds, warmup=4)
    counts = {name: count(loop.step) for name, loop in loops.items()}
    for name, loop in loops.items():
        if loop.guard is not None:
            loop.guard.close()
            assert loop.guard.tally.clean, loop.guard.summary()
            twin = loops["plain, fused" if "late" in name else "plain"].model
            same = all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), twin.parameters(), strict=True))
            print(name, "same weights as plain:", same)
    rows = [
        make_row(times, counts, name, "plain, fused" if "late" in name else "plain")
        for name in loops
        if not name.startswith("plain")
    ]
    return rows, ratio(times, "snapshot", "plain")


def measure_peers(seconds: float) -> list[Row]:
    """What people switch on instead; these cost much, so fewer rounds do."""
    loops = {
        "plain": plain(),
        "`torch.autograd.detect_anomaly`": plain(anomaly=True),
        "Hugging Face `DebugUnderflowOverflow`": plain(debug=True),
    }
    trainers = {
        "Lightning's Trainer": Trainer(anomaly=False),
        "Lightning `Trainer(detect_anomaly=True)`": Trainer(anomaly=True),
    }
    runs: dict[str, Callable[[], float]] = {name: partial(cpu_seconds, loop.step) for name, loop in loops.items()}
    runs |= {name: partial(trainer.fit, 2) for name, trainer in trainers.items()}
    times = interleave(runs, seconds=seconds, warmup=3)
    counts = {name: count(loop.step) for name, loop in loops.items()}
    counts |= {name: trainer.count() for name, trainer in trainers.items()}
    plains = ["plain", "Lightning's Trainer"]
    return [make_row(times, counts, name, plains["Trainer(" in name]) for name in runs if name not in plains]


def make_row(times: Times, counts: dict[str, tuple[int, int]], name: str, over: str) -> Row:
    (ops, reads), (plain_ops, plain_reads) = counts[name], counts[over]
    return Row(name=name, over=over, ratio=ratio(times, name, over), ops=ops - plain_ops, reads=reads - plain_reads)


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
    """Measure everything; the tables in Markdown."""
    with quiet(), tempfile.TemporaryDirectory() as folder:
        rows, snapshot = measure_loops(Path(folder), seconds=100.0)
        peers = measure_peers(seconds=40.0)
    for row in rows + peers:
        print(row)
    print(snapshot, snapshot.median / INTERVAL * 100)
    return ""

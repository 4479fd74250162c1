"""How cost grows: with parameters, with tensors, with ranks, with lines of a log; each with its fitted slope.

A slope is that of the logarithm of CPU time over the logarithm of size: 1 is linear, 0 does not depend on it.
`python benchmarks/growth.py --small` is a trial with sizes a hundred times smaller.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import cpu_seconds, interleave, ratio
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

from nanproof import Guard, Policy
from nanproof.logs import read

PACKAGES = ("torch", "numpy")
STEPS = 100  # of each process
GENERATIONS = 3  # of processes for each world size: where one lies in memory makes it faster or slower


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    return float(statistics.linear_regression([math.log(s) for s in sizes], [math.log(t) for t in seconds]).slope)


class Bag(nn.Module):
    """As many parameters in as many tensors as wanted, with a gradient for each and little else to do."""

    def __init__(self, tensors: int, each: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(each) for _ in range(tensors))

    def forward(self) -> Tensor:
        return torch.stack(torch._foreach_norm(list(self.all))).sum()


def step_times(tensors: int, each: int, seconds: float) -> dict[str, list[float]]:
    """CPU times of the plain and the guarded step, taken in turns."""
    torch.manual_seed(0)
    runs = {}
    for name in ("plain", "guarded"):
        model = Bag(tensors, each)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
        if name == "guarded":
            guard = Guard(model, optimizer, max_norm=1.0, policy=Policy(snapshot_every=None))
            runs[name] = lambda guard=guard, model=model: guard.step(model)
        else:
            runs[name] = lambda model=model, optimizer=optimizer: plain_step(model, optimizer)
    return interleave({n: lambda r=r: cpu_seconds(r) for n, r in runs.items()}, seconds=seconds, warmup=2, least=8)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> None:
    model(*inputs).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


def guard_rows(what: str, sizes: Sequence[int], shapes: Sequence[tuple[int, int]], seconds: float) -> list[str]:
    measured = [step_times(*shape, seconds) for shape in shapes]
    shares = [ratio(times, "guarded", "plain") for times in measured]
    cells = "; ".join(f"{size:,}: {r.show('{:.3f}')}" for size, r in zip(sizes, shares, strict=True))
    plain, guarded = (slope(sizes, [statistics.median(t[name]) for t in measured]) for name in ("plain", "guarded"))
    return [f"| a guarded step over a plain one, by {what} | {cells} | plain {plain:.2f}, guarded {guarded:.2f} |"]


def log_rows(lines: Sequence[int]) -> list[str]:
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for count in lines:
            path = Path(folder) / "log.jsonl"
            with path.open("w") as file:
                for step in range(count):
                    file.write(json.dumps({"step": step, "loss": 2 + step % 97 / 1e3, "lr": 1e-4}) + "\n")
            seconds.append(min(cpu_seconds(lambda path=path: read(path)) for _ in range(3)))
    cells = "; ".join(f"{n:,}: {s / n / (seconds[0] / lines[0]):.2f}" for n, s in zip(lines, seconds, strict=True))
    return [
        f"| reading a log: time per line, over that of the smallest, by lines | {cells} | {slope(lines, seconds):.2f} |"
    ]


class Collectives(TorchDispatchMode):
    """Counts what goes over the wire: collectives and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.calls += 1
            self.bytes += sum(t.nbytes for t in tensors if isinstance(t, Tensor))
        return function(*args, **(kwargs or {}))


def on_rank(rank: int, world: int, backend: str, store: str, out: Any) -> None:
    """What the guard adds to the collectives and bytes of a step, and CPU times of plain and guarded steps in turns."""
    torch.set_num_threads(1)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    elif world > 1:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    x = torch.randn(16, 64)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024))
        if backend == "fake":  # DDP's reducer does not work with it, FSDP2 does
            fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
        model = DDP(net) if world > 1 and backend == "gloo" else net
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(model: nn.Module) -> Tensor:
        return model(x).square().mean()

    bare, other = make()
    model, optimizer = make()
    guard = Guard(model, optimizer, max_norm=1.0, policy=Policy(snapshot_every=None))

    def plain() -> None:
        loss(bare).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        other.step()
        other.zero_grad()

    def guarded() -> None:
        guard.step(lambda: loss(model))

    times: dict[str, list[float]] = {"plain": [], "guarded": []}
    for _ in range(STEPS):  # the same order on every rank
        times["plain"].append(cpu_seconds(plain))
        times["guarded"].append(cpu_seconds(guarded))
    counts = []
    for step in (plain, guarded):
        with Collectives() as seen:
            step()
        counts.append((seen.calls, seen.bytes))
    if rank == 0:
        out.put((counts[1][0] - counts[0][0], counts[1][1] - counts[0][1], {n: t[5:] for n, t in times.items()}))
    guard.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks(world: int, backend: str) -> tuple[int, int, dict[str, list[float]]]:
    """The same of rank 0, from processes of their own."""
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        started = 1 if backend == "fake" else world
        children = [
            context.Process(target=on_rank, args=(r, world, backend, f"{folder}/store", out)) for r in range(started)
        ]
        for child in children:
            child.start()
        try:
            found: tuple[int, int, dict[str, list[float]]] = out.get(timeout=60)
        finally:
            deadline = time.monotonic() + 30
            for child in children:
                child.join(max(0.1, deadline - time.monotonic()))
                if child.is_alive():
                    child.kill()
    return found


def rank_rows() -> list[str]:
    rows = []
    for backend, worlds in (("gloo", (1, 2, 4)), ("fake", (2, 64, 1024))):
        counts, shares = [], []
        for world in worlds:
            found = [ranks(world, backend) for _ in range(GENERATIONS)]
            (calls, size), *others = {(c, s) for c, s, _ in found}
            assert not others, "every process counts the same"
            counts.append(f"{world:,}: +{calls} collectives, +{size} bytes")
            times = {name: [t for _, _, one in found for t in one[name]] for name in ("plain", "guarded")}
            shares.append(f"{world:,}: {ratio(times, 'guarded', 'plain').show('{:.3f}')}")
        name = "processes (DDP, gloo)" if backend == "gloo" else "world size (FSDP2, torch's fake process group)"
        rows += [
            f"| what the guard adds to a step, by {name} | {'; '.join(counts)} | |",
            f"| CPU time of a guarded step of rank 0 over a plain one, by {name} | {'; '.join(shares)} | |",
        ]
    return rows


def report(scale: int = 1) -> str:
    torch.set_num_threads(1)
    parameters = [n // scale for n in (1_000_000, 10_000_000, 100_000_000)]
    tensors = [n // scale for n in (1_000, 10_000, 100_000)]
    lines = [n // scale for n in (10_000, 100_000, 1_000_000, 10_000_000)]
    return "\n".join(
        [
            "| what | by size | slope |",
            "|---|---|---|",
            *guard_rows("parameters in 64 tensors", parameters, [(64, n // 64) for n in parameters], 20 / scale),
            *guard_rows("tensors of 32 numbers", tensors, [(n, 32) for n in tensors], 20 / scale),
            *log_rows(lines),
            *rank_rows(),
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    print(report(100 if parser.parse_args().small else 1))

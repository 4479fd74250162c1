"""What the guard's verdict costs on many ranks: counted on a simulated world, timed with real gloo processes.

python scripts/engines_scale.py            # writes the tables into docs/clusters.md
python scripts/engines_scale.py --processes 2 4 8 --print

Counts come from one rank of a world that torch's fake process group pretends to: every collective of a guarded DDP step
is seen, none is carried out. Times are those of the one small reduction among processes on this machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "clusters.md"
WORLDS = (8, 64, 1024, 16_384, 100_000)
PROCESSES = (2, 8, 16, 32, 64)
FLAGS = 12
"""Integers in the reduction of a step, as the count below shows."""


def count(world: int) -> dict[str, list[tuple[str, int]]]:
    """The collectives of a bare step, a guarded good step, and a guarded bad step on rank 0, each with its bytes."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from nanproof import Guard, Policy

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, int]] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "c10d":
                tensors = [t for t in tree_leaves(args[:1]) if isinstance(t, torch.Tensor)]
                self.calls.append((function._opname, sum(t.nbytes for t in tensors)))
            return function(*args, **(kwargs or {}))

    logging.disable(logging.CRITICAL)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))

    # what DDP does by itself; it cannot read the answers of a fake group, and checks types by annotations
    def reduce(_, bucket):  # type: ignore[no-untyped-def]
        dist.all_reduce(bucket.buffer())
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # DDP rebuilds its buckets after the first steps
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {}
    with Seen() as seen:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    found["bare"] = seen.calls
    optimizer.zero_grad()
    guard = Guard(model, optimizer, policy=Policy(rerun=False))
    guard.step(lambda: model(torch.ones(2, 8)).square().mean())
    for name, value in (("good", 1.0), ("bad", float("nan"))):
        with Seen() as seen:
            guard.step(lambda v=value: model(torch.full((2, 8), v)).square().mean())
        found[name] = seen.calls
    guard.close()
    return found


def measure(processes: int, repeats: int = 60) -> float:
    """The median time in milliseconds of the step's reduction among forked gloo processes, as rank 0 sees it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(processes):
            child = os.fork()
            if child:
                ranks.append(child)
                continue
            code = 1
            try:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
                flags, times = torch.zeros(FLAGS, dtype=torch.int64), []
                for _ in range(repeats):
                    start = time.monotonic()
                    dist.all_reduce(flags, dist.ReduceOp.MAX)
                    times.append(time.monotonic() - start)
                if rank == 0:
                    Path(folder, "median").write_text(str(1000 * statistics.median(times[10:])))
                dist.barrier()
                code = 0
            finally:
                os._exit(code)
        for child in ranks:
            os.waitpid(child, 0)
        return float(Path(folder, "median").read_text())


def child(*words: str) -> str:
    """Run this script in a process of its own, bounded in time, and return what it prints."""
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, timeout=300, check=True, env=os.environ
    )
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, metavar="WORLD", help="count on a simulated world and print")
    parser.add_argument("--measure", type=int, metavar="N", help="measure among this many processes and print")
    parser.add_argument("--processes", type=int, nargs="*", default=PROCESSES)
    parser.add_argument("--print", action="store_true", help="print the tables, write nothing")
    given = parser.parse_args()
    if given.count:
        found = count(given.count)
        sizes = {name: sum(size for _, size in calls) for name, calls in found.items()}
        more = len(found["bad"]) - len(found["good"]), sizes["bad"] - sizes["good"]
        print(len(found["bare"]), len(found["good"]), sizes["good"] - sizes["bare"], *more)
        return 0
    if given.measure:
        print(f"{measure(given.measure):.3f}")
        return 0
    counted = [[f"{w:,}", *child("--count", str(w)).split()] for w in WORLDS]
    timed = [[str(n), f"{float(child('--measure', str(n))):.2f}"] for n in given.processes]
    tables = {
        "counted": [
            "| ranks | collectives: bare | guarded | bytes added per step | more in a bad step | bytes of those |",
            "|---|---|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in counted),
        ],
        "timed": [
            "| processes | median, ms |",
            "|---|---|",
            *(f"| {' | '.join(row)} |" for row in timed),
        ],
    }
    page = PAGE.read_text()
    for name, lines in tables.items():
        print("\n".join(lines))
        block = "\n".join([f"<!-- {name}: begin -->", *lines, f"<!-- {name}: end -->"])
        page = re.sub(rf"<!-- {name}: begin -->.*?<!-- {name}: end -->", block, page, flags=re.DOTALL)
    if not given.print:
        from nanproof.files import write_atomic

        write_atomic(PAGE, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

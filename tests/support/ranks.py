"""Runs a function on several ranks with gloo on this machine, bounded in time, and collects what each returns."""

from __future__ import annotations

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from support.forked import context


def _main(fn: Callable[..., Any], rank: int, world: int, store: str, args: tuple[Any, ...], results: Any) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world))  # as a launcher would
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        results.put((rank, True, fn(rank, *args)))
    except BaseException as error:
        results.put((rank, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        try:
            dist.destroy_process_group()
        except Exception:
            os._exit(0)


def on_ranks(fn: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 600, check: bool = True) -> list[Any]:
    """What ``fn(rank, *args)`` returns on every rank; with ``check=False`` errors are returned as text."""
    forked = context()
    results = forked.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")  # noqa: PTH118
        workers = [
            forked.Process(target=_main, args=(fn, r, world, store, args, results), daemon=True) for r in range(world)
        ]
        for worker in workers:
            worker.start()
        found: dict[int, tuple[bool, Any]] = {}
        try:
            limit = time.monotonic() + timeout
            while len(found) < world and (not check or all(ok for ok, _ in found.values())):
                dead = [r for r in range(world) if r not in found and workers[r].exitcode is not None]
                try:
                    rank, ok, value = results.get(timeout=5)
                    found[rank] = (ok, value)
                except queue.Empty:
                    missing = sorted(set(range(world)) - set(found))
                    assert time.monotonic() < limit, f"ranks {missing} gave no answer in {timeout} s"
                    assert not dead, f"ranks {dead} ended without an answer"
        finally:
            for worker in workers:
                worker.join(timeout=10)
                if worker.is_alive():
                    worker.kill()
    for rank, (ok, value) in found.items():
        assert ok or not check, f"rank {rank}: {value}"
    return [found[r][1] for r in sorted(found)]

"""Several processes, one report: the ranks of torchrun, or the tasks of another scheduler."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ..launch import rank_and_world
from .layout import Checkpoint, discover
from .part import Part, PartResult
from .report import ScanReport
from .scan import conclude, plan, scan_parts
from .sweep import Progress


def world() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) outside of torchrun."""
    rank, size = rank_and_world()
    return (rank, size) if size > 1 and "MASTER_ADDR" in os.environ else (0, 1)


class Group:
    """The ranks of a scan. torch is imported here and only here: torchrun has loaded it anyway."""

    def __init__(self) -> None:
        import torch.distributed as dist

        rank, size = world()
        with _stdout_to_stderr():  # the gloo of torch 2.10 prints there, before our JSON
            dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(days=1))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._dist: Any = dist

    def gather(self, value: object) -> list[Any]:
        """The value of every rank, on rank 0; an empty list elsewhere."""
        parts: list[Any] = [None] * self.size
        self._dist.gather_object(value, parts if self.rank == 0 else None)
        return parts if self.rank == 0 else []

    def share_code(self, code: int) -> int:
        """Rank 0's exit code, on every rank."""
        box = [code]
        self._dist.broadcast_object_list(box)
        return int(box[0])

    def close(self) -> None:
        self._dist.destroy_process_group()


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """A block in which also C code that prints to stdout prints to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def scan_together(
    group: Group, checkpoints: list[Checkpoint], *, fast: bool, jobs: int | None, progress: Progress | None = None
) -> list[ScanReport]:
    """All reports on rank 0."""
    plans = [plan(c) for c in checkpoints]
    own = deal([[part.size for part in parts] for parts, _ in plans], group.size)[group.rank]
    mine: dict[tuple[int, int], PartResult] = {}
    for i in sorted({i for i, _ in own}):
        chosen = [j for k, j in own if k == i]
        found = scan_parts(checkpoints[i], [plans[i][0][j] for j in chosen], fast=fast, jobs=jobs, progress=progress)
        mine |= {(i, j): result for j, result in zip(chosen, found, strict=True)}
    results = {key: result for share in group.gather(mine) for key, result in share.items()}
    if group.rank:
        return []
    return [
        conclude(c, [results[i, j] for j in range(len(parts))], flaws, fast=fast)
        for i, (c, (parts, flaws)) in enumerate(zip(checkpoints, plans, strict=True))
    ]


def deal(sizes: list[list[int]], shares: int) -> list[list[tuple[int, int]]]:
    """Which files of which checkpoints each share gets, by their sizes; the largest first, so that shares are even.

    >>> deal([[5, 100, 7], [90]], 2)
    [[(0, 1), (0, 0)], [(1, 0), (0, 2)]]
    """
    every = sorted(((-size, i, j) for i, parts in enumerate(sizes) for j, size in enumerate(parts)))
    loads = [0] * shares
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(shares)]
    for size, i, j in every:
        owner = loads.index(min(loads))
        loads[owner] += (1 << 16) - size
        dealt[owner].append((i, j))
    return dealt


Work = Callable[[list[Part]], list[PartResult]]


def scan_spread(
    path: str | os.PathLike[str],
    run: Callable[[Work, list[list[Part]]], Iterable[list[PartResult]]],
    *,
    shares: int,
    fast: bool = False,
    jobs: int | None = None,
) -> ScanReport:
    """Scan one checkpoint as tasks of your own scheduler, with one report.

    ``run(work, shares)`` calls ``work`` on each share, anywhere, and returns the results in that order. With Ray::

        task = ray.remote(lambda work, share: work(share))
        run = lambda work, shares: ray.get([task.remote(work, share) for share in shares])
        scan_spread("s3://bucket/step-9000", run, shares=8)
    """
    (checkpoint,) = discover([path])
    parts, flaws = plan(checkpoint)
    dealt = [[j for _, j in share] for share in deal([[part.size for part in parts]], shares)]
    work = functools.partial(scan_parts, checkpoint, fast=fast, jobs=jobs)
    answers = run(work, [[parts[j] for j in share] for share in dealt])
    results = {
        j: result for share, found in zip(dealt, answers, strict=True) for j, result in zip(share, found, strict=True)
    }
    return conclude(checkpoint, [results[j] for j in range(len(parts))], flaws, fast=fast)

"""Under torchrun: every rank scans its share of the files, and rank 0 has the whole report."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from .layout import Checkpoint
from .part import PartResult, scan_part
from .report import ScanReport
from .scan import conclude, plan
from .sweep import Progress


def world() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) outside of torchrun."""
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, size) if size > 1 and "MASTER_ADDR" in os.environ else (0, 1)


class Group:
    """The ranks of a scan. torch is imported here and only here: torchrun has it at hand anyway."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(days=1))
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


def scan_together(
    group: Group, checkpoints: list[Checkpoint], *, fast: bool, jobs: int, progress: Progress | None = None
) -> list[ScanReport]:
    """All reports on rank 0; the largest files are dealt out first, so that the shares are even."""
    plans = [plan(c) for c in checkpoints]
    every = [(i, j, part.size) for i, (parts, _) in enumerate(plans) for j, part in enumerate(parts)]
    every.sort(key=lambda p: (-p[2], p[0], p[1]))
    loads = [0] * group.size
    mine: dict[tuple[int, int], PartResult] = {}
    for i, j, size in every:
        owner = loads.index(min(loads))
        loads[owner] += size + (1 << 16)
        if owner == group.rank:
            store, part = checkpoints[i].store, plans[i][0][j]
            mine[i, j] = scan_part(store, part, check=not fast, jobs=jobs, progress=progress)
    results = {key: result for share in group.gather(mine) for key, result in share.items()}
    if group.rank:
        return []
    return [
        conclude(c, [results[i, j] for j in range(len(parts))], flaws, fast=fast)
        for i, (c, (parts, flaws)) in enumerate(zip(checkpoints, plans, strict=True))
    ]

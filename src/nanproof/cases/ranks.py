"""One process or several: under torchrun, or started by hand with NPROC_PER_NODE in the environment."""

from __future__ import annotations

import os
import sys
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError
from .settings import Settings

M = TypeVar("M", bound=nn.Module)


def launch_again(launch: Settings) -> None:
    """Start this very command under torchrun when several processes are asked for and torchrun has not started it.

    The whole command line is repeated, so that ``nanproof run -m …`` stays ``nanproof run -m …`` in every process.
    """
    if "RANK" in os.environ or (launch.nnodes == 1 and launch.nproc_per_node == 1):
        return
    where = ["--standalone"]
    if launch.nnodes > 1:
        if "MASTER_ADDR" not in os.environ:
            raise UsageError(
                f"{launch.nnodes} nodes need a place to meet",
                hint="set MASTER_ADDR and MASTER_PORT, the same on every node, and start this on each",
            )
        endpoint = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '29400')}"
        where = [f"--nnodes={launch.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={launch.nproc_per_node}"]
    sys.stdout.flush()
    os.execv(sys.executable, [*torchrun, *sys.orig_argv[1:]])


class Ranks:
    """This process among the others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, model: M, *, unused: bool = False) -> M | DistributedDataParallel:
        """The model as the loop calls it: itself, or with gradients averaged over all processes."""
        return DistributedDataParallel(model, find_unused_parameters=unused) if self.size > 1 else model

    def all_agree(self, fine: bool) -> bool:
        """Whether it is fine on every rank, so that all of them decide the same."""
        if self.size == 1:
            return fine
        bad = torch.tensor(0 if fine else 1, device=self.device)
        dist.all_reduce(bad)
        return not bad.item()

    def leave(self) -> None:
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()

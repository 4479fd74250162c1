"""The same verdict on every rank, with one small collective per step that hides behind the backward pass.

What gradients carry needs no collective at all: a bad loss is turned into NaN gradients (`carry`), and the
gradient reduction of DDP or FSDP brings them to every rank. What gradients cannot carry (which rank, a loss
spike, bad inputs, the step number) travels as a few integers. Bits are reduced, never values: a maximum over
floats may drop a NaN.
"""

from __future__ import annotations

import time
import zlib
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import DesyncError

Share = Literal["flags", "gradients", "nothing"]


def carry(loss: Tensor) -> Tensor:
    """The upstream gradient for ``loss.backward``: 1, or NaN when the loss is not finite."""
    return torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan).to(loss)


class Ranks:
    """This rank's line to the others; alone, every question is answered locally."""

    def __init__(
        self, roots: list[nn.Module], *, sharded: bool, device: torch.device, share: Share, deadline: float
    ) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and share != "nothing"
        self.rank = dist.get_rank() if several else 0
        self.world = dist.get_world_size() if several else 1
        self.share = share
        self.ddp = several and all(isinstance(m, nn.parallel.DistributedDataParallel) for m in roots)
        self.reduced = sharded or self.ddp
        """Whether gradients are the same (or shards of the same) on every rank after backward."""
        self._device = device
        self._deadline = timedelta(seconds=deadline)
        # a group of its own: if ranks fall out of step, its small messages do not pair with gradients
        self._group = dist.new_group(timeout=self._deadline) if several else None
        self._work: Any = None
        self._vector = torch.zeros(0)
        self._count = 0
        self.seq = 0
        self._position = 0
        self._digest = 0

    @property
    def alone(self) -> bool:
        return self.world == 1

    def start(self, flags: Tensor, position: int) -> None:
        """Send this rank's flags (true is bad) and its place in the data on their way, before the backward pass."""
        self.seq += 1
        self._position = position
        if self.alone or self.share == "gradients":
            return
        own = torch.tensor([position, -position, self._digest, -self._digest], device=self._device)
        # the largest of (world - rank) is the lowest rank that raised a flag
        self._vector = torch.cat([flags.to(torch.int64) * (self.world - self.rank), own])
        self._count = flags.numel()
        self._work = dist.all_reduce(self._vector, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> Tensor | None:
        """Per flag 0 or world − lowest bad rank, then 1 if ranks are out of step; None when nothing is shared."""
        if self._work is None:
            return None
        work, self._work = self._work, None
        self._wait(work)
        vector, n = self._vector, self._count
        apart = (vector[n] + vector[n + 1] != 0) | (vector[n + 2] + vector[n + 3] != 0)
        return torch.cat([vector[:n], apart.to(torch.int64)[None]])

    def origin(self, value: float) -> int | None:
        """The rank behind a shared flag's value."""
        return self.world - int(value) if value else None

    def note(self, *words: str) -> None:
        """Fold a decision into the digest that the next step compares."""
        self._digest = zlib.crc32("|".join(words).encode(), self._digest) & 0x7FFFFFFF

    def any(self, bad: bool) -> bool:
        """Whether any rank says so. Waits, so it belongs on the path of an incident."""
        return any(self.gather(int(bad)))

    def gather(self, value: int) -> list[int]:
        """One integer from every rank."""
        if self.alone:
            return [value]
        mine = torch.tensor([value], device=self._device)
        everyone = [torch.zeros_like(mine) for _ in range(self.world)]
        self._wait(dist.all_gather(everyone, mine, group=self._group, async_op=True))
        return [int(v) for v in torch.cat(everyone).tolist()]

    def raise_apart(self) -> None:
        """Say which ranks fell out of step; every rank that took part in the exchange comes here together."""
        places, digests = self.gather(self._position), self.gather(self._digest)
        if len(set(places)) > 1:
            told = ", ".join(f"rank {r} at batch {p:,}" for r, p in enumerate(places[:8]))
            raise DesyncError(
                f"ranks are out of step at guarded step {self.seq:,}: {told}",
                hint="call guard.step for every batch on every rank; look for a continue that only one rank takes",
            )
        usual = max(set(digests), key=digests.count)
        odd = ", ".join(str(r) for r, d in enumerate(digests) if d != usual)
        raise DesyncError(
            f"ranks decided differently before guarded step {self.seq:,} (rank {odd} against the others)",
            hint="gradients must be reduced over all ranks before guard.step, or every rank must see the same ones",
        )

    def sync(self, roots: list[nn.Module], on: bool) -> None:
        """Whether the next backward pass reduces gradients (DDP only; FSDP2 always does)."""
        for model in roots if self.ddp else ():
            setattr(model, "require_backward_grad_sync", on)  # noqa: B010  what DDP's no_sync() does

    def sum_(self, tensors: list[Tensor], count: int) -> int:
        """Add up gradients over ranks in place, and a count; returns the total count."""
        total = torch.tensor([count], device=self._device)
        works = [dist.all_reduce(total, group=self._group, async_op=True)]
        works += [dist.all_reduce(t, group=self._group, async_op=True) for t in tensors]
        for work in works:
            self._wait(work)
        return int(total)

    def _wait(self, work: Any) -> None:
        start = time.monotonic()
        try:
            # gloo honours a deadline per wait; NCCL's watchdog uses the group's
            work.wait(self._deadline) if self._device.type == "cpu" else work.wait()
        except RuntimeError as error:
            waited = time.monotonic() - start >= 0.9 * self._deadline.total_seconds()
            what = f"waited {self._deadline.total_seconds():g} s" if waited else "lost its connection"
            raise DesyncError(
                f"rank {self.rank} {what} at guarded step {self.seq:,} {'for' if waited else 'to'} {self._missing()}",
                hint="look at what the missing ranks do: a rank that died, hangs, or skipped its guard.step",
            ) from error

    def _missing(self) -> str:
        """Who did not come: everybody who waits signs in the store; the others are missing."""
        try:
            store = dist.distributed_c10d._get_default_store()
            key = f"nanproof/waiting/{self.seq}"
            store.set(f"{key}/{self.rank}", "")
            time.sleep(2.0)
            missing = [r for r in range(self.world) if not store.check([f"{key}/{r}"])]
        except RuntimeError:
            missing = []
        return f"rank {', '.join(map(str, missing))}" if missing else "the other ranks"

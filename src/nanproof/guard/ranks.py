"""The same verdict on every rank, with one small collective per step that hides behind the backward pass.

What gradients carry needs no collective at all: a bad loss is turned into NaN gradients (`carry`), and the
gradient reduction of DDP or FSDP brings them to every rank. What gradients cannot carry (which rank, a loss
spike, bad inputs, the step number) travels as a few integers. Bits are reduced, never values: a maximum over
floats may drop a NaN.

Ranks that no DDP or FSDP keeps in step (pipeline stages, in-house parallelism) agree once, through the store that
they met at, that all of them step; only then do they wait for each other. No wait is without a limit.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import DesyncError
from .policy import Share
from .watchdog import Watchdog

log = logging.getLogger("nanproof")
DDP = nn.parallel.DistributedDataParallel

WISHES = ("snapshot", "warning")
"""What a rank wants the others to join in after the step; no fault of it."""
SHARED = ("input", "prediction", "loss", "gradient", "spike", "state", "failed", *WISHES)
"""What a rank tells the others about a step, as flags."""
HARMLESS = ("input", "prediction", *WISHES)
JOIN_SECONDS = 60.0
"""How long ranks that nothing keeps in step wait for each other once, at their first step."""
SAVE_SECONDS = 10.0
"""How long a rank that saves waits for the others to come; often only the first one saves."""
_TEXT = 1024


class RanksLost(RuntimeError):
    """The other ranks cannot be reached any more."""


class PeerFailed(RuntimeError):
    """The guard failed on another rank, which has left this exchange."""


def carry(loss: Tensor) -> Tensor:
    """The upstream gradient for ``loss.backward``: 1, or NaN when the loss is not finite."""
    return torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan).to(loss)


class Ranks:
    """This rank's connection to the others; alone, every question is answered locally."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        share: Share,
        deadline: float,
        stop_late: bool = False,
        group: Any = None,
        communicates: Callable[[], bool] = lambda: True,
    ) -> None:
        """``group`` are the ranks that share an update; by default all. ``stop_late``: end the process when a rank
        does not come within ``deadline``. ``communicates``: whether this rank has exchanged anything with others in
        its first step; ranks that do not train on their own."""
        several = dist.is_available() and dist.is_initialized() and share != "nothing"
        several = several and dist.get_world_size(group) > 1
        self.rank = dist.get_rank(group) if several else 0
        self.world = dist.get_world_size(group) if several else 1
        self.share = share
        self.wrappers = [m for m in model.modules() if isinstance(m, DDP)] if several else []
        parameters = [p for p in model.parameters() if p.requires_grad]
        wrapped = {id(p) for m in self.wrappers for p in m.parameters()}
        self.sharded = any(hasattr(p, "_local_tensor") for p in parameters)
        self.ddp = bool(self.wrappers) and all(id(p) in wrapped for p in parameters)
        self.reduced = several and (self.sharded or self.ddp)
        """Whether gradients are the same (or shards of the same) on every rank after backward."""
        self._in_step = self.reduced and _span_world(self.wrappers, parameters, self.world)
        """Whether all ranks are known to step together."""
        self._communicates = communicates
        self._device = device
        self._deadline = timedelta(seconds=deadline)
        self._parent = group
        self._joined = self.detached = self._saves_alone = False
        self._saves: dict[str, int] = {}
        self._group: Any = None
        self._work: Any = None
        self._vector = torch.zeros(0)
        self._digest = 0
        self._position = 0
        self.seq = 0
        self._watchdog = Watchdog(self.rank, self.world, deadline, stop=stop_late) if several else None

    @property
    def alone(self) -> bool:
        return self.world == 1

    @property
    def uneven(self) -> bool:
        """Whether ranks may run out of data at different steps, inside DDP's join(): then none waits for another."""
        return any(w._join_config.enable for w in self.wrappers)

    # --- one step ---------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Meet the others at the first step: a group of their own, so that its messages never pair with gradients."""
        if self._joined or self.alone:
            return
        self._joined = True
        if not self._in_step and not self._all_step():
            log.warning(
                "nanproof: rank %d is guarded alone: not every rank exchanges data with others and steps an optimizer"
                " within %.0f s, so no rank waits for another",
                self.rank,
                min(JOIN_SECONDS, self._deadline.total_seconds()),
            )
            self.detach()
            return
        # ranks that DDP or FSDP ties together wait as long as those would: a slow rank must not end the run
        timeout = max(self._deadline, _timeout_of(self._parent)) if self.reduced else self._deadline
        ranks = None if self._parent is None else dist.get_process_group_ranks(self._parent)
        backend = None if self.reduced else "gloo"  # bits of ranks that share no gradients travel on the host
        # local synchronization: ranks outside of the group are not asked, and the script's own groups keep their names
        self._group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)

    def detach(self) -> None:
        """Be alone from now on."""
        self.world, self.reduced, self.ddp, self.wrappers = 1, False, False, []
        self.detached = True
        self._work = None
        self.close()

    def start(self, flags: Tensor, position: int) -> None:
        """Send this rank's flags (true is bad) and its place in the data on their way."""
        self.join()
        self.seq += 1
        self._position = position
        if self.alone or self.share == "gradients":
            return
        device = self._device if self.reduced else torch.device("cpu")
        own = torch.tensor([position, -position, self._digest, -self._digest], device=device)
        # the largest of (world - rank) is the lowest rank that raised a flag
        self._vector = torch.cat([flags.to(device, torch.int64) * (self.world - self.rank), own])
        self._work = dist.all_reduce(self._vector, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> Tensor | None:
        """Per flag 0 or world − lowest bad rank, then 1 if ranks are out of step; None when nothing is shared."""
        if self._work is None:
            return None
        work, self._work = self._work, None
        self._wait(work)
        vector, n = self._vector.to(self._device), len(SHARED)
        apart = (vector[n] + vector[n + 1] != 0) | (vector[n + 2] + vector[n + 3] != 0)
        return torch.cat([vector[:n], apart.to(torch.int64)[None]])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which this rank may be waiting for others: past the deadline, the missing ones are named."""
        if self._watchdog is None or self.alone:
            yield
            return
        self._watchdog.enter(self.seq)
        try:
            yield
        finally:
            self._watchdog.leave()

    def note(self, *words: str) -> None:
        """Fold a decision into the digest that the next step compares."""
        self._digest = zlib.crc32("|".join(words).encode(), self._digest) & 0x7FFFFFFF

    # --- the path of an incident ------------------------------------------------------------------------------

    def any(self, bad: bool) -> bool:
        """Whether any rank says so."""
        return self.lowest(bad) is not None

    def lowest(self, bad: bool) -> int | None:
        """The lowest rank that says so; raises `PeerFailed` when the guard of one has failed."""
        largest, _ = self._exchange((self.world - self.rank) * bad)
        if self.alone:  # perhaps only since this exchange
            return self.rank if bad else None
        return self.world - largest if largest else None

    def largest(self, value: int) -> int:
        """The largest number (0 or more) of all ranks."""
        return self._exchange(value)[0]

    def hear(self, rank: int, value: int, text: str = "") -> tuple[int, str]:
        """What one rank says, a number of 0 or more and a short text, on every rank."""
        return self._exchange(value, text) if rank == self.rank else self._exchange(0)

    def any_in_save(self, target: object, bad: bool, among: int | None = None) -> bool:
        """Whether any of the ranks that save to ``target`` says so; the same answer on all that ask, in any order.

        Nobody knows which ranks save, so none waits for long: the first to give up answers for all.
        """
        among = self.world if among is None else min(among, self.world)
        if self.alone or among == 1:
            return bad
        self._saves[str(target)] = number = self._saves.get(str(target), 0) + 1
        limit = min(1.0 if self._saves_alone else SAVE_SECONDS, self._deadline.total_seconds())
        answer = self._ask(f"save/{zlib.crc32(str(target).encode())}/{number}", among, limit, at_once=bad)
        self._saves_alone = self._saves_alone or answer == "no"
        return bad if answer is None else answer == "yes"

    def fail(self) -> None:
        """Leave an exchange that the other ranks are in: they fall back to the plainest check, too."""
        if not self.alone:
            self._reduce(self.world - self.rank, 0, "")

    def _exchange(self, value: int, text: str = "") -> tuple[int, str]:
        if self.alone:
            return value, text
        failed, value, text = self._reduce(0, value, text)
        if failed:
            raise PeerFailed(f"the guard failed on rank {self.world - failed}")
        return value, text

    def _reduce(self, failed: int, value: int, text: str) -> tuple[int, int, str]:
        """The largest of each; always one message of the same size, so that a rank that fails pairs with any exchange.

        It does not grow with the number of ranks. Only one rank sends a text.
        """
        self.join()
        if self.alone:
            return failed, value, text
        device = self._device if self.reduced else torch.device("cpu")
        letters = list(text.encode()[:_TEXT].ljust(_TEXT, b"\0"))
        message = torch.tensor([failed, value, *letters], device=device)
        self._wait(dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group, async_op=True))
        failed, value, *letters = message.tolist()
        return failed, value, bytes(letters).rstrip(b"\0").decode(errors="ignore")

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        """Some numbers of every rank: only where the run ends, for this grows with the number of ranks."""
        mine = torch.tensor(numbers, device=self._device if self.reduced else torch.device("cpu"))
        everyone = [torch.zeros_like(mine) for _ in range(self.world)]
        self._wait(dist.all_gather(everyone, mine, group=self._group, async_op=True))
        return [t.tolist() for t in everyone]

    def raise_apart(self) -> None:
        """Say which ranks fell out of step; every rank that took part in the exchange comes here together."""
        places, digests = zip(*self._gather([self._position, self._digest]), strict=True)
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

    # --- DDP --------------------------------------------------------------------------------------------------

    def sync(self, on: bool) -> None:
        """Whether the next backward pass reduces gradients (DDP only; FSDP2 always does)."""
        for wrapper in self.wrappers:
            wrapper.require_backward_grad_sync = on  # what DDP's no_sync() does

    def share_buffers_next(self) -> None:
        """Let DDP broadcast buffers in the next forward pass, as it does after every reduction."""
        for wrapper in self.wrappers:
            wrapper.require_forward_param_sync = True

    def share_buffers(self) -> None:
        """Broadcast DDP's buffers now: in its next forward pass they may be put back on this rank alone."""
        for wrapper in self.wrappers:
            wrapper.require_forward_param_sync = True
            if wrapper._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
                wrapper._sync_buffers()  # type: ignore[no-untyped-call]
            wrapper.require_forward_param_sync = False

    def sum_(self, tensors: list[Tensor], count: int) -> int:
        """Add up gradients over ranks in place, and a count; returns the total count."""
        self.join()
        total = torch.tensor([count], device=self._device)
        works = [dist.all_reduce(total, group=self._group, async_op=True)]
        works += [dist.all_reduce(t, group=self._group, async_op=True) for t in tensors]
        for work in works:
            self._wait(work)
        return int(total)

    # --- meeting, waiting -------------------------------------------------------------------------------------

    def _all_step(self) -> bool:
        """Whether every rank comes to its first step within a time; all ranks get the same answer."""
        limit = min(JOIN_SECONDS, self._deadline.total_seconds())
        return self._ask(f"join/{_next_number()}", self.world, limit, refuse=not self._communicates()) == "all"

    def _ask(
        self, what: str, count: int, seconds: float, *, refuse: bool = False, at_once: bool = False
    ) -> Literal["all", "yes", "no"] | None:
        """Meet other ranks at the store, within a time. All get one answer: "all" have come and said nothing,
        "yes" if one said so at once, "no" if one refused or gave up waiting; None when the store is gone."""
        key = f"nanproof/{what}"
        try:
            store = dist.distributed_c10d._get_default_store()
            if refuse or at_once:
                store.compare_set(f"{key}/answer", "", "no" if refuse else "yes")
            elif store.add(f"{key}/count", 1) >= count:
                store.compare_set(f"{key}/answer", "", "all")
            limit = time.monotonic() + seconds
            while time.monotonic() < limit and not store.check([f"{key}/answer"]):
                time.sleep(0.01)
            return bytes(store.compare_set(f"{key}/answer", "", "no")).decode()  # type: ignore[return-value]
        except RuntimeError:
            return None

    def _wait(self, work: Any) -> None:
        with self.waiting():
            try:
                work.wait()
            except RuntimeError as error:
                missing = self._watchdog.missing() if self._watchdog is not None else []
                who = f"rank {', '.join(map(str, missing))}" if missing else "the other ranks"
                raise RanksLost(f"rank {self.rank} lost {who} at guarded step {self.seq:,}: {error}") from error

    def drop(self) -> None:
        """Forget an exchange that was started for a step which did not come to its end."""
        self._work = None

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()


_joins = 0


def _next_number() -> int:
    """Counts the guards of this process: ranks that make theirs in the same order meet the right others."""
    global _joins
    _joins += 1
    return _joins


def count_collectives() -> float:
    """How many collectives this process has taken part in so far, in all groups; NaN when they are not counted."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    try:
        return float(sum(group._get_sequence_number_for_group() for group in groups))
    except RuntimeError:  # a backend without sequence numbers
        return math.nan


def _span_world(wrappers: list[Any], parameters: list[nn.Parameter], world: int) -> bool:
    """Whether DDP or FSDP2 ties all ranks together, so that they are known to step together."""
    meshes = [p.device_mesh for p in parameters if hasattr(p, "device_mesh")]
    return any(dist.get_world_size(w.process_group) == world for w in wrappers) or any(
        m.size() == world for m in meshes
    )


def _timeout_of(group: Any) -> timedelta:
    """How long the run's own collectives wait."""
    chosen: Any = group or dist.group.WORLD
    for device in chosen._device_types:
        found = getattr(getattr(chosen._get_backend(device), "options", None), "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return dist.distributed_c10d.default_pg_timeout

"""Healthy states in host memory, to roll back to without touching a disk."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..captured import CapturedState
from .training import Training


class Snapshot:
    """One copy of the whole training state; its memory is reused when it is taken again."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._captured = CapturedState(training.slots)
        self._parameters: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._plain: dict[str, Any] = {}
        self._finite = _host_like(torch.ones((), dtype=torch.bool, device=training.device))
        self.step = -1
        self.update = -1

    @torch.no_grad()
    def take(self, step: int, update: int, finite: Tensor) -> None:
        """Copy the state as it is now; ``finite`` is the device's word on it, read only when it is needed."""
        t = self._training
        self.step = self.update = -1  # not usable until it is whole
        self._parameters = _copied(self._live_parameters(), self._parameters)
        self._tensors = _copied(self._live_state(), self._tensors)
        self._captured.capture()
        self._plain = {
            "optimizers": [_plain_state(o) for o in t.optimizers],
            "schedulers": [copy.deepcopy(s.state_dict()) for s in t.schedulers],
        }
        self._finite.copy_(finite, non_blocking=True)
        self.step, self.update = step, update

    @property
    def healthy(self) -> bool:
        """Whether all of it was finite; read long after it was taken, so nothing waits."""
        return self.step >= 0 and bool(self._finite.numpy())

    @torch.no_grad()
    def restore(self, *, random_states: bool = True, keep_rates: Sequence[Optimizer] = ()) -> None:
        """Put the state back, in place: parameters, moments and buffers stay the same objects.

        ``keep_rates``: optimizers whose learning rate somebody else sets, which therefore stays as it is now.
        """
        t = self._training
        rates = [(g, g["lr"]) for o in keep_rates for g in o.param_groups]
        for optimizer, plain in zip(t.optimizers, self._plain["optimizers"], strict=True):
            _restore_plain(optimizer, plain)
        _copy(self._live_parameters(), self._parameters)
        _copy(self._live_state(), self._tensors)
        # not strict: a schedule that was made after the snapshot stays as it is
        for scheduler, state in zip(t.schedulers, self._plain["schedulers"], strict=False):
            scheduler.load_state_dict(copy.deepcopy(state))
        for group, lr in rates:
            group["lr"] = lr
        if random_states:
            self._captured.restore()
        else:
            self._captured.restore_buffers()

    @contextmanager
    @torch.no_grad()
    def borrowed(self) -> Iterator[None]:
        """The older parameters and buffers for the length of a block; the current ones come back after it."""
        live = self._live_parameters()
        current = [a.clone() for a in live]
        now = CapturedState(self._training.slots)
        now.capture()
        try:
            _copy(live, self._parameters)
            self._captured.restore_buffers()
            yield
        finally:
            _copy(live, current)
            now.restore()

    def values(self) -> dict[Tensor, Tensor]:
        """The parameters with their values of then."""
        live = (p for _, p in self._training.model.named_parameters())
        return dict(zip(live, self._parameters, strict=True))

    def optimizer_state(self, optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
        """What an optimizer kept then, by parameter."""
        tensors = iter(self._tensors)
        for one, plain in zip(self._training.optimizers, self._plain["optimizers"], strict=True):
            kept = {p: {k: next(tensors) if v is None else v for k, v in s.items()} for p, s in plain["state"].items()}
            if one is optimizer:
                return kept
        return {}

    def _live_parameters(self) -> list[Tensor]:
        return [_local(p) for _, p in self._training.model.named_parameters()]

    def _live_state(self) -> list[Tensor]:
        t = self._training
        named = [*t.optimizer_state(), *t.averaged()]
        return [_local(v) for _, v in named] + t.scaler_tensors()

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in [*self._parameters, *self._tensors])


class Snapshots:
    """Two snapshots on a cadence and one of the last streak of bad steps; only healthy ones are rolled back to.

    An unhealthy snapshot never pushes a healthy one out. Without ``every`` only the health of the state is checked.
    """

    def __init__(self, training: Training, every: int | None, seconds: float) -> None:
        self._training = training
        self._keeping = every is not None
        self._every, self._seconds = every or 200, seconds
        self._slots = [Snapshot(training), Snapshot(training)]
        self._streak = Snapshot(training)
        self._health = _host_like(torch.ones((), dtype=torch.bool, device=training.device)).fill_(True)
        self._arrived: Any = None
        self._spent: set[int] = set()
        self._taken_at = time.monotonic()
        self._demanded = False
        self.cost_seconds = 0.0
        self.count = 0

    def due(self, update: int) -> bool:
        """Whether a snapshot follows this update."""
        return update % self._every == 0

    @property
    def overdue(self) -> bool:
        """Whether the last one was taken long ago; clocks of ranks differ, so they have to agree on it."""
        return self._demanded or time.monotonic() - self._taken_at > self._seconds

    def demand(self) -> None:
        """Take one as soon as all ranks have agreed on it."""
        self._demanded = True

    def take(self, step: int, update: int) -> None:
        """Copy the state and start to find out whether it is finite; nothing waits."""
        start = time.perf_counter()
        finite = self._training.health_flag()
        self._health.copy_(finite, non_blocking=True)
        if self._training.device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        if self._keeping:
            newest, older = sorted(self._slots, key=lambda s: s.step, reverse=True)
            target = older if newest.healthy or newest.step < 0 else newest
            target.take(step, update, finite)
        self._taken_at = time.monotonic()
        self._demanded = False
        self.cost_seconds += time.perf_counter() - start
        self.count += 1

    def take_streak(self, step: int, update: int) -> None:
        """Copy the state that a streak of bad steps began with: none of them has changed it."""
        if self._keeping and self._streak.update != update and update not in {s.update for s in self._slots}:
            self._streak.take(step, update, self._training.health_flag())

    def state_is_bad(self) -> bool:
        """Whether the state was found bad when it was last looked at; true once."""
        if self._arrived is not None and not self._arrived.query():
            return False  # still on its way: looked at again next step
        if bool(self._health.numpy()):
            return False
        self._health.fill_(True)
        return True

    def suspect(self) -> None:
        """Somebody has found the state bad."""
        self._health.fill_(False)

    def healthy(self) -> list[Snapshot]:
        """The usable snapshots, newest first."""
        found = [s for s in (*self._slots, self._streak) if s.healthy]
        return sorted(found, key=lambda s: s.update, reverse=True)

    def older_than(self, update: int) -> Snapshot | None:
        """The newest healthy snapshot of an earlier state, to tell a bad state from bad data."""
        return next((s for s in self.healthy() if s.update < update), None)

    def choose(self, update: int, *, weights_are_bad: bool) -> Snapshot | None:
        """The one to roll back to: not one that a rollback has used before and that did not help.

        When finite weights are to blame, a snapshot of the same update is no way out.
        """
        found = [s for s in self.healthy() if s.update not in self._spent]
        return next((s for s in found if s.update < update or not weights_are_bad), None)

    def spend(self, snapshot: Snapshot) -> None:
        """Remember that a rollback used this one; newer ones that were passed over are dropped."""
        for other in (*self._slots, self._streak):
            if other.update > snapshot.update:
                other.step = other.update = -1
        self._spent.add(snapshot.update)

    def cost(self) -> str:
        """What the snapshots have cost so far."""
        size = sum(s.nbytes for s in (*self._slots, self._streak)) / 2**20
        if not self._keeping:
            return "no snapshots"
        return f"{self.count} snapshots, {self.cost_seconds:.2f} s, {size:.1f} MiB held"


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return getattr(tensor, "_local_tensor", tensor)


def _copied(live: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """Copies of tensors, in the memory kept from last time when it fits."""
    if [(a.shape, a.dtype) for a in live] != [(a.shape, a.dtype) for a in kept]:
        kept = [_host_like(a) for a in live]
    _copy(kept, live)
    return kept


def _copy(target: list[Tensor], source: list[Tensor]) -> None:
    if target:
        torch._foreach_copy_(target, source, non_blocking=True)


def _host_like(tensor: Tensor) -> Tensor:
    """Host memory of the same shape; pinned for an accelerator, so that copies need not wait."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


def _plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """What of an optimizer is not a tensor: group options, non-tensor state, and which state exists at all."""
    groups = [
        {k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in g.items() if k != "params"}
        for g in optimizer.param_groups
    ]
    state = {
        p: {k: None if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in s.items()}
        if isinstance(s, dict)
        else None
        if isinstance(s, Tensor)
        else copy.deepcopy(s)
        for p, s in optimizer.state.items()
    }
    return {"groups": groups, "state": state}


def _restore_plain(optimizer: Optimizer, plain: dict[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, plain["groups"], strict=True):
        for key, value in saved.items():
            if isinstance(value, Tensor):
                group[key].copy_(value)
            else:
                group[key] = copy.deepcopy(value)
    for p in list(optimizer.state):
        if p not in plain["state"]:
            del optimizer.state[p]  # state that was born after the snapshot
            continue
        saved = plain["state"][p]
        if not isinstance(saved, dict):  # shared by all parameters; a tensor was copied with the others
            optimizer.state[p] = optimizer.state[p] if saved is None else copy.deepcopy(saved)
            continue
        for key in list(optimizer.state[p]):
            if key not in saved:
                del optimizer.state[p][key]
            elif saved[key] is not None:
                optimizer.state[p][key] = copy.deepcopy(saved[key])

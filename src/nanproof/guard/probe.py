"""Reads a step on the device: everything the verdict needs becomes one small tensor, brought over in one copy."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..records import Reading
from .signals import Losses, level_flag
from .taps import Watches
from .window import Limits

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A step's numbers on the host."""

    reading: Reading
    limits: Limits
    rank: int | None = None
    """The lowest rank that raised a flag before the backward pass."""
    spike: bool = False
    """Whether some rank saw its loss spike."""
    apart: bool = False
    """Whether ranks are out of step."""
    headroom: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    step: int
    lr: float
    keys: list[str]
    host: Tensor
    event: Any
    limits: Limits
    maxima: Mapping[str, float]
    seconds: float


class Probe:
    """Collects what one optimizer step consists of and sends it to the host: one copy, at most one wait."""

    def __init__(self, device: torch.device, watches: Watches, gradient_max: float) -> None:
        self._device = device
        self._gradient_max = gradient_max
        self._watches = watches
        self._pinned = device.type == "cuda"
        self._bounds: tuple[tuple[Limits, int], Tensor, Tensor] | None = None
        self._sent: _Sent | None = None
        self._clock = time.perf_counter()
        self.clear()

    def clear(self) -> None:
        """Start a new optimizer step."""
        self._losses: list[Tensor] = []
        self._components: dict[str, list[Tensor]] = {}
        self._inputs: list[Tensor] = []
        self._predictions: list[Tensor] = []

    def see(self, losses: Losses) -> None:
        """Take in the losses of one micro-batch after its forward pass."""
        self._losses.append(losses.total.detach())
        for name, value in losses.components.items():
            self._components.setdefault(name, []).append(value.detach().reshape(()))

    def look(self, batch: Any, prediction: Any) -> None:
        """Take in whether its inputs and predictions are finite."""
        for found, value in ((self._inputs, batch), (self._predictions, prediction)):
            flag = level_flag(value) if value is not None else None
            if flag is not None:
                found.append(flag)

    def forget_last(self) -> None:
        """Leave the last micro-batch out again."""
        for values in (self._losses, self._inputs, self._predictions, *self._components.values()):
            if values:
                values.pop()

    @torch.no_grad()
    def flags(self, limits: Limits, *, last_only: bool = False, divided: bool = False) -> Tensor:
        """What other ranks must hear of a window or its last micro-batch: input, prediction, loss, spike, components.

        A spike is one of the loss that `send` will report, so that no rank sees one that it does not tell.
        """
        some = slice(-1, None) if last_only else slice(None)
        false = torch.zeros((), dtype=torch.bool, device=self._device)

        def any_of(values: list[Tensor]) -> Tensor:
            return false if not values else values[0] if len(values) == 1 else torch.stack(values).any()

        found = [
            any_of(self._inputs[some]),
            any_of(self._predictions[some]),
            any_of([~torch.isfinite(v) for v in self._losses[some]]),
            self._loss(some, divided) > limits.loss,
            *(any_of([~torch.isfinite(c) for c in v[some]]) for v in self._components.values()),
        ]
        return torch.stack(found)

    @torch.no_grad()
    def send(
        self,
        *,
        step: int,
        lr: float,
        norm: Tensor,
        shared: Tensor | None,
        scale: Tensor | None,
        limits: Limits,
        last_only: bool = False,
        divided: bool = False,
    ) -> Tensor:
        """Start the copy of all numbers to the host; returns a device flag, true when the step is good.

        The numbers are those of the whole window, or with ``last_only`` of its last micro-batch. The loss of a
        window is the mean of those of its micro-batches, or where they were ``divided`` before, the sum.
        """
        some = slice(-1, None) if last_only else slice(None)
        losses = self._losses[some]
        loss = self._loss(some, divided)
        vital = {"loss": loss, "grad_norm": norm.to(self._device)}
        others: dict[str, Tensor] = {f"component:{k}": _mean(v[some], loss) for k, v in self._components.items()}
        if self._inputs:
            others["input"] = torch.stack(self._inputs[some]).any()
        if self._predictions:
            others["prediction"] = torch.stack(self._predictions[some]).any()
        if scale is not None:
            others["scale"] = scale
        if len(losses) > 1:
            others |= {f"micro:{i}": v for i, v in enumerate(losses)}
        watched, maxima = self._watches.read()
        others |= watched
        parts = [torch.stack([v.float() for v in vital.values()])]
        keys = list(vital)
        if shared is not None:
            names = ["input", "prediction", "loss", "spike", *(f"component:{k}" for k in self._components), "apart"]
            keys += [f"shared:{n}" for n in names]
            parts.append(shared.float())
        if others:
            parts.append(torch.stack([v.float().reshape(()).to(self._device) for v in others.values()]))
            keys += list(others)
        packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        low, high = self._bounds_for(limits, 0 if shared is None else shared.numel())
        vitals = packed[: low.numel()] if others else packed
        good = ((vitals >= low) & (vitals <= high)).all()
        host = torch.empty(packed.shape, dtype=torch.float32, pin_memory=self._pinned)
        host.copy_(packed, non_blocking=True)
        event = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        if event is not None:
            event.record()
        clock = time.perf_counter()
        self._sent = _Sent(
            step=step, lr=lr, keys=keys, host=host, event=event, limits=limits,
            maxima={**maxima, "grad_norm": self._gradient_max},
            seconds=clock - self._clock,
        )  # fmt: skip
        self._clock = clock
        return good

    def _loss(self, some: slice, divided: bool) -> Tensor:
        losses = self._losses[some]
        mean = _mean(losses, torch.zeros((), device=self._device))
        return mean * len(losses) if divided else mean

    @property
    def pending(self) -> bool:
        """Whether a step was sent whose numbers nobody has looked at."""
        return self._sent is not None

    def now(self, good: Tensor, world: int = 1) -> Seen:
        """The numbers of the step that was just sent."""
        good.item()  # host sync: once per step in "exact" timing; the copy sent before it has arrived by then
        return self.late(world)

    def late(self, world: int = 1) -> Seen:
        """The numbers of the step that was sent before; their copy has long arrived."""
        assert self._sent is not None
        sent, self._sent = self._sent, None
        if sent.event is not None:
            sent.event.synchronize()
        return _unpack(sent, world)

    def _bounds_for(self, limits: Limits, shared: int) -> tuple[Tensor, Tensor]:
        key = (limits, shared)
        if self._bounds is None or self._bounds[0] != key:
            zeros = [0.0] * shared
            low = torch.tensor([-FLOAT32_MAX, -FLOAT32_MAX, *zeros])
            high = torch.tensor([min(limits.loss, FLOAT32_MAX), min(limits.grad_norm, FLOAT32_MAX), *zeros])
            self._bounds = (key, low.to(self._device, non_blocking=True), high.to(self._device, non_blocking=True))
        return self._bounds[1], self._bounds[2]


def _mean(values: list[Tensor], none: Tensor) -> Tensor:
    if len(values) <= 1:
        return values[0] if values else none
    return torch.stack([v.float() for v in values]).mean()


def _unpack(sent: _Sent, world: int) -> Seen:
    numbers = dict(zip(sent.keys, (float(v) for v in sent.host.numpy()), strict=True))
    parts = {k.removeprefix("component:"): v for k, v in numbers.items() if k.startswith("component:")}
    shared = {k.removeprefix("shared:"): v for k, v in numbers.items() if k.startswith("shared:")}
    if shared:
        found = [k for k in ("input", "prediction", "loss") if shared[k]]
        found += [f"loss:{k.removeprefix('component:')}" for k, v in shared.items() if k.startswith("component:") and v]
    else:
        found = [k for k in ("input", "prediction") if numbers.get(k)]
        found += [f"loss:{k}" for k, v in parts.items() if not math.isfinite(v)]
    if not math.isfinite(numbers["loss"]):
        found += [
            f"loss:micro-batch {k.removeprefix('micro:')}"
            for k, v in numbers.items()
            if k.startswith("micro:") and not math.isfinite(v)
        ]
    raised = [world - int(v) for k, v in shared.items() if k != "apart" and v]
    watched = {k: v for k, v in numbers.items() if k.startswith(("absmax/", "param/"))}
    reading = Reading(
        step=sent.step, loss=numbers["loss"], grad_norm=numbers["grad_norm"], lr=sent.lr, components=parts,
        scale=numbers.get("scale"), bad=tuple(found), watched=watched, seconds=sent.seconds,
    )  # fmt: skip
    # of the scaled gradients, as they stood in memory
    held = {**watched, "grad_norm": reading.grad_norm * (reading.scale or 1.0)}
    headroom = {
        {"grad_norm": "gradient"}.get(k, k.removeprefix("absmax/")): math.log2(limit / held[k])
        for k, limit in sent.maxima.items()
        if 0 < held[k] < math.inf
    }
    return Seen(
        reading=reading, limits=sent.limits, rank=min(raised) if raised else None,
        spike=bool(shared.get("spike")), apart=bool(shared.get("apart")), headroom=headroom,
    )  # fmt: skip

"""Reads a step on the device: everything the verdict needs becomes one small tensor, brought over in one copy."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..losses import Losses
from ..records import Reading
from .ranks import HARMLESS, SHARED
from .signals import level_flag
from .window import Limits

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Readback:
    """A step's numbers on the host."""

    reading: Reading
    limits: Limits
    rank: int | None = None
    """The lowest rank that raised the flag nearest to the origin: a bad input before the gradients that it spoiled."""
    shared: frozenset[str] = frozenset()
    """What some rank flagged, of `ranks.SHARED` and "apart"."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """Early signs of trouble, by name."""
    moved: bool | None = None
    """On the cadence: whether parameters have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A step's numbers on their way to the host."""

    step: int
    lr: float
    keys: list[str]
    host: Tensor
    event: Any
    good: Tensor
    """On the device: whether the step is good."""
    norm: Tensor
    limits: Limits
    signals: int
    """How many of the last numbers are early signs of trouble."""
    seconds: float


class Signals:
    """What the passes of one step showed, as device scalars."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.components: dict[str, list[Tensor]] = {}
        self.inputs: list[Tensor] = []
        self.predictions: list[Tensor] = []

    def see(self, losses: Losses) -> None:
        """Take in the losses of one micro-batch after its forward pass."""
        self.losses.append(losses.total.detach())
        for name, value in losses.components.items():
            self.components.setdefault(name, []).append(value.detach().reshape(()))

    def look(self, batch: Any, prediction: Any) -> None:
        """Take in whether its inputs and predictions are finite."""
        for found, value in ((self.inputs, batch), (self.predictions, prediction)):
            flag = level_flag(value) if value is not None else None
            if flag is not None:
                found.append(flag)

    def extend(self, other: Signals) -> None:
        """Take in the signals of a micro-batch that was judged by itself."""
        self.losses += other.losses
        self.inputs += other.inputs
        self.predictions += other.predictions
        for name, values in other.components.items():
            self.components.setdefault(name, []).extend(values)

    def loss(self, device: torch.device, divided: bool) -> Tensor:
        """The loss of the step: the mean over its micro-batches, or where they were divided before, the sum."""
        mean = _mean(self.losses, torch.zeros((), device=device))
        return mean * len(self.losses) if divided else mean


class Reader:
    """Sends what one optimizer step consists of to the host: one copy, at most one wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._bounds: tuple[tuple[Limits, int], Tensor, Tensor] | None = None
        self._clock = time.perf_counter()

    @torch.no_grad()
    def flags(
        self,
        signals: Signals,
        limits: Limits,
        *,
        norm: Tensor | None = None,
        **known: bool,
    ) -> Tensor:
        """What other ranks must know of a step, in the order of `ranks.SHARED`; ``known`` are flags of the host.

        ``norm`` is given where gradients are not reduced, so that each rank has its own.
        """
        false = torch.zeros((), dtype=torch.bool, device=self._device)

        def any_of(values: list[Tensor]) -> Tensor:
            return false if not values else values[0] if len(values) == 1 else torch.stack(values).any()

        found = {
            "input": any_of(signals.inputs),
            "prediction": any_of(signals.predictions),
            "loss": any_of([~torch.isfinite(v) for v in signals.losses]),
            "gradient": false if norm is None else ~torch.isfinite(norm),
            "spike": false if norm is None else norm > limits.grad_norm,
        }
        given = [found[name] if name in found else torch.full_like(false, known.get(name, False)) for name in SHARED]
        return torch.stack([g.to(self._device) for g in given])

    @torch.no_grad()
    def send(
        self,
        signals: Signals,
        *,
        step: int,
        lr: float,
        norm: Tensor,
        shared: Tensor | None,
        scale: Tensor | None,
        limits: Limits,
        divided: bool,
        moved: Tensor | None,
        early: tuple[list[str], list[Tensor]],
    ) -> Sent:
        """Start the copy of all numbers to the host."""
        loss = signals.loss(self._device, divided)
        others: dict[str, Tensor] = {f"component:{k}": _mean(v, loss) for k, v in signals.components.items()}
        if signals.inputs:
            others["input"] = torch.stack(signals.inputs).any()
        if signals.predictions:
            others["prediction"] = torch.stack(signals.predictions).any()
        if scale is not None:
            others["scale"] = scale
        if len(signals.losses) > 1:
            others |= {f"micro:{i}": v for i, v in enumerate(signals.losses)}
        if moved is not None:
            others["moved"] = moved
        norm = norm.to(self._device)
        parts = [torch.stack([loss.float(), norm.float()])]
        keys = ["loss", "grad_norm"]
        if shared is not None:
            keys += [f"shared:{n}" for n in (*SHARED, "apart")]
            parts.append(shared.float())
        if others:
            parts.append(torch.stack([v.float().reshape(()).to(self._device) for v in others.values()]))
            keys += list(others)
        parts += [v.to(self._device) for v in early[1]]
        keys += early[0]
        packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        low, high = self._bounds_for(limits, 0 if shared is None else shared.numel())
        vitals = packed[: low.numel()] if packed.numel() > low.numel() else packed
        good = ((vitals >= low) & (vitals <= high)).all()
        host = torch.empty(packed.shape, dtype=torch.float32, pin_memory=self._pinned)
        host.copy_(packed, non_blocking=True)
        event = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        if event is not None:
            event.record()
        clock = time.perf_counter()
        seconds, self._clock = clock - self._clock, clock
        return Sent(
            step=step,
            lr=lr,
            keys=keys,
            host=host,
            event=event,
            good=good,
            norm=norm,
            limits=limits,
            signals=len(early[0]),
            seconds=seconds,
        )

    def now(self, sent: Sent, world: int = 1) -> Readback:
        """The numbers of the step that was just sent."""
        sent.good.item()  # host sync: once per step in exact timing; the copy sent before it has arrived by then
        return _unpack(sent, world)

    def later(self, sent: Sent, world: int = 1) -> Readback:
        """The numbers of a step that was sent one step ago; their copy has long arrived."""
        if sent.event is not None:
            sent.event.synchronize()
        return _unpack(sent, world)

    def _bounds_for(self, limits: Limits, shared: int) -> tuple[Tensor, Tensor]:
        key = (limits, shared)
        if self._bounds is None or self._bounds[0] != key:
            # a bad input or prediction alone is no harm: masks are full of -inf on purpose
            harmless = [FLOAT32_MAX if name in HARMLESS else 0.0 for name in (*SHARED, "apart")]
            low = torch.tensor([-FLOAT32_MAX, -FLOAT32_MAX, *([0.0] * shared)])
            high = torch.tensor([FLOAT32_MAX, min(limits.grad_norm, FLOAT32_MAX), *harmless[:shared]])
            self._bounds = (key, low.to(self._device, non_blocking=True), high.to(self._device, non_blocking=True))
        return self._bounds[1], self._bounds[2]


def _mean(values: list[Tensor], none: Tensor) -> Tensor:
    if len(values) <= 1:
        return values[0] if values else none
    return torch.stack([v.float() for v in values]).mean()


def _unpack(sent: Sent, world: int) -> Readback:
    pairs = list(zip(sent.keys, sent.host.tolist(), strict=True))
    numbers, signals = dict(pairs[: len(pairs) - sent.signals]), dict(pairs[len(pairs) - sent.signals :])

    def named(prefix: str) -> dict[str, float]:
        return {k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)}

    parts, shared = named("component:"), named("shared:")
    found = [k for k in ("input", "prediction") if numbers.get(k) or shared.get(k)]
    found += [k for k in ("loss", "gradient") if shared.get(k)]
    if not math.isfinite(numbers["loss"]):  # a bad component beside a finite total has weight zero
        found += [f"loss:{k}" for k, v in parts.items() if not math.isfinite(v)]
        found += [f"loss:micro-batch {k}" for k, v in named("micro:").items() if not math.isfinite(v)]
    raised = [world - int(shared[k]) for k in SHARED if k != "snapshot" and shared.get(k)]
    reading = Reading(
        step=sent.step,
        loss=numbers["loss"],
        grad_norm=numbers["grad_norm"],
        lr=sent.lr,
        components=parts,
        scale=numbers.get("scale"),
        bad=tuple(found),
        seconds=sent.seconds,
    )
    return Readback(
        reading=reading,
        limits=sent.limits,
        rank=raised[0] if raised else None,
        shared=frozenset(k for k, v in shared.items() if v),
        signals=signals,
        moved=bool(numbers["moved"]) if "moved" in numbers else None,
    )

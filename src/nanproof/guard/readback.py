"""Reads a step on the device: everything the verdict needs becomes one small tensor, brought over in one copy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..losses import Losses
from ..records import Reading
from .loss_scale import scale_of
from .ranks import HARMLESS, SHARED, WISHES
from .signals import level_flag
from .window import Limits

if TYPE_CHECKING:
    from .step import OpenStep

FLOAT32_MAX = torch.finfo(torch.float32).max
Numbers = np.ndarray[Any, np.dtype[Any]]


class Part(NamedTuple):
    """Numbers that travel with those of a step, and the function that says on the host what they mean, by name.

    The tensors are either all scalars or all rows.
    """

    tensors: Sequence[Tensor]
    read: Callable[[Numbers], Mapping[str, float]]

    def joined(self, device: torch.device) -> list[Tensor]:
        there = [t.to(device) for t in self.tensors]
        return [torch.stack(there)] if there[0].dim() == 0 else there

    def now(self) -> Mapping[str, float]:
        """What they mean, without a step to travel with: waits for the device."""
        return self.read(torch.cat(self.joined(torch.device("cpu"))).float().numpy())


class Arrived(NamedTuple):
    """A part on the host."""

    part: Part
    numbers: Numbers


def signals_of(arrived: Sequence[Arrived]) -> dict[str, float]:
    """What all parts mean."""
    return {name: value for one in arrived for name, value in one.part.read(one.numbers).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Readback:
    """A step's numbers on the host."""

    reading: Reading
    limits: Limits
    rank: int | None = None
    """The lowest rank that raised the flag nearest to the origin: a bad input before the gradients that it spoiled."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """What some rank flagged, of `ranks.SHARED` and "apart", with the lowest rank that did."""
    early: Sequence[Arrived] = ()
    """Early signs of trouble."""


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
    early: list[tuple[Part, int]]
    """The parts behind the keys, with their lengths."""
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
        if not self.losses:
            return torch.zeros((), device=device)
        return _mean(self.losses) * len(self.losses) if divided and len(self.losses) > 1 else _mean(self.losses)


class Reader:
    """Sends what one optimizer step consists of to the host: one copy, at most one wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._bounds: tuple[tuple[Limits, int], Tensor] | None = None
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
        step: OpenStep,
        *,
        lr: float,
        norm: Tensor,
        shared: Tensor | None,
        limits: Limits,
        early: Sequence[Part],
    ) -> Sent:
        """Start the copy of all numbers to the host."""
        signals, scale = step.signals, scale_of(step.scaler, self._device)
        loss, norm = signals.loss(self._device, step.divided), norm.to(self._device)
        keys = ["loss", "grad_norm"]
        vitals = torch.stack([loss.float(), norm.float()])
        if shared is not None:
            keys += [f"shared:{n}" for n in (*SHARED, "apart")]
            vitals = torch.cat([vitals, shared.float()])
        # every vital number is 0 or more but the loss, which has no limit: NaN and infinities are beyond any bound
        good = (vitals.abs() <= self._bounds_for(limits, vitals.numel())).all()
        others: dict[str, Tensor] = {f"component:{k}": _mean(v) for k, v in signals.components.items()}
        if signals.inputs:
            others["input"] = torch.stack(signals.inputs).any()
        if signals.predictions:
            others["prediction"] = torch.stack(signals.predictions).any()
        if scale is not None:
            others["scale"] = scale
        if len(signals.losses) > 1:
            others |= {f"micro:{i}": v for i, v in enumerate(signals.losses)}
        keys += list(others)
        parts = [vitals]
        if others:
            parts.append(torch.stack([v.reshape(()).to(self._device) for v in others.values()]))
        lengths = []
        for part in early:
            joined = part.joined(self._device)
            parts += joined
            lengths.append((part, sum(len(t) for t in joined)))
        packed = torch.cat(parts) if len(parts) > 1 else vitals
        host = torch.empty(packed.shape, dtype=torch.float32, pin_memory=self._pinned)
        host.copy_(packed, non_blocking=True)
        event = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        if event is not None:
            event.record()
        clock = time.perf_counter()
        seconds, self._clock = clock - self._clock, clock
        return Sent(
            step=step.number,
            lr=lr,
            keys=keys,
            host=host,
            event=event,
            good=good,
            norm=norm,
            limits=limits,
            early=lengths,
            seconds=seconds,
        )

    def receive(self, sent: Sent, world: int = 1, *, wait: bool = True) -> Readback:
        """The numbers of the step that was just sent; without ``wait`` of one step ago, whose copy has long arrived."""
        if wait:
            sent.good.item()  # host sync: once per step in exact timing; the copy sent before it has arrived by then
        elif sent.event is not None:
            sent.event.synchronize()
        return _unpack(sent, world)

    def _bounds_for(self, limits: Limits, count: int) -> Tensor:
        if self._bounds is None or self._bounds[0] != (limits, count):
            # a bad input or prediction alone is no harm: masks are full of -inf on purpose
            shared = [FLOAT32_MAX if name in HARMLESS else 0.0 for name in (*SHARED, "apart")]
            high = torch.tensor([FLOAT32_MAX, min(limits.grad_norm, FLOAT32_MAX), *shared][:count])
            self._bounds = (limits, count), high.to(self._device, non_blocking=True)
        return self._bounds[1]


def _mean(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack([v.float() for v in values]).mean()


def _unpack(sent: Sent, world: int) -> Readback:
    everything = sent.host.numpy()
    at = len(sent.keys)
    numbers = dict(zip(sent.keys, everything[:at].tolist(), strict=True))
    early = []
    for part, length in sent.early:
        early.append(Arrived(part, everything[at : at + length]))
        at += length

    def named(prefix: str) -> dict[str, float]:
        return {k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)}

    parts, shared = named("component:"), named("shared:")
    found = [k for k in ("input", "prediction") if numbers.get(k) or shared.get(k)]
    found += [k for k in ("loss", "gradient") if shared.get(k)]
    if not math.isfinite(numbers["loss"]):  # a bad component beside a finite total has weight zero
        found += [f"loss:{k}" for k, v in parts.items() if not math.isfinite(v)]
        found += [f"loss:micro-batch {k}" for k, v in named("micro:").items() if not math.isfinite(v)]
    by_rank = {k: world - int(v) for k, v in shared.items() if v}
    raised = [by_rank[k] for k in SHARED if k in by_rank and k not in WISHES]
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
        shared=by_rank,
        early=early,
    )

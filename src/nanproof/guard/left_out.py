"""Forward passes that never reach a backward pass: ``if loss.isnan(): continue``.

Several calls of a model may make up one loss, so a call whose backward pass does not follow is not left out yet. The
hooks on its outputs tell: what was left out is a call whose outputs got no gradient while the loop went on.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..collector import objects
from ..tensors import tensors_in
from .forward_capture import ForwardCapture
from .signals import level_flag
from .step import Pass

FOLLOWS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
"""Whether outputs and losses can be followed. In torch 2.7 a weak reference can leave autograd with a broken tensor,
and tensors in the heap may raise when they are looked at; 2.10 does neither. Inputs are looked at in every version."""
STEPS = 2
"""A generator's output waits for its backward pass while the discriminator takes a step."""
WAITING = 16
WHOLE = 8
"""So often the whole heap is searched for losses: with millions of objects that takes seconds. From then on only what
is young is looked at, as a loss that was just computed is."""


@dataclass(eq=False)
class Call:
    """One call of the model in training mode."""

    inputs: Any
    module: nn.Module | None = None
    capture: ForwardCapture = field(default_factory=ForwardCapture)
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    bad: Tensor | None = None
    """On the device: whether something of it was not finite."""
    step: int = 0

    @property
    def used(self) -> bool:
        """Whether a backward pass came by; True too where that cannot be seen."""
        return self.capture.reached or not self.capture.hooked


class Calls:
    """The calls since the last backward pass, and those before it that are still without one."""

    def __init__(self, left_out: Callable[[Pass], None]) -> None:
        """``left_out`` hears of every call that was not finite and that no backward pass came by."""
        self._left_out = left_out
        self._now: list[Call] = []
        self._waiting: deque[Call] = deque()
        self._usual = 1
        """So many calls were needed for a loss."""
        self._known: dict[int, weakref.ref[Tensor]] = {}
        """Losses that a backward pass began with, or that were looked at."""
        self._searches = 0

    @property
    def unusual(self) -> bool:
        """Whether there are as many calls without a backward pass already as were ever needed for a loss."""
        return bool(self._now) and len(self._now) >= self._usual

    def begin(self, inputs: Any) -> Call:
        """The model is called."""
        if self._now:
            self._look(self._now[-1], self._new_losses() if self.unusual else [])
        if len(self._now) >= WAITING:
            self._wait([self._now.pop(0)])
        self._now.append(Call(inputs))
        return self._now[-1]

    def end(self, module: nn.Module, output: Any) -> None:
        """The call that began last has an output."""
        if self._now:
            self._now[-1].module = module
            self._now[-1].outputs = [weakref.ref(t) for _, t in tensors_in(output)] if FOLLOWS else []
            self._now[-1].capture.after(module, output)

    def joined(self) -> tuple[Any, ForwardCapture]:
        """What the calls so far were given, as one pass."""
        return _join(self._now)

    def before_backward(self, losses: Any) -> None:
        for call in self._now if len(self._now) > 1 else ():
            self._look(call)
            call.capture.before_backward(losses)
        self._remember([t for _, t in tensors_in(losses)])

    def after_backward(self, here: Pass, step: int) -> None:
        """A backward pass is over: what it did not come by is no part of it."""
        calls, self._now = self._now, []
        used = [c for c in calls if c.used]
        self._usual = max(self._usual, len(used))
        if used and len(calls) > 1:
            here.inputs, here.capture = _join(used)
            for call in calls:
                call.step = step
            self._wait([c for c in calls if c not in used])

    def _wait(self, calls: list[Call]) -> None:
        self._waiting += calls
        while len(self._waiting) > WAITING:
            self._count(self._waiting.popleft())

    def settle(self, step: int | None = None) -> None:
        """Count what has waited long enough; without a step, the loop has come to its end."""
        if step is None and self._now:
            self._look(self._now[-1], self._new_losses())
            self._waiting += self._now
            self._now = []
        while self._waiting and (step is None or self._waiting[0].step + STEPS < step):
            self._count(self._waiting.popleft())

    def drop(self) -> None:
        """The loop raised: what it was about is told elsewhere."""
        self._now = []

    def held(self) -> list[nn.Module]:
        """The modules whose output the loop still holds, for a backward pass to come: a generator."""
        calls = [c for c in (*self._waiting, *self._now) if c.capture.held and not c.used]
        return [c.module for c in calls if c.module is not None]

    def _count(self, call: Call) -> None:
        if call.bad is not None and not call.used and bool(call.bad):  # host sync: only where a loop skips
            self._left_out(Pass(inputs=call.inputs))

    def _look(self, call: Call, losses: list[Tensor] | None = None) -> None:
        if call.bad is None:
            outputs = [t for ref in call.outputs if (t := ref()) is not None]
            call.bad = level_flag([call.inputs, outputs, losses or []])

    def _new_losses(self) -> list[Tensor]:
        """Scalars with a graph that the script holds and that no backward pass began with."""
        if not FOLLOWS:
            return []
        self._searches += 1
        young = (0, 1) if self._searches > WHOLE else ()
        scalars = [t for t in objects(*young) if issubclass(type(t), Tensor) and t.grad_fn is not None]
        new = [t for t in scalars if t.numel() == 1 and id(t) not in self._known]
        self._remember(new)
        return new

    def _remember(self, losses: list[Tensor]) -> None:
        for loss in losses if FOLLOWS else ():
            forget = functools.partial(_forget, self._known, id(loss))
            self._known[id(loss)] = weakref.ref(loss, forget)


def _join(calls: list[Call]) -> tuple[Any, ForwardCapture]:
    """What the calls of one pass were given."""
    if len(calls) == 1:
        return calls[0].inputs, calls[0].capture
    return [c.inputs for c in calls], ForwardCapture.of_several([c.capture for c in calls])


def _forget(known: dict[int, weakref.ref[Tensor]], key: int, _: object) -> None:
    known.pop(key, None)

"""A bad step, or the model's part of it, that can be run again while repairs are tried on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..captured import CapturedState
from ..locating import Location, locate
from ..locating.bounds import SECONDS, Endless, within
from ..locating.collectives import no_collectives
from ..losses import losses_of
from ..rng import random_states, set_random_states
from ..tensors import is_finite
from .examine import Rerun
from .ranks import Ranks
from .signals import total_norm
from .step import OpenStep, Pass
from .training import Training, gradients_of


class Replay(Protocol):
    """What a search needs of a bad step."""

    commits: bool
    """Whether a good `run` leaves the gradients of the whole step in place."""

    def locate(self) -> Location:
        """Where it fails as things stand, found with one traced pass."""

    def run(self) -> bool:
        """Whether it is finite as things stand, forward and backward, run as the loop runs it."""


class StepReplay:
    """The whole step, through the closures of its passes."""

    commits = True

    def __init__(
        self,
        step: OpenStep,
        rerun: Rerun,
        culprit: Pass | None,
        training: Training,
        ranks: Ranks,
        weights: Mapping[str, float],
    ) -> None:
        self._step, self._rerun, self._training, self._weights = step, rerun, training, weights
        self._lockstep = ranks.sharded and not ranks.alone
        self._passes = [culprit] if culprit is not None and not self._lockstep else step.passes

    def locate(self) -> Location:
        found: list[Location] = []
        for one in self._passes:
            self._step.before.restore()
            if one.random and len(self._step.passes) > 1:
                set_random_states(dict(one.random))
            assert one.closure is not None
            found.append(
                locate(
                    one.closure.again,
                    model=self._training.model,
                    batch=one.batch,
                    verify=False,
                    lockstep=self._lockstep,
                    loss_weights=self._weights,
                )
            )
            if found[-1].reproduced and not self._lockstep:  # ranks that replay together all go through all passes
                break
        return next((f for f in found if f.reproduced), found[-1])

    def run(self) -> bool:
        return self._rerun.finite()


class ModelReplay:
    """The model's part of a pass, where the loop's own code cannot be run again: its inputs, and a stand-in for what
    comes after its outputs."""

    commits = False

    def __init__(
        self,
        play: Callable[[], Tensor],
        before: Callable[[], None],
        batch: Any,
        training: Training,
        ranks: Ranks,
    ) -> None:
        self._play, self._before, self._batch, self._training = play, before, batch, training
        self._lockstep = ranks.sharded and not ranks.alone
        self._ranks = ranks

    def locate(self) -> Location:
        self._before()
        return locate(self._play, model=self._training.model, batch=self._batch, verify=False, lockstep=self._lockstep)

    def run(self) -> bool:
        self._before()
        measured = measure(self._play, self._training, lockstep=self._lockstep)
        return not self._ranks.any(measured is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run of a batch gave."""

    loss: float
    gradients: list[Tensor]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(float(total_norm(self.gradients)))

    def differs(self, other: Measured) -> float:
        """The larger of the relative differences of loss and gradients; 0 when they are equal, bit for bit."""
        loss = abs(self.loss - other.loss) / max(abs(self.loss), abs(other.loss), 1e-30)
        gap = _norm(a.float() - b.float() for a, b in zip(self.gradients, other.gradients, strict=True))
        size = max(_norm(g.float() for g in self.gradients), 1e-30)
        return max(loss, gap / size)


def run_once(
    play: Callable[[], Any], training: Training, *, lockstep: bool, weights: Mapping[str, float] | None = None
) -> Measured:
    """Loss and gradients of a closure, finite or not. Gradients stay as they were."""
    held = [(p, p.grad) for _, p in training.parameters]
    for p, _ in held:
        p.grad = None
    try:
        with nullcontext() if lockstep else no_collectives(training.model):
            loss = losses_of(play() if lockstep else within(SECONDS, play), weights).total
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [getattr(g, "_local_tensor", g) for _, g in gradients_of(training.parameters)]
        return Measured(loss=float(loss.detach()), gradients=gradients)
    finally:
        for p, grad in held:
            p.grad = grad


def measure(play: Callable[[], Any], training: Training, *, lockstep: bool) -> Measured | None:
    """Loss and gradients of a closure; None when they are not finite, or it raises."""
    try:
        found = run_once(play, training, lockstep=lockstep)
    except (Exception, Endless):
        if lockstep:
            raise
        return None
    return found if found.finite else None


@contextmanager
def as_it_was(slots: Any) -> Iterator[None]:
    """A block after which random states and buffers are what they were before it, for a graph that waits, too."""
    state = CapturedState(slots)
    state.capture()
    buffers = (module._buffers.get(key) for _, module, key in slots)
    # to autograd, a buffer that was written is another one, whatever its values: the loop's backward pass would raise
    with _unsafe_preserve_version_counter(tuple(b for b in buffers if b is not None and not b.is_inference())):
        try:
            yield
        finally:
            state.restore()


@contextmanager
def moved(training: Training, share: float) -> Iterator[None]:
    """A block in which every weight is larger or smaller by a share of itself; 0 leaves them alone."""
    weights = [p.detach() for _, p in training.parameters if share and p.is_floating_point()]
    weights = [getattr(w, "_local_tensor", w) for w in weights]
    kept = [w.clone() for w in weights]
    # the loop's own graph may wait for its backward pass: to autograd, nothing was written
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(weights)):
        try:
            for w in weights:
                signs = torch.ones_like(w, memory_format=torch.contiguous_format).view(-1)
                signs[::2] = -1
                w.add_(w * signs.view(w.shape), alpha=share)
            with torch.enable_grad():
                yield
        finally:
            for w, old in zip(weights, kept, strict=True):
                w.copy_(old)


class GoodBatch:
    """A pass that was good, to be run again: with a repair it must give what it gave without."""

    def __init__(self, one: Pass, random: Mapping[str, Any]) -> None:
        self._pass, self._random = one, dict(random)

    def measure(self, training: Training, *, lockstep: bool) -> Measured | None:
        play: Callable[[], Any] | None
        if self._pass.closure is not None:
            play = self._pass.closure.again if self._pass.closure.faithful else None
        else:
            play = self._pass.capture.step(probe=True)
        if play is None and not lockstep:
            return None
        with as_it_was(training.slots):
            set_random_states({**random_states(), **self._random})
            return measure(play, training, lockstep=lockstep) if play is not None else None


def outputs_are_finite(outputs: Iterable[Tensor]) -> bool:
    """Whether the outputs that a loss is made of are finite."""
    return all(is_finite(o) for o in outputs)


def _norm(tensors: Iterable[Tensor]) -> float:
    squares = [t.pow(2).sum() for t in tensors]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

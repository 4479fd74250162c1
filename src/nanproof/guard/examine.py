"""One bad step under examination: what exactly is bad, what kind of bad a rerun shows, whether it is only the scale.

transient  the same step is good the second time: keep it
scale      good without the loss scale: GradScaler's ordinary overflow
range      good in float32: the dtype's range is too small
state      good from an older snapshot: the weights have gone bad, skipping will not help
data       bad from an older snapshot too: skip the batch
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..captured import CapturedState
from ..locating.bounds import SECONDS, Endless, within
from ..locating.collectives import CollectiveRefused, no_collectives
from ..locating.precision import in_precision
from ..losses import losses_of
from ..records import Origin, Reading, TensorFacts, Verdict
from ..rng import set_random_states
from ..tensors import facts_of, is_finite, tensors_in
from .judge import name_culprits
from .ranks import Ranks, carry
from .signals import careful_norm, total_norm
from .snapshots import Snapshot
from .step import OpenStep
from .training import Training, gradients_of

CLOSE_LOOKS = 50
"""How many bad tensors get their statistics taken; the rest are only named."""


def look_closely(step: OpenStep, verdict: Verdict, ranks: Ranks) -> tuple[Verdict, list[TensorFacts]]:
    """The verdict with the bad gradients named, and their statistics."""
    grads = gradients_of([*step.parameters, *step.beside])
    bad = [(n, g) for n, g in grads if not is_finite(g)]
    facts = [facts_of(f"grad {n}", g) for n, g in bad[:CLOSE_LOOKS]]
    overflowed = not ranks.any(bool(bad))  # a shard may be finite here and bad elsewhere
    norm = careful_norm([g for _, g in grads]) if overflowed else math.nan
    return name_culprits(verdict, [n for n, _ in bad], norm, overflowed), facts


def batch_facts(batch: Any) -> list[TensorFacts]:
    """The bad tensors of a batch."""
    return [facts_of(f"batch {n}", t) for n, t in tensors_in(batch) if not is_finite(t)]


class _BeforeReduction(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices bad gradients of this rank on their way into a reduction over ranks (FSDP)."""

    supports_higher_order_operators = True
    bad = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d" and "reduce" in function._opname:
            # of a reduce-scatter only what goes in: its output is memory that nobody has written yet
            sent = args[1] if "scatter" in function._opname else args[0]
            found = [a for a in tree_leaves(sent) if isinstance(a, Tensor) and a.is_floating_point()]
            self.bad = self.bad or not all(is_finite(a) for a in found)
        return function(*args, **(kwargs or {}))


class Rerun:
    """Runs all passes of a step again from the state before it.

    Under DDP each rank replays by itself and only the answers are exchanged, so that a replay that raises on one
    rank keeps no other waiting. Sharded models replay together: their weights are gathered in every pass.
    """

    def __init__(
        self,
        step: OpenStep,
        training: Training,
        ranks: Ranks,
        before: CapturedState,
        weights: Mapping[str, float],
    ) -> None:
        assert step.closures is not None
        self._closures, self._passes = step.closures, step.passes
        self._scaler = step.scaler
        self._training, self._ranks, self._before, self._weights = training, ranks, before, weights
        self._lockstep = ranks.sharded and not ranks.alone
        self.losses: list[float] = []
        """The losses of the last run."""
        self.culprit: int | None = None
        """The rank whose own gradients were bad before they were reduced."""
        self._seconds = math.inf
        """How long a run on other values may take: the first, on the step's own, shows what is usual."""
        self._refused = False
        """Whether a replay met a collective that only this rank was about to take part in."""

    def classify(self, *, older: Snapshot | None) -> Origin | None:
        """What kind of bad step this is; after "transient" the gradients are good and in place."""
        scaled = self._scaler is not None
        believable = all(c.faithful for c in self._closures)
        before = _BeforeReduction()  # type: ignore[no-untyped-call]
        # inside any dispatch mode compiled code runs eagerly, and its own failures would look transient
        with before if self._lockstep else nullcontext():
            good = self._good(lambda: self._run(scaled=scaled))
        if self._ranks.any(self._refused):
            return None  # nothing can be learned from a step that no rank can run by itself
        culprit = self._ranks.lowest(before.bad if self._lockstep else not good)
        if not self._ranks.any(not good):
            if self._ranks.any(not believable or not self._reproduces()):
                return None
            # where no rank's part is bad, the sum over ranks may be: a comm hook in half precision overflows again
            return "transient" if self._good_together(scaled=scaled) else None
        if not self._ranks.alone:
            self.culprit = culprit
        if scaled and self._everywhere(lambda: self._run(scaled=False)):
            return "scale"
        if self._good_in_float32():
            return "range"
        if older is None:
            return None
        with older.borrowed():
            good = self._everywhere(lambda: self._run(scaled=False), from_here=True)
        return "state" if good else "data"

    def finite(self) -> bool:
        """Whether the step is good as things stand, on every rank; if so its gradients are in place."""
        scaled = self._scaler is not None
        return self._everywhere(lambda: self._run(scaled=scaled)) and self._good_together(scaled=scaled)

    def loss(self) -> float:
        return math.fsum(self.losses) / max(len(self.losses), 1)

    def _reproduces(self) -> bool:
        """Whether passes whose loss was finite gave the same loss again: a window is only believed if they did."""
        if len(self._passes) < 2:
            return True
        first = [float(p.loss) if p.loss is not None else math.nan for p in self._passes]
        return all(a == b for a, b in zip(first, self.losses, strict=True) if math.isfinite(a))

    def _run(self, *, scaled: bool, together: bool = False) -> None:
        """All passes, forward and backward, from wherever the state is now."""
        self._training.zero_grad()
        self.losses = []
        several = len(self._passes) > 1
        for i, (closure, one) in enumerate(zip(self._closures, self._passes, strict=True)):
            if several and one.random:
                set_random_states(dict(one.random))
            if together and not self._ranks.sharded:
                self._ranks.sync(i == len(self._closures) - 1)
            losses = losses_of(closure.again(), self._weights)
            loss = self._scaler.scale(losses.total) if scaled else losses.total
            loss.backward(gradient=None if self._ranks.alone else carry(loss))
            self.losses.append(float(losses.total.detach()))  # host sync: incident path only

    def _good_together(self, *, scaled: bool) -> bool:
        """Whether the step is good with DDP's own reduction too, now that every rank has found its part good."""
        if self._ranks.alone or self._lockstep:
            return True
        self._before.restore()
        self._ranks.share_buffers_next()
        self._run(scaled=scaled, together=True)
        norm = float(total_norm([g for _, g in gradients_of(self._training.parameters)]))
        return not self._ranks.any(not math.isfinite(norm))

    def _good(
        self, run: Callable[[], None], *, from_here: bool = False, gradients: Callable[[], list[Tensor]] | None = None
    ) -> bool:
        """Whether a run is finite on this rank; one that raises is not."""
        if not from_here:
            self._before.restore()
        else:
            set_random_states(self._before.random)
        began = time.monotonic()
        try:
            with self._apart():
                within(self._seconds, run)
        except (Exception, Endless) as error:
            self._refused = self._refused or isinstance(error, CollectiveRefused)
            if self._lockstep:
                raise  # the others are in the middle of a gather; nothing can be learned any more
            self._training.zero_grad()
            return False
        finally:
            if math.isinf(self._seconds) and not self._lockstep:
                self._seconds = SECONDS + 10 * (time.monotonic() - began)
        grads = gradients() if gradients is not None else [g for _, g in gradients_of(self._training.parameters)]
        norm = float(total_norm(grads)) if self._lockstep or not self._ranks.sharded else math.nan
        return all(map(math.isfinite, self.losses)) and math.isfinite(norm)

    def _everywhere(self, run: Callable[[], None], *, from_here: bool = False) -> bool:
        return not self._ranks.any(not self._good(run, from_here=from_here))

    def _good_in_float32(self) -> bool:
        """Whether float32 heals the step; false when nothing was in half precision, so that it says something."""
        if self._training.sharded:
            return False  # FSDP gathers weights in their own format, and is left half-way when it meets another
        with in_precision(self._training.model, torch.float32) as mode:
            good = self._good(lambda: self._run(scaled=False), gradients=mode.gradients) and mode.widened
        self._training.zero_grad()
        return not self._ranks.any(not good)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Nothing is exchanged in a replay, unless all ranks replay together."""
        if self._lockstep:
            yield
            return
        with no_collectives(self._training.model):
            yield


def second_reading(rerun: Rerun, step: OpenStep, training: Training, count: int) -> tuple[float, float]:
    """Loss and gradient norm of the rerun that was good; its gradients are in place, unscaled and averaged."""
    if step.scaler is not None:
        for optimizer in training.optimizers:
            step.scaler.unscale_(optimizer)
    grads = [g for _, g in gradients_of(step.parameters)]
    if count > 1:
        torch._foreach_div_([getattr(g, "_local_tensor", g) for g in grads], count)
    return rerun.loss(), float(total_norm(grads))


def is_ordinary_overflow(
    step: OpenStep, reading: Reading, origin: Origin | None, min_scale: float, ranks: Ranks
) -> bool:
    """Whether this is GradScaler looking for its scale: the loss is good and there is room below."""
    if reading.scale is None or ranks.any(not math.isfinite(reading.loss)):  # one rank's loss decides for all
        return False
    if step.closures is not None and not step.local:
        return origin == "scale"
    return bool(reading.scale * step.scaler.get_backoff_factor() >= min_scale)

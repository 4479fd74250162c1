"""Running a bad step again to learn what kind of bad it is.

transient  the same step is good the second time: keep it
scale      good without the loss scale: GradScaler's ordinary overflow
range      good in float32: the dtype's range is too small
state      good from an older snapshot: the weights have gone bad, skipping will not help
data       bad from an older snapshot too: skip the batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..locating.precision import in_precision
from ..records import Origin
from ..rng import set_random_states
from ..tensors import is_finite
from .moment import Moment
from .ranks import Ranks, carry
from .signals import losses_of, total_norm
from .snapshots import Snapshot
from .state import Training

Closure = Callable[[], Any]


class _BeforeReduction(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices bad gradients of this rank on their way into a reduction over ranks, for DDP and FSDP alike."""

    bad = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d" and "reduce" in function._opname:
            # of a reduce-scatter only what goes in: its output is memory that nobody has written yet
            sent = args[1] if "scatter" in function._opname else args[0]
            found = [a for a in tree_leaves(sent) if isinstance(a, Tensor) and a.is_floating_point()]
            self.bad = self.bad or not all(is_finite(a) for a in found)
        return function(*args, **(kwargs or {}))


class Rerun:
    """Plays one closure again from the moment before its forward pass, on all ranks together."""

    def __init__(
        self, training: Training, ranks: Ranks, moment: Moment, closure: Closure, weights: Mapping[str, float]
    ) -> None:
        self._training = training
        self._ranks = ranks
        self._moment = moment
        self._closure = closure
        self._weights = weights
        self.loss = math.nan
        """The loss of the last run."""
        self.culprit: int | None = None
        """The rank whose own gradients were bad before they were reduced."""

    def classify(self, *, scaled: bool, older: Snapshot | None) -> Origin | None:
        """What kind of bad step this is; after "transient" the gradients are good and in place."""
        self._moment.restore()
        with _BeforeReduction() as before:  # type: ignore[no-untyped-call]
            good = self._good(scaled=scaled)
        if good:
            return "transient"
        if not self._ranks.alone:
            bad = self._ranks.gather(int(before.bad))
            self.culprit = bad.index(1) if any(bad) else None
        if scaled:
            self._moment.restore()
            if self._good(scaled=False):
                return "scale"
        if self._good_in_float32():
            return "range"
        if older is None:
            return None
        with older.borrowed():
            set_random_states(self._moment.random)
            good = self._good(scaled=False)
        return "state" if good else "data"

    def _good(self, *, scaled: bool, gradients: Callable[[], list[Tensor]] | None = None) -> bool:
        """Whether forward and backward are finite on every rank; ``gradients`` if not those of the parameters."""
        self._training.zero_grad()
        losses = losses_of(self._closure(), self._weights)
        loss = self._training.scaler.scale(losses.total) if scaled else losses.total
        loss.backward(gradient=None if self._ranks.alone else carry(loss))
        norm = total_norm(gradients() if gradients else [g for _, g in self._training.gradients()])
        self.loss = float(losses.total.detach())  # host sync: incident path only
        good = math.isfinite(self.loss) and math.isfinite(float(norm))
        return not self._ranks.any(not good)

    def _good_in_float32(self) -> bool:
        """Whether float32 heals the step; false when nothing was in half precision, so that it says something."""
        if self._training.sharded:
            return False  # FSDP gathers weights in their own format, and is left half-way when it meets another
        self._moment.restore()
        try:
            with self._unreduced(), in_precision(self._training.model, torch.float32) as mode:
                good = self._good(scaled=False, gradients=mode.gradients) and mode.widened
        except (RuntimeError, TypeError):
            good = False  # code that insists on its dtype cannot be widened: no answer
        self._training.zero_grad()
        return not self._ranks.any(not good)

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        """DDP must not wait for the gradients of parameters that others stand in for."""
        wrapped = [m for m in self._training.roots if isinstance(m, nn.parallel.DistributedDataParallel)]
        before = [m.require_backward_grad_sync for m in wrapped]
        for model in wrapped:
            model.require_backward_grad_sync = False  # what DDP's no_sync() does
        try:
            yield
        finally:
            for model, sync in zip(wrapped, before, strict=True):
                model.require_backward_grad_sync = sync

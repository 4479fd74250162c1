"""One bad step under examination: what exactly is bad, what a rerun says, whether it is only the loss scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from ..records import Reading, TensorFacts, Verdict
from ..tensors import facts_of, is_finite, tensors_in
from . import act
from .judge import name_culprits
from .moment import Moment
from .policy import Policy
from .probe import Seen
from .ranks import Ranks
from .rerun import Rerun
from .signals import careful_norm, total_norm
from .snapshots import Snapshot
from .state import Training

CLOSE_LOOKS = 50
"""How many bad tensors get their statistics taken; the rest are only named."""


class Trial:
    """Looks at the gradients (or the batch) closely and completes the verdict."""

    def __init__(
        self,
        training: Training,
        ranks: Ranks | None,
        moment: Moment,
        older: Snapshot | None,
        policy: Policy,
        weights: Mapping[str, float],
        verdict: Verdict,
        seen: Seen,
        closure: Callable[[], Any] | None,
    ) -> None:
        self._training = training
        self._ranks = ranks
        self._policy = policy
        self._seen = seen
        self._scale = seen.reading.scale
        self._rerun: Rerun | None = None
        grads = training.gradients()
        bad = [(n, g) for n, g in grads if not is_finite(g)]
        self.facts: list[TensorFacts] = [facts_of(f"grad {n}", g) for n, g in bad[:CLOSE_LOOKS]]
        # a shard may be finite here and bad elsewhere; a rank that judges alone must not ask the others
        overflowed = not (bad if ranks is None else ranks.any(bool(bad)))
        self.verdict = name_culprits(
            verdict, [n for n, _ in bad], careful_norm([g for _, g in grads]) if overflowed else math.nan, overflowed
        )
        if closure is not None and ranks is not None and policy.rerun:
            self._rerun = Rerun(training, ranks, moment, closure, weights)
        self._older = older

    def run_again(self) -> None:
        """Learn from a rerun, if there can be one, what kind of bad step this is."""
        if self._scale is not None:
            act.hold_scale(self._training, self._scale)  # this step's overflow is judged here, not by GradScaler
        if self._rerun is not None:
            origin = self._rerun.classify(scaled=self._scale is not None, older=self._older)
            rank = self.verdict.rank if self.verdict.rank is not None else self._rerun.culprit
            self.verdict = dataclasses.replace(self.verdict, origin=origin, rank=rank)

    def ordinary_overflow(self) -> bool:
        """Whether this is GradScaler looking for its scale: lowers the scale and says so."""
        if self._scale is None:
            return False
        bad_loss = not math.isfinite(self._seen.reading.loss)
        if bad_loss if self._ranks is None else self._ranks.any(bad_loss):  # one rank's loss decides for all
            return False
        lowest = self._scale * self._training.scaler.get_backoff_factor() < self._policy.min_scale
        if self._rerun is None:
            ordinary = not lowest  # without a closure: ordinary as long as there is room below
        else:
            ordinary = self.verdict.origin == "scale"
        if not ordinary:
            return False
        act.back_off_scale(self._training, self._policy.min_scale, self._scale)
        self.verdict = dataclasses.replace(self.verdict, kind="overflow", origin="scale")
        return True

    def second_reading(self) -> Reading:
        """The numbers of the rerun that was good; its gradients are in place, unscaled."""
        t = self._training
        assert self._rerun is not None
        if t.scaler is not None:
            for optimizer in t.optimizers:
                t.scaler.unscale_(optimizer)
        norm = float(total_norm([g for _, g in t.gradients()]))
        return dataclasses.replace(self._seen.reading, loss=self._rerun.loss, grad_norm=norm, bad=(), components={})


def batch_facts(batch: Any) -> list[TensorFacts]:
    """The bad tensors of a batch."""
    return [facts_of(f"batch {n}", t) for n, t in tensors_in(batch) if not is_finite(t)]

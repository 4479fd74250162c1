"""Optimizer steps that evaluate their closure again at weights moved meanwhile (LBFGS, SAM): whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ..captured import CapturedState
from ..rng import random_states, set_random_states
from ..tensors import is_finite
from .signals import total_norm
from .snapshots import Snapshot
from .training import Training, gradients_of


def may_evaluate_again(optimizer: Optimizer) -> bool:
    """Whether one step may run its closure more than once; torch's first-order optimizers never do.

    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> may_evaluate_again(LBFGS([w])), may_evaluate_again(torch.optim.Adam([w]))
    (True, False)
    """
    return isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")


class ClosureStep:
    """The training as it was before such a step, and at the first evaluation in it that was not finite.

    A line search comes back from a point where the loss is infinite, so that ends nothing by itself: what the step
    leaves behind decides. NaN cannot be compared, so no search comes back from it.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._start = _copy_of(training)
        self._random = random_states()
        self._before = CapturedState(training.slots)
        self._point: list[Tensor] | None = None
        self._nan_loss, self._last_is_finite = False, True

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Run the closure again, and remember where it first was not finite."""
        if self._point is None:
            self._before.capture()
        value = closure()
        self._last_is_finite = self.is_finite(value)  # host sync: such optimizers read every loss themselves
        self._nan_loss |= value is not None and bool(torch.as_tensor(value).isnan().any())
        if self._point is None and not self._last_is_finite:
            self._point = [p.detach().clone() for p in self._training.model.parameters()]
        return value

    def is_finite(self, loss: Any) -> bool:
        """Whether a loss and the gradients that it left are finite."""
        grads = [g for _, g in gradients_of(self._training.parameters)]
        good = loss is None or is_finite(torch.as_tensor(loss).detach())
        return good and (not grads or is_finite(total_norm(grads)))

    def went_bad(self, optimizer: Optimizer) -> bool:
        """Whether the step has left something that is not finite, came by NaN, or stands at a point that is bad."""
        searches = any(g.get("line_search_fn") for g in optimizer.param_groups)
        stands_badly = not self._last_is_finite and not searches
        return self._nan_loss or stands_badly or bool(self._training.nonfinite())

    def go_to_bad_point(self) -> Callable[[], None]:
        """Go to the first bad evaluation, to look into it; returns the way back to what the step left behind."""
        left = _copy_of(self._training)
        if self._point is not None:
            with torch.no_grad():
                for p, value in zip(self._training.model.parameters(), self._point, strict=True):
                    p.copy_(value)
            self._before.restore()
        return left.restore

    def undo(self) -> None:
        """Everything as before the step; what the script drew itself from Python and NumPy stays drawn."""
        self._start.restore(random_states=False)
        drawn = {k: v for k, v in self._random.items() if k in ("torch", "cuda")}
        set_random_states({**random_states(), **drawn})


def _copy_of(training: Training) -> Snapshot:
    copy = Snapshot(training)
    copy.take(0, 0, torch.ones((), dtype=torch.bool))
    return copy

"""Optimizer steps with a closure; those that evaluate it again at weights moved meanwhile (LBFGS, SAM) as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ..captured import CapturedState
from ..rng import random_states, set_random_states
from ..tensors import is_finite
from .signals import total_norm
from .snapshots import Snapshot
from .training import Training, gradients_of

if TYPE_CHECKING:
    from .external import ExternalLoop

Closure = Callable[[], Any]


class _Veto(BaseException):
    """Leaves an optimizer's step before it changes anything."""


def may_evaluate_again(optimizer: Optimizer) -> bool:
    """Whether one step may run its closure more than once; torch's first-order optimizers never do.

    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> may_evaluate_again(LBFGS([w])), may_evaluate_again(torch.optim.Adam([w]))
    (True, False)
    """
    return isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")


class ClosureSteps:
    """Steps of an external loop that hand a closure to the optimizer: the verdict comes after its first run."""

    def __init__(self, loop: ExternalLoop) -> None:
        self._loop, self._context, self._engine = loop, loop.guard._context, loop.guard._engine
        self._once: set[int] = set()
        """Optimizers that have evaluated their closure just once in their last step."""

    def step(self, optimizer: Optimizer, carry_out: Callable[..., Any], closure: Closure) -> Any:
        """Carry a step out, or leave it; one that evaluates again is judged by what it leaves behind, too."""
        loop, returned = self._loop, list[Any]()
        whole: ClosureStep | None = None
        if may_evaluate_again(optimizer) and id(optimizer) not in self._once and loop.guard.open:
            with self._context.surviving("copying the state before a step"):
                whole = ClosureStep(loop.guard.training)

        def judged() -> Any:
            if not returned:
                returned.append(closure())
                if not loop.judge(optimizer):
                    raise _Veto
            else:
                loop.passes.evaluating = True
                try:
                    returned.append(closure() if whole is None else whole.evaluate(closure))
                finally:
                    loop.passes.evaluating = False
            return returned[-1]

        try:
            with self._engine.lowered(optimizer):
                result = carry_out(judged)
        except _Veto:
            loop.left(optimizer)
            return returned[0]
        (self._once.add if len(returned) == 1 else self._once.discard)(id(optimizer))
        if whole is not None and len(returned) > 1 and not self._accepts(optimizer, whole, closure):
            loop.left(optimizer)
            return returned[0]
        loop._stepped(optimizer, done=True)
        return result

    def _accepts(self, optimizer: Optimizer, whole: ClosureStep, closure: Closure) -> bool:
        """Whether what a step leaves behind is good; if not, its first bad evaluation is judged, and all is undone."""
        loop, bad = self._loop, False
        with self._context.surviving("looking at what a step leaves behind"):
            bad = whole.went_bad(optimizer)
        if not bad:
            return True
        observing, gone_back = self._context.policy.mode == "observe", False
        with self._context.surviving("looking into a step that went bad on its way"):
            come_back = whole.go_to_bad_point()
            loop.drop_step()
            if whole.is_finite(closure()) and loop.passes.step is not None:
                name = type(optimizer).__name__
                loop.passes.step.broken = f"{name} came to a point that was not finite; seen again, it is"
            loop.judge(optimizer)
            decision = loop.last_decision
            gone_back = decision is not None and decision.action.kind in ("rollback", "restore")
            if observing:
                come_back()
        if not observing and not gone_back:
            with self._context.surviving("undoing a step"):
                whole.undo()
        return observing


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

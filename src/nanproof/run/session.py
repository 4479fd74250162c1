"""A script under `nanproof run`: what it trains is found while it runs, and one guard is put beside it."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..errors import LockedError, NonFiniteError, UsageError
from ..guard.ears import taken_off
from ..guard.escort import Escort
from ..guard.guard import guard_of
from ..integrations.deliveries import Deliveries
from .crew import Crew
from .guards import Guards
from .options import Options
from .owners import parameters_of
from .saves import find_poison

log = logging.getLogger("nanproof")
Call = Callable[..., Any]


class Session:
    """Hears what the patched functions of torch are called with, and answers for the guard."""

    def __init__(self, options: Options) -> None:
        self.deliveries = Deliveries()
        self.guards = Guards(options, self.deliveries)
        self.crew = Crew(self._on_forward)
        self.guarded_elsewhere = False
        self.unhooked: dict[str, str] = {}
        """What could not be guarded, by name, and why."""
        self._escort: Escort | None = None
        self._in_backward = self._stepping = self._scheduling = False
        self._hears_loaders = True
        self._process, self._over = os.getpid(), False
        self._rates: weakref.WeakKeyDictionary[Optimizer, float] = weakref.WeakKeyDictionary()

    @property
    def here(self) -> bool:
        """Whether the session goes on, in the process that it belongs to; a forked one is left alone."""
        return not self._over and os.getpid() == self._process

    # --- who is there -----------------------------------------------------------------------------------------

    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer was made: the next training pass of its model makes a guard."""
        if self.here:
            self.crew.add(optimizer)
            with self._surviving("looking for a model"):
                self.crew.watch_owners(optimizer)

    def _on_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled() or not self.here:
            return
        self.crew.drop_triggers()
        escort = self._guard_all() if self._strangers() else None
        if escort is not None:
            if module not in escort.guard.training.roots:
                escort.listen(module)
            escort.before_forward(module, args, kwargs)  # hooks that are added during a call wait for the next one

    def forward(self, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """A forward pass whose hooks are compiled away: begin and end it from outside."""
        known = self._escort
        self._on_forward(module, args, kwargs)
        escort = self._escort
        if escort is None or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        if escort is known:
            escort.before_forward(module, args, kwargs)
        output = None
        try:
            output = call(*args, **kwargs)
        finally:
            escort.after_forward(module, args, output)
        return output

    def stay_out_of_graphs(self) -> None:
        """The script compiles: what is called from compiled code must run beside the graph, not in it."""
        for name in ("backward", "clip", "step", "scaler_step", "scaler_update", "follow", "save"):
            if name not in vars(self):
                setattr(self, name, torch._dynamo.disable(getattr(self, name)))  # type: ignore[no-untyped-call]

    def _strangers(self) -> list[Optimizer]:
        """Optimizers that no guard has, nor ever had: one that was stopped stays with its guard."""
        return [o for o in self.crew.unguarded if self._escort is None or not self._escort.owns(o)]

    def _guard_all(self) -> Escort | None:
        """One guard for all optimizers that are alive and not under a guard of somebody else."""
        if self._escort is not None:  # a new optimizer has come; what is gone must not be held on to
            self._escort.close()
            self._escort = None
            self.guards.retire()
            gc.collect()
        self.crew.drop_triggers()
        optimizers = self.crew.unguarded
        try:
            guard = self.guards.make(**self.crew.assemble(optimizers))
        except Exception as error:
            if isinstance(error, NonFiniteError | LockedError) and self.guards.policy.mode != "observe":
                raise
            # what cannot be guarded runs as it would without us, and that is said
            self.crew.pass_over(optimizers)
            self.miss(" and ".join(type(o).__name__ for o in optimizers), f"{type(error).__name__}: {error}")
            return None
        self._escort = Escort(guard, divided=None, scaled=False)
        return self._escort

    def miss(self, what: str, why: str) -> None:
        """Something cannot be guarded: said at once, and again at the end."""
        if what not in self.unhooked:
            self.unhooked[what] = why
            log.warning("nanproof: not guarded: %s: %s", what, why)

    # --- what the script does ---------------------------------------------------------------------------------

    def backward(self, call: Call, losses: Any, scaled_by: Any, raw: Tensor | None) -> Any:
        """A backward pass; those within a backward pass (activation checkpointing) are part of it."""
        if self._in_backward or not self.here:
            return call()
        self._in_backward = True
        escort = self._escort
        if escort is not None:
            escort.meet(losses, raw, scaler=scaled_by)
        try:
            return call()
        finally:
            self._in_backward = False
            if escort is not None:
                escort.passed()

    def clip(self, call: Call, parameters: list[Tensor]) -> Any:
        """Clipping: the verdict comes before it, and a vetoed step keeps its gradients as they are."""
        escort = self._escort
        if escort is None or not self.here or self._in_backward:
            return call()
        wanted = {id(p) for p in parameters}
        owner = next(
            (o for o in escort.guard.training.optimizers if wanted & {id(p) for p in parameters_of([o])}), None
        )
        if owner is None or escort.judge(owner):
            return call()
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def step(self, optimizer: Optimizer, call: Call, closure: Call | None) -> Any:
        """A step of an optimizer; those within it, of optimizers inside others, are part of it."""
        escort = self._escort_for(optimizer) if self.here and not self._stepping else None
        if escort is None:
            return call(*([closure] if closure is not None else []))

        def carry_out(*closures: Call) -> Any:
            with self._inside("_stepping"):
                return call(*closures)

        self._notice_rate(optimizer)
        result = escort.step(optimizer, carry_out, closure)
        self._rates[optimizer] = _rate(optimizer)  # an optimizer may change it by itself
        return result

    def _escort_for(self, optimizer: Optimizer) -> Escort | None:
        if self._in_backward and guard_of(optimizer) in (None, self._escort and self._escort.guard):
            self.miss(type(optimizer).__name__, "it steps inside the backward pass, before a verdict is possible")
            return None
        if self._escort is not None and self._escort.owns(optimizer):
            return self._escort
        if guard_of(optimizer) is not None:
            self.guarded_elsewhere = True  # by a trainer's callback, or by the script itself
            return None
        if self.crew.is_passed_over(optimizer):
            return None
        if isinstance(optimizer, LBFGS):
            self._refuse(optimizer)
            return None
        self.crew.add(optimizer)
        return self._guard_all()

    def _refuse(self, optimizer: Optimizer) -> None:
        why = "it evaluates its closure many times within one step, so a step cannot be vetoed whole"
        others = self.crew.guardable or self.guards.open or self.guards.accounts
        if not others and self.guards.policy.mode != "observe":
            raise UsageError(
                f"this script trains with LBFGS only: {why}",
                hint="use a first-order optimizer, or run it unguarded with --policy observe",
            )
        self.miss(type(optimizer).__name__, why)

    def _notice_rate(self, optimizer: Optimizer) -> None:
        """A learning rate that changes by itself is set by the script, and a skipped step does not hold it."""
        rate = _rate(optimizer)
        if self._rates.get(optimizer, rate) != rate and not self.crew.has_scheduler(optimizer):
            self.miss(
                f"the learning rate of {type(optimizer).__name__}",
                "the script sets it itself, so a skipped step does not hold it",
            )

    def scaler_step(self, optimizer: Optimizer, call: Call) -> Any:
        escort = self._escort_for(optimizer) if self.here else None
        if escort is None or escort.judge(optimizer):
            return call()
        escort.left(optimizer)
        return None

    def scaler_update(self, scaler: Any, call: Call) -> Any:
        held = self._escort.held_scale(scaler) if self._escort is not None and self.here else None
        return call(held) if held is not None else call()

    def follow(self, follower: Any, optimizer: Any, call: Call) -> Any:
        """A schedule or an average moves on, if an update was carried out since it last did."""
        escort = self._escort
        if (
            escort is None
            or self._scheduling
            or not self.here
            or (optimizer is not None and not escort.owns(optimizer))
        ):
            return call()
        if not escort.advances(follower, optimizer):
            return None
        with self._inside("_scheduling"):
            return call()

    def deliver(self, loader: Any, batch: Any) -> None:
        """A loader hands out a batch."""
        if self.here and self._hears_loaders:
            self._hears_loaders = False  # for good, if this fails
            with self._surviving("looking at what a loader hands out"):
                self.deliveries.handed_out(loader, batch)
                self._hears_loaders = True

    def save(self, call: Call, value: Any, target: Any, *, agree: bool = False) -> Any:
        """A save: carried out unless it is a training state that is not finite. With ``agree`` all ranks save."""
        if not self.here:
            return call()
        for guard in self.guards.open if self.guards.policy.mode != "observe" else ():
            post, found = guard._post, None
            with self._surviving("looking at a save"):
                found = find_poison(value, guard.training)
            if not (post.ranks.any(found is not None) if agree else found is not None):
                continue
            what = str(found) if found is not None else "a tensor on another rank"
            post.block(target, what, suspect=(agree or post.ranks.alone) and bool(guard.training.sick()))
            if hasattr(target, "write"):
                # an open file is empty by now, and the script may put it in the place of a good one
                raise NonFiniteError(f"refused to save into an open file: {what}", hint="the last save is still good")
            return None
        with taken_off([*self.crew.triggers, *(self._escort.hooks if self._escort is not None else [])]):
            return call()

    # --- the end ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Close every guard; what was found is in ``guards.accounts`` and ``unhooked``."""
        if not self.here:
            return
        self._over = True
        self.crew.drop_triggers()
        if self._escort is not None:
            self._escort.close()
        self.guards.close()

    @contextmanager
    def _surviving(self, doing: str) -> Iterator[None]:
        """A block of our own work: if it fails, that is said loudly, and the script goes on."""
        try:
            yield
        except Exception as error:
            self.miss(doing, f"guard-failed, {type(error).__name__}: {error}")
            log.error("nanproof: guard-failed, %s", doing, exc_info=error)

    @contextmanager
    def _inside(self, flag: str) -> Iterator[None]:
        setattr(self, flag, True)
        try:
            yield
        finally:
            setattr(self, flag, False)


def _rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0].get("lr", 0.0))

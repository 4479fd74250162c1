"""A script under `nanproof run`: what it trains is found while it runs, and one guard is put beside it."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..errors import NonFiniteError
from ..guard.boundary import Boundary
from ..guard.data import DataSource
from ..guard.external import ExternalLoop
from ..guard.guard import guard_of
from ..guard.hooks import removed, transforming
from ..guard.ranks import count_collectives
from ..guard.rundir import RunDir
from .attachment import Attachment, Checked, parameters_in
from .guards import Guards
from .options import Options
from .own_averages import OwnAverages
from .registry import Registry
from .saves import find_poison
from .steps_in_backward import StepsInBackward
from .training_thread import WHY, TrainingThread

log = logging.getLogger("nanproof")
Call = Callable[..., Any]
_LOOP = "_nanproof_loop"
"""Where an optimizer holds on to the loop that guards it."""


class Session(Boundary):
    """Hears what the patched functions of torch are called with, and answers for the guard."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.data = DataSource()
        self.guards = Guards(options, self.data)
        self.registry = Registry(self._on_forward)
        self.attachment = Attachment(require=options.require, miss=self.miss, known=self._known)
        self._until_guarded = options.until_guarded
        self.guarded_elsewhere = False
        self.blocked_saves = 0
        self.messages = 0
        """How many messages this rank has exchanged with single others."""
        self.unhooked: dict[str, str] = {}
        """What could not be guarded, by name, and why."""
        self.unheld: dict[str, str] = {}
        """What goes on moving when a step is skipped, by name, and why."""
        self._waiting = StepsInBackward()
        self._own_averages = OwnAverages()
        self._loop_ref: weakref.ref[ExternalLoop] | None = None
        self._in_backward = self._stepping = self._scheduling = False
        self._hears_loaders = True
        self._process, self._over = os.getpid(), False
        self._thread, self._without = TrainingThread(lambda: self._loop is not None and self._loop.passes.open), False
        self._started, self._overwrites = time.time(), False
        self._rates: weakref.WeakKeyDictionary[Optimizer, float] = weakref.WeakKeyDictionary()

    @property
    def here(self) -> bool:
        """Whether the session goes on, in the process that it belongs to; a forked one is left alone."""
        return not self._over and os.getpid() == self._process

    @property
    def _trains(self) -> bool:
        """Whether what the caller does is part of the training that is guarded."""
        return self.here and self._thread.here()

    @property
    def _loop(self) -> ExternalLoop | None:
        """The guarded loop; the script's own optimizers and models hold it, so that it goes when they go."""
        return self._loop_ref() if self._loop_ref is not None else None

    @property
    def _replaying(self) -> bool:
        """Whether the guard runs a step again, to look into it: hooks of the script's must not step then."""
        return self._loop is not None and self._loop.passes.busy

    def _known(self) -> set[int]:
        """The parameters of the optimizers that are guarded, here or elsewhere."""
        return self.registry.copied | parameters_in(o for o in self.registry.optimizers if guard_of(o) is not None)

    # --- who is there -----------------------------------------------------------------------------------------

    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer was made: the next training pass of its model makes a guard."""
        if self.here:
            self.registry.add(optimizer)
            with self.surviving("looking for a model"):
                self.registry.watch_owners(optimizer)

    def _on_forward(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if kwargs is None:
            return  # a trigger that was removed during this very call
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled() or not self.here:
            return
        if not self._thread.enter():
            return
        if any(is_lazy(p) for o in self._strangers() for g in o.param_groups for p in g["params"]):
            return  # this very pass makes them: its loss is where the guard begins
        self.registry.drop_triggers()
        loop = self._guard_all() if self._strangers() else None
        if loop is not None:
            if module not in loop.guard.training.roots:
                loop.passes.add_hooks(module)
            loop.passes.before_forward(module, args, kwargs)  # hooks that are added during a call wait for the next one

    def forward(self, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """A forward pass whose hooks are compiled away: begin and end it from outside."""
        if transforming() or not self.here or not self._thread.enter():
            return call(*args, **kwargs)
        known = self._loop
        self._on_forward(module, args, kwargs)
        loop = self._loop
        if loop is None or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        if loop is known:
            loop.passes.before_forward(module, args, kwargs)
        output = None
        try:
            output = call(*args, **kwargs)
        finally:
            loop.passes.after_forward(module, args, output)
        return output

    def stay_out_of_graphs(self) -> None:
        """The script compiles: what is called from compiled code must run beside the graph, not in it."""
        for name in ("backward", "look", "clip", "step", "holds", "scaler_step", "scaler_update", "follow", "save"):
            if name not in vars(self):
                setattr(self, name, torch._dynamo.disable(getattr(self, name)))

    def _strangers(self) -> list[Optimizer]:
        """Optimizers that no guard has, nor ever had: one that was stopped stays with its guard."""
        return [o for o in self.registry.unguarded if self._loop is None or not self._loop.owns(o)]

    def _guard_all(self, losses: Any = ()) -> ExternalLoop | None:
        """One guard for all optimizers that are alive and not under a guard of somebody else."""
        last = self._leave_loop()
        self.registry.drop_triggers()
        optimizers = self.registry.unguarded
        try:
            before = self.messages + count_collectives()
            parts = self.registry.assemble(optimizers, losses)
            same = last is not None and not last[1].isdisjoint(parameters_in(optimizers))
            loop = self.guards.make(
                **parts,
                after=last[0] if last is not None and same else None,
                divided=None,
                scaled=False,
                # NaN when nobody has counted: then they may
                communicates=lambda: not self.messages + count_collectives() <= before,
            )
        except Exception as error:
            if isinstance(error, NonFiniteError) and self.guards.policy.mode != "observe":
                raise
            # what cannot be guarded runs as it would without us, and that is said
            self.registry.pass_over(optimizers)
            self.miss(" and ".join(type(o).__name__ for o in optimizers), f"{type(error).__name__}: {error}")
            return None
        self._loop_ref = weakref.ref(loop)
        for optimizer in optimizers:
            setattr(optimizer, _LOOP, loop)
        return loop

    def _leave_loop(self) -> tuple[RunDir, set[int]] | None:
        """A new optimizer has come: close the loop; what is gone by now must not be held on to."""
        loop = self._loop
        if loop is None:
            return None
        known = parameters_in(loop.guard.training.optimizers)
        past = loop.guard._context.run
        self._let_go(loop)
        self._loop_ref = None
        self.guards.retire()
        del loop
        gc.collect()
        return past, known

    def _let_go(self, loop: ExternalLoop) -> None:
        loop.close()
        for optimizer in loop.guard.training.optimizers:
            vars(optimizer).pop(_LOOP, None)
        loop.release()

    def guard_engine(self, engine: Any, make: Call) -> None:
        """A DeepSpeed engine is made: it decides about its steps itself, and the optimizers inside are its own."""
        with self._inside("_stepping"):  # it may step its optimizer once, to allocate its state
            make()
        if not self.here:
            return
        with self.surviving("guarding DeepSpeed's engine"):
            outer = engine.optimizer
            inner = [outer, getattr(outer, "optimizer", None), getattr(engine, "basic_optimizer", None)]
            self.registry.pass_over([o for o in inner if isinstance(o, Optimizer)])
            if isinstance(outer, Optimizer) or hasattr(outer, "overflow"):
                self.guards.make_for_engine(engine)
                self.registry.copied |= {id(p) for p in engine.module.parameters()}

    def miss(self, what: str, why: str) -> None:
        """Something cannot be guarded: said at once, and again at the end."""
        if what not in self.unhooked:
            self.unhooked[what] = why
            log.warning("nanproof: NOT GUARDED: %s: %s", what, why)
            self.attachment.refuse(f"{what}: {why}")

    # --- what the script does ---------------------------------------------------------------------------------

    def backward(self, call: Call, losses: Any, scaled_by: Any, raw: Tensor | None) -> Any:
        """A backward pass; those within a backward pass (activation checkpointing) are part of it."""
        if not self.here or not self._thread.enter() or self._in_backward or self._replaying or transforming():
            return call()
        if self._until_guarded and self.attachment.attached:
            raise Checked
        self.look(losses)
        self._notice_average()
        if self._strangers():  # a model that is not called as a module: its loss is the first that is seen of it
            loop = self._guard_all(losses)
            if loop is not None:
                loop.passes.in_eval = not any(root.training for root in loop.guard.training.roots)
        self._in_backward = True
        try:
            if self._loop is None:
                return call()
            with self._loop.passes.in_backward(losses, raw, scaler=scaled_by):
                result = call()
        except BaseException:
            self._waiting.drop()
            raise
        finally:
            self._in_backward = False
        self._waiting.take(self.step)
        return result

    def look(self, outputs: Any) -> None:
        """A backward pass begins: until it is known who updates the weights, see whether they have changed."""
        if self.attachment.looking and self._trains and not self._in_backward and not self._replaying:
            with self.surviving("looking at who updates the weights"):
                if transforming():
                    self.attachment.look_inside(optimizers=bool(self.registry.optimizers))
                else:
                    self.attachment.look(outputs)

    def holds(self, optimizer: Optimizer, clear: Call) -> bool:
        """Whether gradients cannot be cleared yet, because the step that uses them waits for the verdict."""
        if self._loop is not None and self._trains and not self._in_backward:
            self._loop.passes.clearing(optimizer)
        return self._trains and (self._replaying or (self._in_backward and self._waiting.clear(optimizer, clear)))

    def clip(self, call: Call, parameters: list[Tensor]) -> Any:
        """Clipping: the verdict comes before it, and a vetoed step keeps its gradients as they are."""
        loop = self._loop
        if loop is None or not self._trains or self._in_backward:
            return call()
        if loop.judge_clip(parameters):
            return call()
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def step(self, optimizer: Optimizer, call: Call, closure: Call | None) -> Any:
        """A step of an optimizer; those within it, of optimizers inside others, are part of it."""
        if self.here and not self._trains:
            self._pass_over(optimizer)
            return call(*([closure] if closure is not None else []))
        if self._replaying:
            return None  # a hook of the script's
        if (
            self._in_backward
            and self.here
            and closure is None
            and self._loop is not None
            and self._loop.owns(optimizer)
        ):
            self._waiting.add(optimizer, call)
            return None
        loop = self._loop_for(optimizer) if self.here and not self._stepping else None
        if loop is None:
            return call(*([closure] if closure is not None else []))

        def carry_out(*closures: Call) -> Any:
            with self._inside("_stepping"):
                return call(*closures)

        self._notice_rate(optimizer)
        self.attachment.stepping = True
        result = loop.step(optimizer, carry_out, closure)
        self._rates[optimizer] = _rate(optimizer)  # an optimizer may change it by itself
        self._after(loop)
        self._thread.ended()
        if self._without:
            self._without = False
            self._guard_all()
        return result

    def _pass_over(self, optimizer: Optimizer) -> None:
        """It steps in a thread beside the one that is guarded."""
        if not self.registry.is_passed_over(optimizer):
            self.registry.pass_over([optimizer])
            self._without = self._loop is not None and self._loop.owns(optimizer)
            self.miss(f"{type(optimizer).__name__} in {threading.current_thread().name}", WHY)

    def _after(self, loop: ExternalLoop) -> None:
        if not loop.carried_out:
            with self.surviving("looking for averages of the weights"):
                self._own_averages.skipped(loop.guard.training)

    def _notice_average(self) -> None:
        """An average that the script computes itself takes unchanged weights in after a skipped step."""
        with self.surviving("looking for averages of the weights"):
            name = self._own_averages.look()
            if name:
                what, why = f"{name}, an average of the weights", "the script computes it itself"
                self.unheld[what] = why
                log.warning("nanproof: moved on in a skipped step: %s: %s", what, why)

    def _loop_for(self, optimizer: Optimizer) -> ExternalLoop | None:
        if self._in_backward and guard_of(optimizer) in (None, self._loop and self._loop.guard):
            self.miss(type(optimizer).__name__, "it steps inside the backward pass, before a verdict is possible")
            return None
        if self._loop is not None and self._loop.owns(optimizer):
            return self._loop
        if guard_of(optimizer) is not None:
            self._notice_elsewhere()  # by a trainer's callback, or by the script itself
            return None
        if self.registry.is_passed_over(optimizer):
            return None
        self.registry.add(optimizer)
        return self._guard_all()

    def _notice_elsewhere(self) -> None:
        if not self.guarded_elsewhere:
            self.guarded_elsewhere = True
            self.attachment.stepping = True
            if not self.guards.open:  # a Guard that the script has made
                self.attachment.say("guarding with the Guard that the script makes itself")

    def _notice_rate(self, optimizer: Optimizer) -> None:
        """A learning rate that changes by itself is set by the script, and a skipped step does not hold it."""
        rate = _rate(optimizer)
        if self._rates.get(optimizer, rate) != rate and not self.registry.has_scheduler(optimizer):
            self.unheld[f"the learning rate of {type(optimizer).__name__}"] = "the script sets it itself"

    def scaler_step(self, optimizer: Optimizer, call: Call) -> Any:
        loop = self._loop_for(optimizer) if self._trains else None
        self.attachment.stepping = self.attachment.stepping or loop is not None
        if loop is None or loop.judge(optimizer):
            return call()
        loop.left(optimizer)
        self._after(loop)
        self._thread.ended()
        return None

    def scaler_update(self, scaler: Any, call: Call) -> Any:
        held = self._loop.held_scale(scaler) if self._loop is not None and self._trains else None
        return call(held) if held is not None else call()

    def follow(self, follower: Any, optimizer: Any, call: Call) -> Any:
        """A schedule or an average moves on, if an update was carried out since it last did."""
        loop = self._loop
        if loop is None or self._scheduling or not self._trains or (optimizer is not None and not loop.owns(optimizer)):
            return call()
        if not loop.advances(follower, optimizer):
            return None
        with self._inside("_scheduling"):
            return call()

    def skipped(self, optimizer: Any) -> int:
        """How many steps of an optimizer were not carried out."""
        return self._loop.count_skipped(optimizer) if self._loop is not None and self._loop.owns(optimizer) else 0

    def deliver(self, loader: Any, batch: Any) -> None:
        """A loader hands out a batch."""
        if self.here and self._hears_loaders:
            self._hears_loaders = False  # for good, if this fails
            with self.surviving("looking at what a loader hands out"):
                self.data.delivered(loader, batch)
                self._hears_loaders = True

    def save(self, call: Call, value: Any, target: Any, *, among: int = 1) -> Any:
        """A save: carried out unless it is a training state that is not finite; ``among`` ranks make it together."""
        if not self.here:
            return call()
        for guard in self.guards.open:
            bad = ""
            with self.surviving("looking at a save"):
                bad = str(find_poison(value, guard.training) or "")
            if not guard.blocks_save(target, bad, among=among):
                continue
            self.blocked_saves += 1
            if hasattr(target, "write"):
                # an open file is empty by now, and the script may put it in the place of a good one
                what = bad or "a tensor on another rank"
                raise NonFiniteError(f"refused to save into an open file: {what}", hint="the last save is still good")
            return None
        with self.surviving("looking at what a save overwrites"):
            self._notice_overwriting(target)
        ours = [*self._loop.passes.hooks, *self._loop.guard.hooks] if self._loop is not None else []
        with removed([*self.registry.triggers, *ours]):
            return call()

    def _notice_overwriting(self, target: Any) -> None:
        """Say once that the file of an earlier run is replaced."""
        if self._overwrites or not isinstance(target, str | os.PathLike):
            return
        path = Path(target)
        if path.is_file() and path.stat().st_mtime < self._started:
            self._overwrites = True
            log.warning("nanproof: the script overwrites %s, which an earlier run has saved", path)

    # --- other processes, the end -------------------------------------------------------------------------------------

    def forked(self, options: Options) -> None:
        """In a forked process: if it trains, it gets guards of its own, and the parent's are left alone."""
        loop = self._loop
        self._process = os.getpid()
        self._in_backward = self._stepping = self._scheduling = False
        self._loop_ref = None
        self.guards.forked(options)
        self.registry.drop_triggers()
        if loop is not None:
            for optimizer in loop.guard.training.optimizers:
                vars(optimizer).pop(_LOOP, None)
            for root in loop.guard.training.roots:
                self.registry.watch(root)

    def died(self, error: BaseException) -> None:
        """The script ends by an exception: it is logged, and an incident if non-finite values are behind it."""
        if not self.here:
            return
        with self.surviving("looking at the exception that ended the script"):
            if self._loop is not None:
                self._loop.passes.died(error)
            self.guards.died(error)

    def end(self) -> None:
        """Close every guard; what was found is in ``guards.accounts`` and ``unhooked``."""
        if not self.here:
            return
        self._over = True
        self.registry.drop_triggers()
        loop = self._loop
        if loop is not None:
            self._let_go(loop)
        self.guards.close()

    def _record_failure(self, doing: str, said: str, *, first: bool) -> None:
        self.unhooked[doing] = f"guard-failed, {said.removeprefix(f'{doing}: ')}"

    @contextmanager
    def _inside(self, flag: str) -> Iterator[None]:
        setattr(self, flag, True)
        try:
            yield
        finally:
            setattr(self, flag, False)


def _rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0].get("lr", 0.0))

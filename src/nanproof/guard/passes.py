"""The forward and backward passes of a loop that takes its steps itself, gathered into open steps."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..losses import Losses
from ..rng import random_states
from ..tensors import is_finite, tensors_in
from .data import DataSource, address_of, describe_batch
from .guard import Guard
from .left_out import Calls
from .loss_scale import factor_of, is_loss_scale, scale_of
from .readback import Signals
from .rng_tracking import RngTracking
from .signals import total_norm
from .step import OpenStep, Pass
from .training import gradients_of

log = logging.getLogger("nanproof")
SAID = 3
"""So many of the passes that a script leaves out are told one by one."""


class Passes:
    """What the loop has run since its last step; `step` is the open step that this makes up.

    The loop, or whoever hooks it, calls `begin` before a forward pass, or lets hooks do it, and `before_backward` and
    `after_backward` around a backward pass.
    """

    def __init__(
        self, guard: Guard, *, divided: bool | None, scaler: Any, data: DataSource | None, settle: Callable[[], None]
    ) -> None:
        """``settle`` accounts for the last decision: a new step begins."""
        self._guard, self._context, self._engine = guard, guard._context, guard._engine
        self._divided, self._scaler, self._settle = divided, scaler, settle
        self.data = data or DataSource()
        self.step: OpenStep | None = None
        self.judged = False
        """Whether the step was decided about, so that the next pass begins another one."""
        self.busy = False
        """Whether the guard is at work and may run passes of its own."""
        self.evaluating = False
        """Whether a step evaluates its closure again: passes that are part of the update."""
        self.in_eval = False
        """Whether the loop trains its model in evaluation mode, as fine-tuning with fixed statistics does."""
        self.hooks: list[RemovableHandle] = []
        self._thread = 0
        """That of the step."""
        self._forward = False
        """Whether a forward pass has begun whose backward pass has not."""
        self._in_backward = False
        self._backwards = self._depth = 0
        self._without: list[nn.Parameter] = []
        """Parameters that had no gradient before the backward pass."""
        self._witness: nn.Parameter | None = None
        """One of them that has got one; the script has thrown the pass away when it loses it again."""
        self._called: tuple[Any, Any] = ((), {})
        self._calls = Calls(self._left_out)
        self._cleared_by: set[int] = set()
        """Optimizers that have cleared their gradients since the last backward pass."""
        self._rng = RngTracking()
        self._made: set[tuple[str, int]] = set()
        """Where the outputs of the hooked modules are, in this step and the one before."""
        self._made_before: set[tuple[str, int]] = set()
        self._left: Mapping[str, Any] | None = None
        """Random states before a bad pass that the script has left out, until the verdict on the next step."""

    @property
    def open(self) -> bool:
        """Whether a step has begun and is not decided yet."""
        return self.step is not None and not self.judged

    @property
    def _watching(self) -> bool:
        return not self.busy and not self.evaluating and self._guard.open

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A block of the guard's own: ignore passes that it replays."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    # --- forward passes ---------------------------------------------------------------------------------------

    def add_hooks(self, module: nn.Module) -> None:
        """Let the training forward passes of a module begin steps."""
        before, after = (self._context.hook("watching a forward pass", f) for f in (self._before, self._after))
        self.hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self.hooks.append(module.register_forward_hook(after, always_call=True))

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """What the hook before a forward pass does, for a pass that is too late for it."""
        with self._context.surviving("watching a forward pass"):
            self._before(module, args, kwargs)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """What the hook after a forward pass does, for a pass that has none."""
        with self._context.surviving("watching a forward pass"):
            self._after(module, args, output)

    def _before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if torch.compiler.is_compiling() or kwargs is None:
            return  # torch still calls a hook that was removed during this very call, without the keyword arguments
        if not self._trains(module):
            if not self.busy and not self._in_backward and not torch.is_grad_enabled():
                self.data.made_new()  # inference: an RL rollout is collected, or an evaluation runs
            return
        self._depth += 1
        if self._depth > 1:
            return
        self.begin()
        if self._calls.unusual:
            self._mend_buffers()
        self._called = (args, kwargs)
        self._engine.repairs.before_call()
        self._rng.enter()
        self._rng.calls += 1
        assert self.step is not None
        here = self.step.passes[-1]
        named = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
        call = self._calls.begin(named if kwargs else args[0] if len(args) == 1 else args)
        call.capture.before(module, args, kwargs)
        here.inputs, here.capture = self._calls.joined()
        returned = [n for n, t in tensors_in(here.inputs) if address_of(t) in self._made]
        here.carried = frozenset(f"batch {n}".strip() for n in returned)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not self._trains(module) or self._depth == 0:
            return None
        error = sys.exc_info()[1]
        if output is None and error is not None:  # the forward pass itself raised
            self.abandon(error)
            return None
        self._depth -= 1
        given = output
        if self._depth == 0 and self.step is not None and output is not None:
            with self.at_work():
                output = self._engine.repairs.heal_call(self.step, module, *self._called, output)
            with self._context.surviving("watching a forward pass"):
                self._calls.end(module, output)
                self._made.update(address_of(t) for _, t in tensors_in(output))
                self._rng.leave()
        return None if output is given else output

    def _trains(self, module: nn.Module) -> bool:
        # activation checkpointing runs forward passes again within the backward pass
        mine = not self.open or self._thread == threading.get_ident()
        trains = (module.training or self.in_eval) and torch.is_grad_enabled()
        return mine and trains and self._watching and not self._in_backward

    def begin(self, batch: Any = None) -> None:
        """A forward pass is about to begin: remember random states and buffers."""
        if self._watching:
            with self._context.surviving("beginning a step"):
                self._begin(batch)

    def _begin(self, batch: Any) -> None:
        random: Mapping[str, Any] = {}
        if self.judged:
            self._left = None
        if self.step is None or self.judged or self._cleared():
            self.step = self.new_step(capture=self._left is None)
            if self._left is None:
                self._rng.begin()
                random = dict(self.step.before.random) if self.step.before.taken else {}
            else:  # a veto undoes the bad pass before it too, as between the two steps of SAM
                self.step.undoable = True
                random = self._enter()
        elif self._forward:
            if batch is not None:
                self.step.passes[-1].batch = batch
            return
        else:
            random = self._enter()
            self.step.next_pass()
        self._forward = True
        self.step.passes.append(Pass(batch=batch, random=random))

    def _enter(self) -> Mapping[str, Any]:
        """Another pass begins before a verdict; random states as they are."""
        self._rng.enter()
        return {k: v for k, v in random_states().items() if k in ("torch", "cuda")}

    def new_step(self, *, capture: bool) -> OpenStep:
        """A step begins; one of which no forward pass was seen has nothing to ``capture`` any more."""
        self._settle()
        self.judged = False
        self._thread = threading.get_ident()
        self._calls.settle(self._context.tally.steps)
        self._backwards, self._witness = 0, None
        self._made, self._made_before = set(self._made - self._made_before), self._made - self._made_before
        step = self._engine.begin(capture=capture)
        step.scaler, step.divided, step.undoable = self._scaler, bool(self._divided), capture
        step.random_after, step.name_batch = self._random_after, self.name_batch
        return step

    # --- backward passes --------------------------------------------------------------------------------------

    @contextmanager
    def in_backward(self, loss: Any, value: Tensor | None = None, *, scaler: Any = None) -> Iterator[None]:
        """A block in which the loop runs a backward pass."""
        self.before_backward(loss, value, scaler=scaler)
        try:
            with self._context.around("waiting for the other ranks", self._context.ranks.waiting):
                yield
        except BaseException as error:
            self.after_backward(error)
            raise
        self.after_backward()

    def before_backward(self, loss: Any, value: Tensor | None = None, *, scaler: Any = None) -> None:
        """A loss is on its way into backward; ``value`` is what it stands for where it was scaled or divided."""
        if self._watching:
            with self._context.surviving("reading a loss"):
                self._before_backward(loss, value, scaler)

    def _before_backward(self, loss: Any, value: Tensor | None, scaler: Any) -> None:
        if self.step is None or self.judged:
            self.step = self.new_step(capture=False)
        step = self.step
        if self._cleared():
            self.step = step
        self._cleared_by.clear()
        self._calls.before_backward(loss)
        self._rng.enter()
        self._in_backward, self._forward = True, False
        if self._witness is None:
            self._without = [p for p in self._guard.training.model.parameters() if p.grad is None and p.requires_grad]
        self._backwards += 1
        step.scaler = scaler or step.scaler
        if not step.passes:
            step.passes.append(Pass())
        here = step.passes[-1]
        batch = self._given(here.batch if here.batch is not None else here.inputs)
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            factor = factor_of(loss if value is None else value)
            shown = (loss if value is None else value).detach().reshape(())
            if is_loss_scale(factor):
                shown = shown / factor
            if self._divided is None:
                step.divided = factor < 1
            here.loss = shown
            step.saw(Losses(total=shown, components={}), batch)
            if not self._context.ranks.alone:  # a bad loss must reach the other ranks through the gradients
                good = torch.isfinite(shown)
                loss.register_hook(lambda g: torch.where(good, g, torch.nan))  # type: ignore[no-untyped-call]
            here.capture.before_backward(loss)
        else:
            step.signals.look(batch, None)

    def _given(self, batch: Any) -> list[Tensor]:
        """The tensors of a batch that the model has not made itself: a generator's output is no input."""
        return [t for _, t in tensors_in(batch) if t.grad_fn is None and address_of(t) not in self._made]

    def unscaled(self, loss: Tensor) -> Tensor | None:
        """A loss that went through the guard's scaler, without the scale."""
        scale = scale_of(self._scaler, self._guard.training.device)
        return None if scale is None else loss.detach() / scale

    def after_backward(self, error: BaseException | None = None) -> None:
        """A backward pass is over; one that raised has left gradients that cannot be used."""
        self._in_backward = False
        if self.busy or self.evaluating:
            return
        if error is not None:
            self.abandon(error)
            return
        with self._context.surviving("looking at what a backward pass came by"):
            if self.step is not None and self.step.passes:
                self._calls.after_backward(self.step.passes[-1], self._context.tally.steps)
            if self._witness is None:
                self._witness = next((p for p in self._without if p.grad is not None), None)
        with self._context.surviving("tracking random states"):
            self._rng.leave()

    # --- passes without a step --------------------------------------------------------------------------------

    def clearing(self, optimizer: Optimizer) -> None:
        """Gradients are about to be cleared; where no step was taken with them, the script skips it itself."""
        if self.step is None or self.judged or not self._backwards or self.busy:
            return
        self._cleared_by.add(id(optimizer))
        if self._cleared_by >= {id(o) for o in self._guard.training.optimizers}:
            with self._context.surviving("looking at a step that the script skips"):
                self._discard()

    def _cleared(self) -> bool:
        """Whether the script has thrown the gradients of the passes so far away: it skips steps itself."""
        if self._witness is not None and self._witness.grad is None:
            self._discard()
            return True
        return False

    def _discard(self) -> None:
        """The loop does not use the passes so far; a forward pass that is still without backward is another step's."""
        step = self.step
        if step is None:
            return
        grads = [g for _, g in gradients_of(self._guard.training.parameters)]
        seen = [*step.signals.losses, *([total_norm(grads)] if grads else [])]
        self._left, left = None, self._left
        if not all(map(is_finite, seen)):  # host sync: only where a loop skips
            if step.undoable and step.passes and step.before.taken:
                self._left = left or step.passes[0].random
            self._mend_buffers()
            self._left_out(step.passes[0])
        self._backwards, self._witness = 0, None
        step.passes, step.signals = step.passes[-1:] if self._forward else [], Signals()
        if not self._forward:
            self.step = None

    def _mend_buffers(self) -> None:
        """What a pass that the script has left out wrote into BatchNorm's statistics is undone if it is not finite."""
        if self.step is not None and self.step.before.taken:
            with self._context.surviving("undoing what a pass wrote that the script leaves out"):
                self.step.before.restore_nonfinite_buffers()

    def _left_out(self, one: Pass) -> None:
        """A pass that was not finite and that the loop itself leaves out: counted, and the first ones are said."""
        tally = self._context.tally
        tally.discarded += 1
        self.name_batch(one)
        if tally.discarded <= SAID and self._guard.rank == 0:
            about = f": {one.about}" if one.about else ""
            log.warning("nanproof: the script left out a pass that was not finite%s", about)

    def abandon(self, error: BaseException) -> None:
        """The loop raised inside a step: if it goes on, that batch has left no trace."""
        step = self.step
        self._depth, self._forward = 0, False
        self._calls.drop()
        if step is None or self.judged or not self._guard.open:
            return
        with self._context.surviving("undoing a step that raised"):
            self.name_batch(step.passes[-1] if step.passes else None)
            step.abandon(error)
            if len(step.signals.losses) > 1:  # gradients of earlier micro-batches are mixed with the broken ones
                step.broken = f"a backward pass of this window raised {type(error).__name__}"
                return
            if self._backwards:
                for _, p in step.parameters:
                    p.grad = None
            self.step = None

    def died(self, error: BaseException) -> None:
        """The script ends by an exception outside of its passes; the last one may be behind it."""
        step = self.step
        if step is None or self.judged or not step.passes or not self._guard.open:
            return
        self.name_batch(step.passes[-1])
        with self.at_work():
            step.died(error)
        self.step = None
        self._calls.drop()

    # --- for the decision about the step ----------------------------------------------------------------------

    def settle(self) -> None:
        """The loop has come to its end: count what was left out."""
        self._calls.settle()

    def end(self) -> None:
        """The verdict on the step is due."""
        with self._context.surviving("tracking random states"):
            self._rng.enter()

    def held_buffers(self) -> tuple[Tensor, ...]:
        """Buffers of modules whose output the loop still holds for a later backward pass: no part of this step."""
        return tuple(b for module in self._calls.held() for b in module.buffers())

    def _random_after(self, now: Mapping[str, Any], undone: bool) -> Mapping[str, Any]:
        """Random states behind a bad step: what the model drew is given back, what the loop drew stays drawn."""
        step = self.step
        if step is None or not step.undoable or not step.passes or not undone:
            return now  # after a rollback the data goes on from where it is
        first = self._left or step.passes[0].random
        kept = self._rng.since(first, now)
        return {k: now[k] if k in kept else first.get(k, now[k]) for k in now}

    def name_batch(self, one: Pass | None) -> None:
        """Which batch a pass was trained on: as the loader delivered it when that is sure, else what went in."""
        if one is None or one.about:
            return
        with self._context.surviving("naming a batch"):
            describe_batch(one, self.data)

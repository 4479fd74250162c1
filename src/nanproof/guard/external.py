"""The guard beside a loop that takes its steps itself: a trainer's, or a script's under `nanproof run`."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import DesyncError
from ..losses import Losses
from ..rng import random_states
from ..tensors import is_finite, tensors_in
from .closure_step import ClosureStep, may_evaluate_again
from .data import DataSource, address_of, describe_batch
from .guard import Guard
from .left_out import Calls
from .optimizer_groups import Members, OptimizerGroup
from .readback import Signals
from .rng_tracking import RngTracking
from .signals import total_norm
from .step import Decision, OpenStep, Pass
from .training import gradients_of, scale_of
from .update import clip

log = logging.getLogger("nanproof")
SAID = 3
"""So many of the passes that a script leaves out are told one by one."""


class _Veto(BaseException):
    """Leaves an optimizer's step before it changes anything."""


@dataclass
class _Judged:
    """One decision about a group of optimizers, and which of them have acted on it."""

    step: OpenStep
    decision: Decision
    members: Members
    stepped: set[int] = field(default_factory=set)
    finished: bool = False


def attach(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    divided: bool | None = False,
    scaled: bool = True,
    hook: Sequence[nn.Module] | None = None,
    data: DataSource | None = None,
    max_norm: float | None = None,
    **options: Any,
) -> ExternalLoop:
    """Put a guard beside a loop that takes its steps itself; ``options`` are those of `Guard`."""
    guard = Guard(model, optimizer, external=True, **options)
    return ExternalLoop(guard, divided=divided, scaled=scaled, hook=hook, data=data, max_norm=max_norm)


class ExternalLoop:
    """Translates what a loop does into steps of the engine, and decisions into go or no go.

    The loop, or whoever hooks it, calls `begin` before a forward pass, `before_backward` and `after_backward` around
    a backward pass, asks `judge` before clipping, and lets `step` carry an optimizer step out or leave it. Several
    optimizers may step together or take turns; which of them do is learned from the loop.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        divided: bool | None = False,
        scaled: bool = True,
        hook: Sequence[nn.Module] | None = None,
        data: DataSource | None = None,
        max_norm: float | None = None,
    ) -> None:
        """``divided``: losses of micro-batches come divided by their number (None: seen from the loss itself).
        ``scaled``: every loss goes through the guard's scaler; else `before_backward` says which one it went through.
        ``hook``: the modules whose forward passes begin steps, if not the model's own. ``data``: where batches come
        from. ``max_norm``: clip to this, besides what the loop does."""
        self.guard = guard
        self._engine, t = guard._engine, guard.training
        self._divided, self._max_norm = divided, max_norm
        self._scaler = t.scaler if scaled else None
        self.data = data or DataSource()
        self._numbers = {id(o): i for i, o in enumerate(t.optimizers)}
        self._open: OpenStep | None = None
        self._judged: list[_Judged] = []
        self._forward = False
        """Whether a forward pass has begun whose backward pass has not."""
        self._backwards = 0
        self._without: list[nn.Parameter] = []
        """Parameters that had no gradient before the backward pass."""
        self._witness: nn.Parameter | None = None
        """One of them that has got one; the script has thrown the pass away when it loses it again."""
        self.busy = self._in_backward = False
        """``busy``: whether the guard is at work and may run passes of its own."""
        self._evaluating = False
        """Whether a step evaluates its closure again: passes that are part of the update."""
        self._evaluates_once: set[int] = set()
        """Optimizers that have evaluated their closure just once in their last step."""
        self._depth = 0
        self._called: tuple[Any, Any] = ((), {})
        self._calls = Calls(self._left_out)
        self._cleared_by: set[int] = set()
        """Optimizers that have cleared their gradients since the last backward pass."""
        self._rng = RngTracking()
        self._made: set[tuple[str, int]] = set()
        """Where the outputs of the hooked modules are, in this step and the one before."""
        self._made_before: set[tuple[str, int]] = set()
        self._held: dict[int, float] = {}
        self._tries, self._updates = [0] * len(t.optimizers), [0] * len(t.optimizers)
        self._followers: weakref.WeakKeyDictionary[Any, tuple[int, int, bool]] = weakref.WeakKeyDictionary()
        self.carried_out = True
        """Whether the last step was carried out."""
        self._at_close: list[Callable[[], None]] = []
        self.hooks: list[RemovableHandle] = []
        self._parts = [part for root in t.roots for part in root.children()]
        for module in t.roots if hook is None else hook:
            self.add_hooks(module)

    # --- passes -----------------------------------------------------------------------------------------------

    def add_hooks(self, module: nn.Module) -> None:
        """Let the training forward passes of a module begin steps."""
        before, after = (self._engine.hook("watching a forward pass", f) for f in (self._before, self._after))
        self.hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self.hooks.append(module.register_forward_hook(after, always_call=True))

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """What the hook before a forward pass does, for a pass that is too late for it."""
        with self._engine.surviving("watching a forward pass"):
            self._before(module, args, kwargs)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """What the hook after a forward pass does, for a pass that has none."""
        with self._engine.surviving("watching a forward pass"):
            self._after(module, args, output)

    def _before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if torch.compiler.is_compiling() or kwargs is None:
            return  # torch still calls a hook that was removed during this very call, without the keyword arguments
        if not self._watches(module):
            if not self.busy and not self._in_backward and not torch.is_grad_enabled():
                self.data.made_new()  # inference: an RL rollout is collected, or an evaluation runs
            return
        self._depth += 1
        if self._depth > 1:
            return
        self.begin()
        self._called = (args, kwargs)
        self._engine.before_call()
        self._rng.enter()
        self._rng.calls += 1
        assert self._open is not None
        here = self._open.passes[-1]
        named = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
        call = self._calls.begin(named if kwargs else args[0] if len(args) == 1 else args)
        call.capture.before(module, args, kwargs)
        here.inputs, here.capture = self._calls.joined()

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not self._watches(module) or self._depth == 0:
            return None
        error = sys.exc_info()[1]
        if output is None and error is not None:  # the forward pass itself raised
            self.abandon(error)
            return None
        self._depth -= 1
        given = output
        if self._depth == 0 and self._open is not None and output is not None:
            with self._at_work():
                output = self._engine.heal_call(self._open, module, *self._called, output)
            with self._engine.surviving("watching a forward pass"):
                self._calls.end(module, output)
                self._made.update(address_of(t) for _, t in tensors_in(output))
                self._rng.leave()
        return None if output is given else output

    def _watches(self, module: nn.Module) -> bool:
        # activation checkpointing runs forward passes again within the backward pass
        inside = self.busy or self._evaluating or self._in_backward
        return not inside and module.training and torch.is_grad_enabled() and self.guard.open

    def begin(self, batch: Any = None) -> None:
        """A forward pass is about to begin: remember random states and buffers."""
        if not self.busy and not self._evaluating and self.guard.open:
            with self._engine.surviving("beginning a step"):
                self._begin(batch)

    def _begin(self, batch: Any) -> None:
        random: Mapping[str, Any] = {}
        if self._open is None or self._judged or self._cleared():
            self._open = self._new_step(capture=True)
            self._rng.begin()
            random = dict(self._open.before.random) if self._open.before.taken else {}
        elif self._forward:
            if batch is not None:
                self._open.passes[-1].batch = batch
            return
        else:
            self._rng.enter()
            random = {k: v for k, v in random_states().items() if k in ("torch", "cuda")}
            self._engine.watch_pass(self._open)
        self._forward = True
        self._open.passes.append(Pass(batch=batch, random=random))

    def clearing(self, optimizer: Optimizer) -> None:
        """Gradients are about to be cleared; where no step was taken with them, the script skips it itself."""
        if self._open is None or self._judged or not self._backwards or self.busy or not self.owns(optimizer):
            return
        self._cleared_by.add(self._numbers[id(optimizer)])
        if len(self._cleared_by) == len(self._numbers):
            with self._engine.surviving("looking at a step that the script skips"):
                self._discard()

    def _cleared(self) -> bool:
        """Whether the script has thrown the gradients of the passes so far away: it skips steps itself."""
        if self._witness is not None and self._witness.grad is None:
            self._discard()
            return True
        return False

    def _discard(self) -> None:
        """The loop does not use the passes so far; a forward pass that is still without backward is another step's."""
        step = self._open
        if step is None:
            return
        grads = [g for _, g in gradients_of(self.guard.training.parameters)]
        seen = [*step.signals.losses, *([total_norm(grads)] if grads else [])]
        if not all(map(is_finite, seen)):  # host sync: only where a loop skips
            self._left_out(step.passes[0])
        self._backwards, self._witness = 0, None
        step.passes, step.signals = step.passes[-1:] if self._forward else [], Signals()
        if not self._forward:
            self._open = None

    def _left_out(self, one: Pass) -> None:
        """A pass that was not finite and that the loop itself leaves out: counted, and the first ones are said."""
        tally = self._engine.tally
        tally.discarded += 1
        self._name_batch(one)
        if tally.discarded <= SAID and self.guard.rank == 0:
            about = f": {one.about}" if one.about else ""
            log.warning("nanproof: the script left out a pass that was not finite%s", about)

    def _new_step(self, *, capture: bool) -> OpenStep:
        self._settle()
        self._judged.clear()
        self._calls.settle(self._engine.tally.steps)
        self._backwards, self._witness = 0, None
        self._made, self._made_before = set(self._made - self._made_before), self._made - self._made_before
        step = self._engine.begin(capture=capture)
        step.scaler, step.divided, step.undoable = self._scaler, bool(self._divided), capture
        step.random_after = self._random_after
        return step

    def before_backward(self, loss: Any, value: Tensor | None = None, *, scaler: Any = None) -> None:
        """A loss is on its way into backward; ``value`` is what it stands for where it was scaled or divided."""
        if not self.busy and not self._evaluating and self.guard.open:
            with self._engine.surviving("reading a loss"):
                self._before_backward(loss, value, scaler)

    def _before_backward(self, loss: Any, value: Tensor | None, scaler: Any) -> None:
        if self._open is None or self._judged:
            self._open = self._new_step(capture=False)
        step = self._open
        if self._cleared():
            self._open = step
        self._cleared_by.clear()
        self._calls.before_backward(loss)
        self._rng.enter()
        self._in_backward, self._forward = True, False
        if self._witness is None:
            self._without = [p for p in self.guard.training.model.parameters() if p.grad is None and p.requires_grad]
        self._backwards += 1
        step.scaler = scaler or step.scaler
        if not step.passes:
            step.passes.append(Pass())
        here = step.passes[-1]
        batch = self._given(here.batch if here.batch is not None else here.inputs)
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            factor = scale_in(loss if value is None else value)
            shown = (loss if value is None else value).detach().reshape(())
            if is_loss_scale(factor):
                shown = shown / factor
            if self._divided is None:
                step.divided = factor < 1
            here.loss = shown
            step.saw(Losses(total=shown, components={}), batch)
            if not self._engine.ranks.alone:  # a bad loss must reach the other ranks through the gradients
                good = torch.isfinite(shown)
                loss.register_hook(lambda g: torch.where(good, g, torch.nan))  # type: ignore[no-untyped-call]
            here.capture.before_backward(loss)
        else:
            step.signals.look(batch, None)

    def _given(self, batch: Any) -> list[Tensor]:
        """The tensors of a batch that the model has not made itself: a generator's output is no input."""
        return [t for _, t in tensors_in(batch) if t.grad_fn is None and address_of(t) not in self._made]

    @contextmanager
    def in_backward(self, loss: Any, value: Tensor | None = None, *, scaler: Any = None) -> Iterator[None]:
        """A block in which the loop runs a backward pass."""
        self.before_backward(loss, value, scaler=scaler)
        try:
            with self._engine.around("waiting for the other ranks", self._engine.ranks.waiting):
                yield
        except BaseException as error:
            self.after_backward(error)
            raise
        self.after_backward()

    def unscaled(self, loss: Tensor) -> Tensor | None:
        """A loss that went through the guard's scaler, without the scale."""
        scale = scale_of(self._scaler, self.guard.training.device)
        return None if scale is None else loss.detach() / scale

    def after_backward(self, error: BaseException | None = None) -> None:
        """A backward pass is over; one that raised has left gradients that cannot be used."""
        self._in_backward = False
        if self.busy or self._evaluating:
            return
        if error is not None:
            self.abandon(error)
            return
        with self._engine.surviving("looking at what a backward pass came by"):
            if self._open is not None and self._open.passes:
                self._calls.after_backward(self._open.passes[-1], self._engine.tally.steps)
            if self._witness is None:
                self._witness = next((p for p in self._without if p.grad is not None), None)
        with self._engine.surviving("tracking random states"):
            self._rng.leave()

    def abandon(self, error: BaseException) -> None:
        """The loop raised inside a step: if it goes on, that batch has left no trace."""
        step = self._open
        self._depth, self._forward = 0, False
        self._calls.drop()
        if step is None or self._judged or not self.guard.open:
            return
        with self._engine.surviving("undoing a step that raised"):
            self._name_batch(step.passes[-1] if step.passes else None)
            step.abandon(error)
            if len(step.signals.losses) > 1:  # gradients of earlier micro-batches are mixed with the broken ones
                step.broken = f"a backward pass of this window raised {type(error).__name__}"
                return
            if self._backwards:
                for _, p in step.parameters:
                    p.grad = None
            self._open = None

    def died(self, error: BaseException) -> None:
        """The script ends by an exception outside of its passes; the last one may be behind it."""
        step = self._open
        if step is None or self._judged or not step.passes or not self.guard.open:
            return
        self._name_batch(step.passes[-1])
        with self._at_work():
            self._engine.died(step, error)
        self._open = None
        self._calls.drop()

    # --- steps ------------------------------------------------------------------------------------------------

    def owns(self, optimizer: Any) -> bool:
        return id(optimizer) in self._numbers

    def judge(self, optimizer: Optimizer) -> bool:
        """Whether the step may be carried out: asked before clipping, and again at the step itself."""
        self._engine.require_running()  # a loop that catches everything does not go on unguarded
        if not self.guard.open:
            return True
        number = self._numbers[id(optimizer)]
        for judged in self._judged:
            if number in judged.members and number not in judged.stepped:
                return judged.decision.go
        try:
            self._settle()
            return self._decide(self._engine.groups.of(number)).go
        except DesyncError:
            raise
        except Exception as error:
            return self._engine.fall_back(self._open or self._engine.begin(capture=False), error).go

    def judge_clip(self, parameters: Sequence[Tensor]) -> bool:
        """Whether gradients may be clipped: those of a vetoed step stay as they are, or one NaN would spread."""
        wanted = {id(p) for p in parameters}
        for optimizer in self.guard.training.optimizers:
            if any(id(p) in wanted for g in optimizer.param_groups for p in g["params"]):
                return self.judge(optimizer)
        return True

    def norm_of(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """The norm that was judged, when it is exactly that of these parameters' gradients: clipping can share it."""
        last = self._judged[-1] if self._judged else None
        if last is None or last.step.sent is None or last.step.scaler is not None:
            return None
        mine = [p for _, p in last.step.parameters if p.grad is not None]
        theirs = [p for p in parameters if p.grad is not None]
        same = len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))
        single = {(p.dtype, p.device, p.layout) for p in mine} <= {
            (torch.float32, p.device, p.layout) for p in mine[:1]
        }
        return last.step.sent.norm if same and single else None

    def _decide(self, group: OptimizerGroup) -> Decision:
        """Ask the engine about the gradients that a group of optimizers has now."""
        engine = self._engine
        opened = self._open if self._open is not None else self._new_step(capture=False)
        step = dataclasses.replace(opened, group=group, number=engine.tally.steps + 1, sent=None)
        step.data = self.data.number  # no position: ranks may have different numbers of micro-batches or stages
        step.measure = lambda: self._norm(step)
        with self._engine.surviving("tracking random states"):
            self._rng.enter()
        step.name_batch = self._name_batch
        held = self._calls.held_buffers()
        kept = [b.detach().clone() for b in held]
        with self._at_work(), _unsafe_preserve_version_counter(held):
            decision = engine.judge(step)
            if decision.action.kind == "skip":  # what a later step uses is no part of this one
                for buffer, copy in zip(held, kept, strict=True):
                    buffer.detach().copy_(copy)
        if engine.groups.several and step.signals.losses:
            parts = {f"loss {engine.groups.name(group)}": decision.reading.loss}
            decision = dataclasses.replace(decision, reading=dataclasses.replace(decision.reading, components=parts))
        if decision.go:
            clip(step.parameters, self._max_norm, decision.norm)
        elif decision.scale is not None and step.scaler is not None:
            self._held[id(step.scaler)] = decision.scale
        judged = _Judged(step, decision, group.members)
        self._judged.append(judged)
        if not decision.go:
            self._finish(judged)
        return decision

    def _random_after(self, now: Mapping[str, Any], undone: bool) -> Mapping[str, Any]:
        """Random states behind a bad step: what the model drew is given back, what the loop drew stays drawn."""
        step = self._open
        if step is None or not step.undoable or not step.passes or not undone:
            return now  # after a rollback the data goes on from where it is
        first = step.passes[0].random
        kept = self._rng.since(first, now)
        return {k: now[k] if k in kept else first.get(k, now[k]) for k in now}

    def _name_batch(self, one: Pass | None) -> None:
        """Which batch a pass was trained on: as the loader delivered it when that is sure, else what went in."""
        if one is None or one.about:
            return
        with self._engine.surviving("naming a batch"):
            describe_batch(one, self.data)

    def _norm(self, step: OpenStep) -> Tensor:
        """The gradient norm with the loss scale taken out, where the loop has not done that yet."""
        t = self.guard.training
        scale = scale_of(step.scaler, t.device)
        if scale is None:
            return total_norm([g for _, g in gradients_of(step.parameters)])
        groups = self._engine.groups
        still = [i for i in step.group.members if _is_scaled(step.scaler, t.optimizers[i])]
        rest = [i for i in step.group.members if i not in still]
        norms = []
        if still:
            norms.append(total_norm([g for _, g in gradients_of(groups.get(still).parameters)]) / scale)
        if rest:
            norms.append(total_norm([g for _, g in gradients_of(groups.get(rest).parameters)]))
        return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]

    def step(
        self, optimizer: Optimizer, carry_out: Callable[..., Any], closure: Callable[[], Any] | None = None
    ) -> Any:
        """Carry a step out, or leave it; with a closure the verdict comes after its first run."""
        if closure is not None:
            return self._closure_step(optimizer, carry_out, closure)
        if not self.judge(optimizer):
            self.left(optimizer)
            return None
        with self._engine.lowered(optimizer):
            result = carry_out()
        self._stepped(optimizer, done=True)
        return result

    def _closure_step(self, optimizer: Optimizer, carry_out: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """A step with a closure: one that evaluates it again is judged by what it leaves behind, too."""
        returned: list[Any] = []
        number, whole = self._numbers[id(optimizer)], None
        if may_evaluate_again(optimizer) and number not in self._evaluates_once and self.guard.open:
            with self._engine.surviving("copying the state before a step"):
                whole = ClosureStep(self.guard.training)

        def judged() -> Any:
            if not returned:
                returned.append(closure())
                if not self.judge(optimizer):
                    raise _Veto
            else:
                self._evaluating = True
                try:
                    returned.append(closure() if whole is None else whole.evaluate(closure))
                finally:
                    self._evaluating = False
            return returned[-1]

        try:
            with self._engine.lowered(optimizer):
                result = carry_out(judged)
        except _Veto:
            self.left(optimizer)
            return returned[0]
        (self._evaluates_once.add if len(returned) == 1 else self._evaluates_once.discard)(number)
        if whole is not None and len(returned) > 1 and not self._accepts(optimizer, whole, closure):
            self.left(optimizer)
            return returned[0]
        self._stepped(optimizer, done=True)
        return result

    def _accepts(self, optimizer: Optimizer, whole: ClosureStep, closure: Callable[[], Any]) -> bool:
        """Whether what a step leaves behind is good; if not, its first bad evaluation is judged, and all is undone."""
        bad = False
        with self._engine.surviving("looking at what a step leaves behind"):
            bad = whole.went_bad(optimizer)
        if not bad:
            return True
        observing, gone_back = self._engine.policy.mode == "observe", False
        with self._engine.surviving("looking into a step that went bad on its way"):
            come_back = whole.go_to_bad_point()
            self._drop_step()
            if whole.is_finite(closure()) and self._open is not None:
                self._open.broken = f"{type(optimizer).__name__} came to a point that was not finite; seen again, it is"
            self.judge(optimizer)
            gone_back = bool(self._judged) and self._judged[-1].decision.action.kind in ("rollback", "restore")
            if observing:
                come_back()
        if not observing and not gone_back:
            with self._engine.surviving("undoing a step"):
                whole.undo()
        return observing

    def _drop_step(self) -> None:
        """Forget the step that is open or judged, without an account of it."""
        self._open = None
        self._judged.clear()

    def left(self, optimizer: Optimizer) -> None:
        """The loop has left a vetoed step out."""
        self._stepped(optimizer, done=False)

    def held_scale(self, scaler: Any) -> float | None:
        """The scale that a scaler is to take at its next update, after a veto; said once."""
        return self._held.pop(id(scaler), None)

    def advances(self, follower: Any, optimizer: Any = None) -> bool:
        """Whether a schedule or an average may move on: only if an update was carried out since it last did."""
        some = [self._numbers[id(optimizer)]] if optimizer is not None else range(len(self._tries))
        tries, updates = sum(self._tries[i] for i in some), sum(self._updates[i] for i in some)
        known_tries, known_updates, answer = self._followers.get(follower, (0, 0, True))
        if tries != known_tries:
            answer = updates > known_updates
        self._followers[follower] = (tries, updates, answer)
        return answer

    def count_skipped(self, optimizer: Optimizer) -> int:
        """How many steps of an optimizer were not carried out."""
        number = self._numbers[id(optimizer)]
        return self._tries[number] - self._updates[number]

    def _stepped(self, optimizer: Optimizer, *, done: bool) -> None:
        number = self._numbers[id(optimizer)]
        self.carried_out = done
        self._tries[number] += 1
        self._updates[number] += done
        judged = next((j for j in reversed(self._judged) if number in j.members), None)
        if judged is not None:
            judged.stepped.add(number)
            if judged.stepped >= set(judged.members):
                with self._engine.surviving("accounting for a step"):
                    self._settle()

    def _settle(self) -> None:
        """Finish the last decision once its steps are taken: learn who stepped."""
        for judged in self._judged:
            if judged.stepped:
                self._engine.groups.learn(judged.stepped)
            self._finish(judged)

    def _finish(self, judged: _Judged) -> None:
        """Close a step; one that the loop itself left out was none."""
        if judged.finished:
            return
        judged.finished = True
        with self._at_work():
            self._engine.finish(judged.step, judged.decision, carried_out=bool(judged.stepped))
            if not judged.decision.go or not judged.stepped:
                return
            if judged.step.undoable:
                judged.step.before.forget()
            else:  # a forward pass that nobody saw: buffers, at least, can be put back the next time
                with self._engine.surviving("capturing the state before a step"):
                    judged.step.before.capture()
                parts, self._parts = self._parts, []
                for part in parts:
                    self.add_hooks(part)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """A block of the guard's own: ignore passes that it replays."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    # --- saves, state, the end --------------------------------------------------------------------------------

    def blocks_save(self, path: Any, *, agree: bool = False) -> bool:
        """Whether a save of the training state must not happen, because the state is not finite.

        With ``agree`` all ranks that ask come to the same answer.
        """
        engine = self._engine
        if engine.policy.mode == "observe" or not self.guard.open:
            return False
        self._settle()
        bad = self.guard.training.nonfinite()
        if not (engine.ranks.any_in_save(path, bool(bad)) if agree else bad):
            return False
        what = f"{bad[0][0]} {bad[0][1]}" if bad else "a tensor on another rank"
        engine.block(path, what, suspect=bool(bad) and engine.ranks.share != "gradients")
        return True

    def summary(self) -> str:
        """What happened so far, in a few lines."""
        return self.guard.summary()

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return self.guard.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.guard.load_state_dict(state)

    def close(self) -> None:
        """End the run: account for what is pending, leave the model, write the log, say what happened."""
        if self.guard.open:
            for pending in (self._settle, self._calls.settle):
                with self._engine.surviving("accounting for the last step"):
                    pending()
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        with self._engine.surviving("accounting for the last step"):
            self._drop_step()
        while self._at_close:
            with self._engine.surviving("leaving the trainer as it was"):
                self._at_close.pop()()
        self.guard.close()

    def release(self) -> None:
        """Let go of optimizers and schedules: torch may hold hooks of a closed loop until the running call returns."""
        t = self.guard.training
        t.optimizers.clear()
        t.schedulers.clear()
        self._engine.groups.clear()

    def on_close(self, action: Callable[[], None]) -> None:
        """What is to be done at the end, such as to leave a trainer as it was."""
        self._at_close.append(action)


def is_loss_scale(factor: float) -> bool:
    """Whether a constant factor of a loss is a hand-made loss scale: a power of two, or too large to be a weight."""
    return factor >= 4096 or (factor >= 64 and math.frexp(factor)[0] == 0.5)


def scale_in(loss: Tensor) -> float:
    """The constant that a loss was multiplied with last: a hand-made loss scale, or a share; 1 when there is none.

    >>> x = torch.ones((), requires_grad=True)
    >>> scale_in((x * x) * 1024.0), scale_in((x * x) / 4), scale_in(x * x)
    (1024.0, 0.25, 1.0)
    """
    node: Any = loss.grad_fn
    name = node.name() if node is not None else ""
    if name not in ("DivBackward0", "MulBackward0") or len(node.next_functions) != 2:
        return 1.0
    if node.next_functions[1][0] is not None:
        return 1.0  # the other factor is part of the graph
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or other.device.type != "cpu":
        return 1.0  # on a device it could only be read by waiting
    value = float(other)
    if not 0 < abs(value) < math.inf:
        return 1.0
    return abs(1.0 / value) if name == "DivBackward0" else abs(value)


def _is_scaled(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether a scaler has not unscaled the gradients of an optimizer yet."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    return state is None or state["stage"] is OptState.READY

"""The guard's own loop: it runs the closure, or is handed a loss, and makes the update itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..captured import CapturedState
from ..errors import UsageError
from ..losses import losses_of
from ..records import Verdict
from .batch_replay import BatchReplay
from .deferred import Deferred
from .frozen import FrozenClosure
from .ranks import carry
from .signals import total_norm
from .step import OpenStep, Pass
from .training import gradients_of
from .update import clip, make_update

if TYPE_CHECKING:
    from .guard import Guard

T = TypeVar("T")
Closure = Callable[[], Any]


class OwnLoop:
    """Drives the engine from `Guard.step`: forward, backward, judge, clip, update, once for every window."""

    def __init__(
        self, guard: Guard, *, max_norm: float | None, accumulate: int, dropping: bool, deferred: bool
    ) -> None:
        """``dropping``: single micro-batches are judged, and only bad ones left out."""
        self._guard, self._context, self._engine = guard, guard._context, guard._engine
        self.training = t = guard.training
        self._max_norm, self._accumulate, self._dropping = max_norm, accumulate, dropping
        self._deferred = Deferred(self._engine, max_norm) if deferred else None
        self._batches: BatchReplay[Any] = BatchReplay()
        self._before_pass = CapturedState(t.slots, [p for _, p in t.unstepped])
        self._window: OpenStep | None = None
        self._micro: OpenStep | None = None
        self._done = self._kept = 0
        """Micro-batches of the window so far, and those of them whose gradients are in it."""
        self._aside: list[Tensor | None] | None = None
        self._begun = self._taken = self._in_closure = self._in_backward = False
        self._busy = False
        """Whether the guard itself runs the model: replays pass the same hooks as the loop."""
        self._synced = False
        self._called: tuple[Any, Any] = ((), {})
        watching = "watching a forward pass"
        before = self._context.hook(watching, self._before_forward)
        after = self._context.hook(watching, self._after_forward)
        self.hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in t.roots]
        self.hooks += [m.register_forward_hook(after, always_call=True) for m in t.roots]
        self._prepare_ranks()

    # --- what the loop calls ----------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        yield from self._batches.through(loader)
        self.flush()

    def step(self, closure: Closure | None, batch: Any) -> Verdict:
        if closure is not None:
            self._run(closure, batch)
        elif not self._taken:
            raise UsageError(
                "guard.step() was called without a loss", hint="pass a closure, or call guard.backward(loss) before"
            )
        self._begun = self._taken = False
        self._done += 1
        self._busy = True
        try:
            verdict = self._settle_microbatch() if self._dropping else None
            if self._done < self._accumulate:
                self._prepare_ranks()
                return verdict or Verdict(kind="pending", step=self._context.tally.steps + 1)
            return self._settle()
        finally:
            self._busy = False

    def backward(self, loss: Any, batch: Any) -> None:
        self._begin_pass(batch)
        with self._abandoning():
            with self._context.surviving("reading a loss"):
                self._current.passes[-1].capture.before_backward(loss)
            self._backward(loss)

    def flush(self) -> Verdict | None:
        return self._settle() if self._done else None

    def close(self) -> None:
        """Account for a step whose verdict is still to come, and leave the model."""
        if self._deferred is not None and self._context.stopped is None:
            self._deferred.catch_up()
        for hook in self.hooks:
            hook.remove()

    # --- one pass ---------------------------------------------------------------------------------------------

    @property
    def _current(self) -> OpenStep:
        step = self._micro if self._dropping else self._window
        assert step is not None
        return step

    def _run(self, closure: Closure, batch: Any) -> None:
        self._begin_pass(batch)
        frozen = FrozenClosure(closure, self._batches.replaying(), alone=self._accumulate == 1)
        self._current.passes[-1].closure = frozen
        with self._abandoning():
            self._in_closure = True
            try:
                returned = frozen()
            finally:
                self._in_closure = False
            one = self._current.passes[-1]
            one.batch = self._batches.batch if one.batch is None else one.batch  # the closure may have fetched it
            self._backward(returned)

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Loops without a closure: the first training forward of a step is where it begins."""
        if torch.compiler.is_compiling() or self._in_closure or self._begun or self._busy or not self._guard.open:
            return  # a compiled graph has no hooks inside; give the compiled module itself to Guard
        if model.training and torch.is_grad_enabled():
            self._begin_pass(None)
            self._current.passes[-1].capture.before(model, args, kwargs)
            self._called = (args, kwargs)
            self._engine.repairs.before_call()

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or self._in_closure or not self._begun or self._taken or self._busy:
            return None
        error = sys.exc_info()[1]
        if output is None and error is not None:
            self._abandon(error)  # the forward pass itself raised
        elif model.training and torch.is_grad_enabled():
            self._busy = True
            try:
                healed = self._engine.repairs.heal_call(self._current, model, *self._called, output)
            finally:
                self._busy = False
            self._current.passes[-1].capture.after(model, healed)
            return None if healed is output else healed
        return None

    def _begin_pass(self, batch: Any) -> None:
        """Just before a forward pass: remember what a step, or this micro-batch of it, must be undone to."""
        if self._begun:
            self._current.passes[-1].batch = self._current.passes[-1].batch if batch is None else batch
            return
        engine, context = self._engine, self._context
        if self._window is None:
            self._window = engine.begin()
        if self._dropping:
            if not self._done and self._accumulate > 1 and context.ranks.ddp:
                with context.surviving("sharing buffers"):
                    context.ranks.share_buffers()  # as in a plain loop: after every update
            self._micro = engine.begin(context.groups.micro, before=self._before_pass)
            self._micro.micro, self._micro.local = True, context.ranks.ddp
        elif self._done:
            with context.surviving("capturing the state before a micro-batch"):
                self._before_pass.capture()
            self._window.next_pass()
        self._batches.begin()
        step = self._current
        start = self._before_pass if self._done and not self._dropping else step.before
        known = batch if batch is not None else self._batches.batch
        several = self._accumulate > 1 and start.taken
        step.passes.append(Pass(batch=known, random=dict(start.random) if several else {}))
        self._window.position = step.position = self._batches.position
        step.data = self._window.data = self._batches.position or None
        self._begun = True

    def _backward(self, returned: Any) -> None:
        """Backward from what a forward pass returned."""
        context, t, step = self._context, self.training, self._current
        losses = losses_of(returned, context.loss_weights)
        one = step.passes[-1]
        step.saw(losses, one.batch, announce=self._dropping or self._done == self._accumulate - 1)
        one.loss = step.signals.losses[-1] if step.signals.losses else None
        if self._dropping:
            self._aside = [p.grad for _, p in t.parameters]
            for _, p in t.parameters:
                p.grad = None
        total = losses.total if t.scaler is None else t.scaler.scale(losses.total)
        self._in_backward = True
        with context.around("waiting for the other ranks", context.ranks.waiting):
            # a bad loss must reach every rank through the gradients, never by leaving one rank out of backward
            total.backward(gradient=None if context.ranks.alone else carry(total))
        self._in_backward = False
        self._taken = True

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """A block of the loop's own code: when it raises, the pass is undone and the exception goes on."""
        try:
            yield
        except BaseException as error:
            self._abandon(error)
            raise

    def _abandon(self, error: BaseException) -> None:
        """The loop raised in a pass: everything as if that pass had never begun."""
        step, in_backward = self._current, self._in_backward
        self._begun = self._taken = self._in_backward = False
        self._busy = True
        try:
            self._undo_pass(step, error, in_backward)
        finally:
            self._busy = False
            self._prepare_ranks()

    def _undo_pass(self, step: OpenStep, error: BaseException, in_backward: bool) -> None:
        if self._dropping:
            self._put_aside_back()
            step.abandon(error)
            return
        if not self._done:
            self.training.zero_grad()
            step.abandon(error)
            self._window = None
        elif not in_backward or self._replay_window(step):
            step.abandon(error, state=self._before_pass)
            step.passes.pop()
        else:  # earlier micro-batches cannot be told apart from the broken one: the window is void
            self.training.zero_grad()
            self._window, self._done = None, 0
            step.abandon(error)

    def _replay_window(self, step: OpenStep) -> bool:
        """Make the gradients of the earlier micro-batches again, after a backward pass that broke off."""
        closures = [p.closure for p in step.passes[:-1]]
        if not all(c is not None and c.faithful for c in closures):
            return False
        self.training.zero_grad()
        step.before.restore()
        try:
            for closure in closures:
                assert closure is not None
                total = losses_of(closure.again(), self._context.loss_weights).total
                (total if step.scaler is None else step.scaler.scale(total)).backward()
        except Exception:
            return False
        return True

    # --- one optimizer step -----------------------------------------------------------------------------------

    def _settle_microbatch(self) -> Verdict:
        """Judge one micro-batch by itself: add its gradients to the window's, or leave it out."""
        engine, step = self._engine, self._current
        scale = step.scaler.get_scale() if step.scaler is not None else None
        if scale is not None:
            step.measure = lambda: _unscaled_norm(step, scale)
        decision = engine.judge(step)
        if decision.go:
            self._kept += 1
            assert self._window is not None
            assert self._aside is not None
            self._window.signals.extend(step.signals)
            for (_, p), old in zip(self.training.parameters, self._aside, strict=True):
                if old is not None:
                    p.grad = old if p.grad is None else old.add_(p.grad)
            self._aside = None
        else:
            self._put_aside_back()
        return engine.finish(step, decision, carried_out=decision.go)

    def _put_aside_back(self) -> None:
        if self._aside is not None:
            for (_, p), kept in zip(self.training.parameters, self._aside, strict=True):
                p.grad = kept
            self._aside = None

    def _settle(self) -> Verdict:
        """The window is full: judge it, update or not, and account for it."""
        engine, t, step = self._engine, self.training, self._window
        assert step is not None
        count = self._kept if self._dropping else self._done
        self._done = self._kept = 0
        try:
            void = self._deferred.catch_up() if self._deferred is not None else None
            if void is not None:
                return void
            count = self._reduce(count)
            if t.scaler is not None:
                for optimizer in t.optimizers:
                    t.scaler.unscale_(optimizer)
            if count > 1:
                torch._foreach_div_([getattr(g, "_local_tensor", g) for _, g in gradients_of(t.parameters)], count)
            if self._deferred is not None:
                return self._deferred.step(step)
            step.empty = count == 0
            decision = engine.judge(step)
            if decision.go:
                clip(step.parameters, self._max_norm, decision.norm)
                make_update(t, decision, engine.lowered)
            elif decision.scale is not None and t.scaler is not None:
                t.scaler.update(decision.scale)
            return engine.finish(step, decision, carried_out=decision.go)
        finally:
            t.zero_grad()
            step.before.forget()
            self._window = self._micro = None
            self._batches.batch = None
            self._prepare_ranks()

    def _prepare_ranks(self) -> None:
        """Say whether the next backward pass reduces gradients; DDP decides that in the forward pass."""
        ranks = self._context.ranks
        if self._accumulate == 1 or not ranks.ddp:
            return
        self._synced = not self._dropping and self._done == self._accumulate - 1
        ranks.sync(self._synced)

    def _reduce(self, count: int) -> int:
        """Bring gradients together where the backward passes did not; the number of micro-batches in them."""
        ranks = self._context.ranks
        if not ranks.ddp or self._accumulate == 1 or self._synced:
            return count
        for _, p in self.training.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return ranks.sum_([g for _, g in gradients_of(self.training.parameters)], count)


def _unscaled_norm(step: OpenStep, scale: float) -> Tensor:
    return total_norm([g for _, g in gradients_of(step.parameters)]) / scale

"""The guard: what a training loop talks to."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..captured import CapturedState
from ..errors import UsageError
from ..losses import losses_of
from ..records import Repair, TensorFacts, Verdict
from . import options
from .audit import Audit
from .batch_replay import BatchReplay
from .checkpoints import Checkpoints
from .deferred import Deferred
from .engine import Engine
from .foresight import Foresight
from .frozen import FrozenClosure
from .heal import Heal
from .judge import Trends
from .motion import Motion
from .observers import Observer
from .options import Records, Watch
from .policy import Policy
from .ranks import Ranks, carry
from .rundir import RunDir
from .signals import total_norm
from .step import OpenStep, Pass
from .tally import Tally
from .training import Training, gradients_of
from .update import clip, make_update

T = TypeVar("T")
Closure = Callable[[], Any]
_guards: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Guard]] = weakref.WeakKeyDictionary()


def guard_of(optimizer: Optimizer) -> Guard | None:
    """The open guard that an optimizer is under; there should be no second one."""
    found = _guards.get(optimizer)
    guard = found() if found is not None else None
    return guard if guard is not None and guard.open else None


class Guard:
    """Keeps a training run finite: a step that would harm it is undone as if its batch had never come.

        guard = Guard(model, optimizer, scheduler=scheduler, max_norm=1.0, run_dir="runs/a")
        for batch in guard.batches(loader):
            guard.step(lambda: loss_fn(model(batch.x), batch.y))

    The guard calls backward, clips to ``max_norm``, steps the optimizer, the scheduler (once per update) and the
    averaged model ``ema``, and zeroes the gradients. Loops that cannot hand over a closure call
    ``guard.backward(loss)`` and then ``guard.step()``.

    Args:
        model: The model, or several.
        optimizer: The optimizer of its parameters, or several that step together.
        scheduler: Learning-rate schedule, or several; advanced once per update. Default: none.
        scaler: A ``torch.amp.GradScaler``. Default: none.
        ema: An averaged model (``update_parameters`` or ``update``) or a function of the model, called after every
            update. Default: none.
        max_norm: Clip the gradient norm to this. Default: no clipping.
        accumulate: Calls of ``step`` that make up one update; gradients are summed and divided once, so the loss
            must not be divided. Default: 1.
        on_bad_microbatch: With ``accumulate``: drop the whole "window" (default), or only the bad "microbatch".
        loss_weights: Weights of the entries of a dictionary of losses. Default: 1 each.
        timing: "exact" (default) undoes a bad step bit for bit, with one host read per step; "deferred" reads
            nothing and learns of a veto one step later (fused optimizers only).
        heal: When a step leaves the range of half precision: "offer" (default) searches for the smallest module that
            must compute in float32, proves it and prints it; "open" uses it; "off" does neither.
        policy: A `Policy`, or "default", "strict" (stop at the first bad step) or "observe" (only record).
        watch: What is measured besides loss and gradients, as a `Watch`.
        records: What is written down, as a `Records`.
        run_dir: Folder for the log and the incidents. Default: nothing is written.
        process_group: The ranks that share an update. Default: all.
        external: Another loop takes the steps, and tells an `ExternalLoop` about them (adapters). Default: False.
        communicates: Whether this rank exchanges data with others (adapters). Default: it does.
        continues: The counts of an earlier guard of the same run (adapters). Default: they begin at 0.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        max_norm: float | None = None,
        accumulate: int = 1,
        on_bad_microbatch: Literal["window", "microbatch"] = "window",
        loss_weights: Mapping[str, float] | None = None,
        timing: Literal["exact", "deferred"] = "exact",
        heal: Heal = "offer",
        policy: Policy | str = "default",
        watch: Watch | None = None,
        records: Records | None = None,
        run_dir: str | Path | None = None,
        process_group: Any = None,
        external: bool = False,
        communicates: Callable[[], bool] = lambda: True,
        continues: Tally | None = None,
    ) -> None:
        options.check_numbers(max_norm=max_norm, accumulate=accumulate)
        options.check_choice("on_bad_microbatch", on_bad_microbatch, ("window", "microbatch"))
        options.check_choice("timing", timing, ("exact", "deferred"))
        options.check_choice("heal", heal, ("off", "offer", "open"))
        options.check_average(ema)
        policy = Policy.named(policy) if isinstance(policy, str) else policy
        watch, records = watch or Watch(), records or Records()
        self._dropping = on_bad_microbatch == "microbatch" and accumulate > 1
        self.training = t = Training(model, optimizer, scheduler, scaler, ema)
        if not external:
            options.check_optimizers(t)
        if timing == "deferred":
            options.check_deferred(t, self._dropping)
        t.require_finite(
            "cannot guard a model that already holds NaN or Inf", "start from a healthy checkpoint: nanproof scan"
        )
        ranks = Ranks(
            t.model,
            device=t.device,
            share=policy.share,
            deadline=policy.deadline,
            stop_late=policy.on_missing_rank == "stop",
            group=process_group,
            communicates=communicates,
        )
        run = RunDir(run_dir, records, rank=ranks.rank, world=ranks.world, device=t.device)
        self._engine = engine = Engine(
            t,
            policy=policy,
            ranks=ranks,
            run=run,
            checkpoints=Checkpoints(t, ranks, run, records.keep),
            foresight=Foresight(t, watch),
            motion=Motion(t.parameters, watch.still_after),
            trends=Trends(chance=watch.chance),
            loss_weights=dict(loss_weights or {}),
            heal=heal,
            own_rates=external,
        )
        self._max_norm, self._accumulate = max_norm, accumulate
        self._deferred = Deferred(engine, max_norm) if timing == "deferred" else None
        engine.tally.updates = t.updates_so_far()
        if external:
            engine.tally.steps = engine.tally.updates  # a run that was resumed goes on counting
        if continues is not None:
            engine.tally.load_state_dict(continues.state_dict())
        self._batches: BatchReplay[Any] = BatchReplay()
        self._before_pass = CapturedState(t.slots)
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
        self._open = True
        watching = "watching a forward pass"
        before, after = engine.hook(watching, self._before_forward), engine.hook(watching, self._after_forward)
        hooked = [] if external else t.roots
        self._hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in hooked]
        self._hooks += [m.register_forward_hook(after, always_call=True) for m in hooked]
        atexit.register(_close_at_exit, weakref.ref(self))
        _guards.update(dict.fromkeys(t.optimizers, weakref.ref(self)))
        with engine.surviving("taking a snapshot"):
            engine.snapshots.take(0, engine.tally.updates)
        self._prepare_ranks()

    # --- the loop ---------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over a loader; incidents then keep the batch, and a last incomplete window is not lost."""
        yield from self._batches.through(loader)
        self.flush()

    def step(self, closure: Closure | None = None, *, batch: Any = None) -> Verdict:
        """Run forward and backward through the closure, judge, and act; without one, judge what `backward` did.

        The closure returns a loss, a dictionary of named losses, (loss, prediction), or an output with ``.loss``.
        """
        self._require_open()
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
                return verdict or Verdict(kind="pending", step=self.tally.steps + 1)
            return self._settle()
        finally:
            self._busy = False

    def backward(self, loss: Any, *, batch: Any = None) -> None:
        """Run the backward pass of a loss (or a dictionary of losses) under the guard; `step` comes next."""
        self._require_open()
        self._begin_pass(batch)
        with self._abandoning():
            with self._engine.surviving("reading a loss"):
                self._current.passes[-1].capture.before_backward(loss)
            self._backward(loss)

    @property
    def hooks(self) -> list[RemovableHandle]:
        """Every hook that this guard has on modules of the model."""
        return [*self._hooks, *self._engine.hooks]

    def observe(self, name: str, value: Tensor | float, *, limit: float | None = None) -> None:
        """Follow a number of your own, such as a policy's entropy: it is logged with the step and forecast.

            guard.observe("entropy", entropy.mean(), limit=0.01)

        ``limit`` is where it breaks, from above or from below. A tensor is not waited for.
        """
        self._require_open()
        self._engine.observe(name, value, limit)

    def flush(self) -> Verdict | None:
        """Carry out a window that is not full yet, as at the end of an epoch."""
        return self._settle() if self._done else None

    def epoch(self) -> Verdict:
        """Look at every parameter, buffer and moment now; call it before each epoch."""
        return self._engine.check_state()

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
        if torch.compiler.is_compiling() or self._in_closure or self._begun or self._busy or not self.open:
            return  # a compiled graph has no hooks inside; give the compiled module itself to Guard
        if model.training and torch.is_grad_enabled():
            self._begin_pass(None)
            self._current.passes[-1].capture.before(model, args, kwargs)
            self._called = (args, kwargs)
            self._engine.before_call()

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or self._in_closure or not self._begun or self._taken or self._busy:
            return None
        error = sys.exc_info()[1]
        if output is None and error is not None:
            self._abandon(error)  # the forward pass itself raised
        elif model.training and torch.is_grad_enabled():
            self._busy = True
            try:
                healed = self._engine.heal_call(self._current, model, *self._called, output)
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
        engine = self._engine
        if self._window is None:
            self._window = engine.begin()
        if self._dropping:
            self._micro = engine.begin(engine.groups.micro, before=self._before_pass)
            self._micro.micro, self._micro.local = True, engine.ranks.ddp
        elif self._done:
            with engine.surviving("capturing the state before a micro-batch"):
                self._before_pass.capture()
            engine.watch_pass(self._window)
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
        engine, t, step = self._engine, self.training, self._current
        losses = losses_of(returned, engine.loss_weights)
        one = step.passes[-1]
        one.loss = losses.total.detach()
        step.saw(losses, one.batch, announce=self._dropping or self._done == self._accumulate - 1)
        if self._dropping:
            self._aside = [p.grad for _, p in t.parameters]
            for _, p in t.parameters:
                p.grad = None
        total = losses.total if t.scaler is None else t.scaler.scale(losses.total)
        self._in_backward = True
        with engine.around("waiting for the other ranks", engine.ranks.waiting):
            # a bad loss must reach every rank through the gradients, never by leaving one rank out of backward
            total.backward(gradient=None if engine.ranks.alone else carry(total))
        self._in_backward = False
        self._taken = True

    def _abandoning(self) -> _Abandoning:
        return _Abandoning(self._abandon)

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
                total = losses_of(closure.again(), self._engine.loss_weights).total
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
            step.state_is_bad = self._dropping and engine.micro_batches_fail()
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
        ranks = self._engine.ranks
        if self._accumulate == 1 or not ranks.ddp:
            return
        self._synced = not self._dropping and self._done == self._accumulate - 1
        ranks.sync(self._synced)
        if self._dropping and self._done == 0:
            ranks.share_buffers_next()  # as in a plain loop: after every update

    def _reduce(self, count: int) -> int:
        """Bring gradients together where the backward passes did not; the number of micro-batches in them."""
        ranks = self._engine.ranks
        if not ranks.ddp or self._accumulate == 1 or self._synced:
            return count
        for _, p in self.training.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return ranks.sum_([g for _, g in gradients_of(self.training.parameters)], count)

    # --- checkpoints, state, the end --------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether it still guards: it was neither closed nor has it stopped the run."""
        return self._open and not self._engine.run.closed

    def _require_open(self) -> None:
        self._engine.require_running()
        if not self.open:
            raise UsageError("this guard is closed", hint="make a new Guard")

    @property
    def tally(self) -> Tally:
        """Counts of steps, updates, skips and the rest."""
        return self._engine.tally

    @property
    def run_dir(self) -> Path | None:
        """Where its log and its incidents are."""
        return self._engine.run.path

    @property
    def repairs(self) -> list[Repair]:
        """The repairs in force: modules that compute in float32 since a step left the range of half precision."""
        return list(self._engine.healer.repairs)

    @property
    def rank(self) -> int:
        return self._engine.ranks.rank

    def subscribe(self, observer: Observer) -> None:
        """Tell somebody about every step and incident from now on."""
        self._engine.subscribe(observer)

    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint, atomically; a state that is not finite is refused and nothing is written."""
        trusted = self._engine.groups.all.history.consecutive == 0
        return self._engine.checkpoints.save(Path(path), self.state_dict(), dict(extra or {}), trusted=trusted)

    def refuses_save(self, target: Any, bad: TensorFacts | None, *, among: int = 1) -> bool:
        """Whether somebody else's save must not happen because it holds a bad tensor; ``among`` ranks save together."""
        ranks = self._engine.ranks
        if not ranks.any_in_save(target, bad is not None, among):
            return False
        what = str(bad) if bad is not None else "a tensor on another rank"
        self._engine.block(target, what, suspect=ranks.share != "gradients" and bool(self.training.nonfinite()))
        return True

    def resume(self, path: str | Path, *, accept_drift: bool = False, fresh_schedule: bool = False) -> Audit:
        """Load a checkpoint, or the last healthy one of a folder, after checking that it is what was configured.

        ``fresh_schedule`` keeps the configured learning rate and schedule; ``accept_drift`` takes the checkpoint's.
        """
        checkpoints = self._engine.checkpoints
        audit, state = checkpoints.resume(Path(path), accept_drift=accept_drift, fresh_schedule=fresh_schedule)
        self.load_state_dict(state)
        return audit

    def state_dict(self) -> dict[str, Any]:
        """The guard's own memory, in plain values."""
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._engine.load_state_dict(state)

    def summary(self) -> str:
        """What happened so far, in a few lines."""
        return f"{self._engine.run.summary()}\n  {self._engine.snapshots.cost()}"

    def close(self) -> None:
        """End the run: account for what is pending, write the log, say what happened."""
        if not self._open:
            return
        self._open = False
        if self._deferred is not None and self._engine.stopped is None:
            self._deferred.catch_up()
        for hook in self._hooks:
            hook.remove()
        self._engine.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Abandoning:
    """A block of the loop's own code: when it raises, the pass is undone and the exception goes on."""

    def __init__(self, abandon: Callable[[BaseException], None]) -> None:
        self._abandon = abandon

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._abandon(error)


def _unscaled_norm(step: OpenStep, scale: float) -> Tensor:
    return total_norm([g for _, g in gradients_of(step.parameters)]) / scale


def _close_at_exit(guard: weakref.ref[Guard]) -> None:
    found = guard()
    if found is not None:
        found.close()

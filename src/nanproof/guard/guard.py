"""The guard: probe, judge, agree, decide, act, record, once per training step."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import GuardStop, NanproofError, UsageError
from ..records import Action, Reading, Verdict
from ..tensors import is_finite
from . import act, custody
from .judge import Trends, judge
from .moment import Moment
from .policy import History, Means, Policy, decide
from .probe import Probe, Seen
from .ranks import Ranks, Share, carry
from .rundir import RunDir
from .signals import losses_of, total_norm
from .snapshots import Ring
from .state import Training
from .taps import Taps, Watches
from .trial import Trial
from .window import Limits, Window

log = logging.getLogger("nanproof")
T = TypeVar("T")


class Guard:
    """Keeps a training run finite: a step that would harm it is undone as if its batch had never come.

        guard = Guard(model, optimizer, scheduler=scheduler, max_norm=1.0, run_dir="runs/a")
        for batch in guard.batches(loader):
            guard.step(lambda: loss_fn(model(batch.x), batch.y))

    The guard calls backward, clips to ``max_norm``, steps the optimizer, the scheduler (once per update) and the
    averaged model ``ema``, and zeroes the gradients. With ``accumulate=n`` it sums the gradients of n calls and
    divides once, so the loss must not be divided. A closure may return a loss, a dictionary of named losses
    (weighted by ``loss_weights``), ``(loss, prediction)``, or an output with ``.loss``. Loops that cannot hand
    over a closure call ``guard.backward(loss)`` and then ``guard.step()``.
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
        policy: Policy | str = "default",
        run_dir: str | Path | None = None,
        sync: Literal["exact", "late"] = "exact",
        loss_weights: Mapping[str, float] | None = None,
        chance: float | None = None,
        watch_modules: Sequence[str] = (),
        watch_params: Sequence[str] = (),
        every: int = 50,
        snapshot_every: int | None = 200,
        window: int = 128,
        keep: int = 3,
        share: Share = "flags",
        deadline: float = 600.0,
        log_every: int = 50,
        incident_bytes: int = 64 << 20,
    ) -> None:
        _check_numbers(
            max_norm=max_norm, accumulate=accumulate, every=every, snapshot_every=snapshot_every, window=window,
            keep=keep, deadline=deadline, log_every=log_every, incident_bytes=incident_bytes,
        )  # fmt: skip
        _check_choice("on_bad_microbatch", on_bad_microbatch, ("window", "microbatch"))
        _check_choice("sync", sync, ("exact", "late"))
        _check_choice("share", share, ("flags", "gradients"))
        act.check_average(ema)
        self.policy = Policy.named(policy) if isinstance(policy, str) else policy
        self.training = Training(model, optimizer, scheduler, scaler, ema)
        self._late = sync == "late"
        if self._late:
            _check_late(self.training, accumulate, on_bad_microbatch)
        self.training.require_finite(
            "cannot guard a model that is bad already", "start from a healthy checkpoint: nanproof scan finds it"
        )
        t = self.training
        self.max_norm = max_norm
        self.accumulate = accumulate
        self._drop = on_bad_microbatch == "microbatch" and accumulate > 1
        self._weights = dict(loss_weights or {})
        self._ranks = Ranks(t.model, sharded=t.sharded, device=t.device, share=share, deadline=deadline)
        # a DDP rank that may drop its own micro-batches must see its own gradients: reduce once, at the end
        self._local = self._drop and isinstance(t.model, nn.parallel.DistributedDataParallel) and not self._ranks.alone
        self._watches = Watches(t.model, list(watch_modules), list(watch_params), every)
        self._probe = Probe(t.device, self._watches)
        self._window = Window(size=window, warmup=max(1, window // 2))
        # single micro-batches scatter more than windows of them do: they have a range of their own
        self._micro_window = Window(size=window, warmup=max(1, window // 2))
        self._trends = Trends(chance=chance)
        self._history = History()
        self._backoff = act.Backoff()
        self._moment = Moment(t.slots, t.device)
        self._taps = Taps()
        self._ring = Ring(t, snapshot_every)
        self._run = RunDir(run_dir, self._ranks.rank, self._ranks.world, t.device, log_every, incident_bytes)
        self._keeper = custody.Keeper(t, self._ranks, self._run, keep)
        self.tally = self._run.tally
        self._batch: Any = None
        self._micro = 0
        self._good = 0
        self._aside: list[Tensor | None] = []
        self._begun = self._taken = self._synced = False
        self._hook = t.model.register_forward_pre_hook(lambda *_: self._begin(None))
        self._open = True
        atexit.register(_close_at_exit, weakref.ref(self))
        self._taps.listen()
        self._ring.take(0, 0)
        self._arm()

    # --- the loop ---------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over a loader; incidents then keep the batch, and a last incomplete window is not lost."""
        for batch in loader:
            self._batch = batch
            yield batch
        self.flush()

    def step(self, closure: Callable[[], Any] | None = None, *, batch: Any = None) -> Verdict:
        """Run forward and backward through the closure, judge, and act; without one, judge what `backward` did."""
        if not self._open:
            raise UsageError("this guard is closed", hint="make a new Guard")
        if closure is not None:
            self._batch = batch if batch is not None else self._batch
            self._begin(closure)
            self._take(closure())
        elif not self._taken:
            raise UsageError(
                "guard.step() was called without a loss", hint="pass a closure, or call guard.backward(loss) before"
            )
        self._taken = self._begun = False
        self._micro += 1
        verdict = self._settle_microbatch(closure) if self._drop else None
        if self._micro < self.accumulate:
            self._arm()
            return verdict or Verdict(kind="ok", step=self.tally.steps)
        return self._settle(closure if self.accumulate == 1 else None, verdict)

    def backward(self, loss: Any, *, batch: Any = None) -> None:
        """Run the backward pass of a loss (or a dictionary of losses) under the guard; `step` comes next."""
        self._batch = batch if batch is not None else self._batch
        self._begin(None)
        self._take(loss)

    def flush(self) -> Verdict | None:
        """Carry out a window that is not full yet, as at the end of an epoch."""
        if self._micro == 0:
            return None
        return self._settle(None, None)

    def epoch(self) -> Verdict:
        """Look at every parameter, buffer and moment now; call it before each epoch."""
        sick = self.training.sick()
        if not self._ranks.any(bool(sick)):
            return Verdict(kind="ok", step=self.tally.steps)
        return self._answer_state()

    # --- one micro-batch --------------------------------------------------------------------------------------

    def _begin(self, closure: Any) -> None:
        """The moment before a forward pass: remember random states and buffers."""
        if self._begun:
            return
        self._begun = True
        if self._micro == 0 or self._drop:
            self._moment.capture()
        self._taps.clear()
        self._taps.listen()
        self._watches.begin(self.tally.steps)

    def _take(self, returned: Any) -> None:
        """Backward from what a forward pass returned."""
        losses = losses_of(returned, self._weights)
        self._probe.see(losses, self._batch)
        if not self._local:
            self._ranks.start(self._probe.flags(self._limits(self._micro_window if self._drop else self._window))) if not self._ranks.alone else None
        if self._drop:
            self._aside = [p.grad for _, p in self.training.parameters]
            for _, p in self.training.parameters:
                p.grad = None
        scaler = self.training.scaler
        total = losses.total if scaler is None else scaler.scale(losses.total)
        # a bad loss must reach every rank through the gradients, never by leaving one rank out of backward
        total.backward(gradient=None if self._ranks.alone else carry(total))
        self._taken = True

    def _settle_microbatch(self, closure: Callable[[], Any] | None) -> Verdict:
        """Judge one micro-batch by itself: add its gradients to the window's, or leave it out."""
        t = self.training
        norm = total_norm([g for _, g in t.gradients()])
        shared = None if self._local else self._ranks.finish()
        scale = t.scaler_tensors()[0] if t.scaler else None
        good = self._probe.send(
            self.tally.steps, t.learning_rate(), norm if scale is None else norm / scale, shared, scale,
            self._limits(self._micro_window), last_only=True,
        )  # fmt: skip
        seen = self._probe.now(good, self._ranks.world)
        verdict = self._judge(seen)
        if not verdict.ok and self.policy.mode != "observe":
            trial = self._trial(verdict, seen, None)
            self._moment.restore()
            self._probe.forget_last()
            for (_, p), kept in zip(t.parameters, self._aside, strict=True):
                p.grad = kept
            self.tally.dropped += 1
            action = Action(kind="skip", reason="this micro-batch is left out of its window")
            self._run.incident(trial.verdict, action, trial.facts, self._taps, self._batch, self._moment)
            return trial.verdict
        self._good += 1
        self._micro_window.add(loss=seen.reading.loss, grad_norm=seen.reading.grad_norm)
        for (_, p), old in zip(t.parameters, self._aside, strict=True):
            if old is not None:
                p.grad, fresh = old, p.grad
                if fresh is not None:
                    p.grad.add_(fresh)
        return verdict

    # --- one optimizer step -----------------------------------------------------------------------------------

    def _settle(self, closure: Callable[[], Any] | None, micro: Verdict | None) -> Verdict:
        t = self.training
        count = self._good if self._drop else self._micro
        self.tally.steps += 1
        self._micro = self._good = 0
        try:
            if self._ring.state_is_bad():
                return self._answer_state()
            if self._probe.pending and self._late:
                late = self._catch_up()
                if late is not None:
                    return late
            count = self._reduce(count)
            if count == 0:
                assert micro is not None
                self._history = self._history.after(Action(kind="skip"), self.tally.steps, self.policy)
                return micro
            if t.scaler is not None:
                for optimizer in t.optimizers:
                    t.scaler.unscale_(optimizer)
            return self._judge_and_act(count, closure)
        finally:
            t.zero_grad()
            self._probe.clear()
            self._moment.forget()
            self._arm()

    def _judge_and_act(self, count: int, closure: Callable[[], Any] | None) -> Verdict:
        t = self.training
        try:
            grads = [g for _, g in t.gradients()]
            if count > 1:
                torch._foreach_div_([getattr(g, "_local_tensor", g) for g in grads], count)
            norm = total_norm(grads)
            shared = None if self._drop else self._ranks.finish()
            scale = t.scaler_tensors()[0] if t.scaler else None
            good = self._probe.send(self.tally.steps, t.learning_rate(), norm, shared, scale, self._limits(self._window))
            if self._late:
                return self._commit_late(good, norm)
            seen = self._probe.now(good, self._ranks.world)
            verdict = self._judge(seen)
        except NanproofError:
            raise
        except Exception as error:  # the guard's own failure must never end a healthy run
            return self._answer_failure(error)
        if verdict.ok:
            return self._commit(seen, verdict, Action(kind="commit"))
        return self._answer(seen, verdict, closure)

    def _judge(self, seen: Seen) -> Verdict:
        if seen.apart:
            self._ranks.raise_apart()
        verdict = judge(seen.reading, seen.limits)
        if verdict.ok and seen.spike:
            verdict = Verdict(kind="spike", step=verdict.step, level="loss")
        if not self._ranks.alone and not self._ranks.reduced and not self._local:
            bad = self._ranks.gather(int(not verdict.ok))
            if any(bad) and verdict.ok:
                verdict = Verdict(kind="nonfinite", step=verdict.step, level="gradient", rank=bad.index(1))
        if not verdict.ok and verdict.level in ("input", "prediction", "loss"):
            verdict = dataclasses.replace(verdict, rank=seen.rank)
        return verdict

    def _commit(self, seen: Seen, verdict: Verdict, action: Action) -> Verdict:
        """Carry the step out; early warnings are recorded after it."""
        t, reading = self.training, seen.reading
        act.clip(t, self.max_norm, reading.grad_norm)
        act.step_optimizers(t, self._backoff)
        if t.scaler is not None:
            t.scaler.update()
        act.step_schedulers(t, reading.loss)
        act.update_average(t)
        self._after_update(reading)
        self._finish(verdict, action, reading)
        return self._warn(seen) or verdict

    def _after_update(self, reading: Reading) -> None:
        self._window.add(loss=reading.loss, grad_norm=reading.grad_norm)
        self._backoff.advance()
        self.tally.updates += 1
        if self._ring.due(self.tally.updates):
            self._ring.take(self.tally.steps, self.tally.updates)

    def _finish(self, verdict: Verdict, action: Action, reading: Reading) -> None:
        self._history = self._history.after(action, verdict.step, self.policy)
        if not verdict.ok:
            self._ranks.note(verdict.kind, action.kind, str(verdict.step))
        self._run.record(reading, verdict, action)

    # --- answers ----------------------------------------------------------------------------------------------

    def _trial(self, verdict: Verdict, seen: Seen, closure: Callable[[], Any] | None) -> Trial:
        return Trial(
            self.training, self._ranks, self._moment, self._ring, self.policy, self._weights, verdict, seen, closure,
            self.tally.updates,
        )  # fmt: skip

    def _answer(self, seen: Seen, verdict: Verdict, closure: Callable[[], Any] | None) -> Verdict:
        """A bad step: look closely, run it again if that can tell something, decide, act, record."""
        t, reading = self.training, seen.reading
        trial = self._trial(verdict, seen, closure)
        if trial.ordinary_overflow():
            self.tally.overflows += 1
            self._run.record(reading, trial.verdict, Action(kind="skip", reason="the loss scale was too large"))
            return trial.verdict
        verdict = trial.verdict
        action = decide(verdict, self._history, self.policy, self._means())
        if action.kind == "rerun":
            reading = trial.second_reading()
            seen = dataclasses.replace(seen, reading=reading)
        self._run.incident(verdict, action, trial.facts, self._taps, self._batch, self._moment)
        match action.kind:
            case "commit" | "rerun":
                if verdict.kind == "spike" and self.policy.spikes == "skip" and self.policy.mode == "protect":
                    self._window.clear()
                self._commit(seen, verdict, action)
                return verdict
            case "skip":
                self._moment.restore()
            case _:
                self._moment.restore()
                self._go_back(verdict, action)
        self._finish(verdict, action, reading)
        return verdict

    def _answer_state(self) -> Verdict:
        """Parameters, buffers or moments are bad: skipping cannot help, going back can."""
        sick = self.training.sick()
        level = "buffer" if sick and all(kind == "buffer" for kind, _ in sick) else "parameter"
        facts = [f for _, f in sick]
        verdict = Verdict(
            kind="nonfinite", step=self.tally.steps, level=level, names=tuple(f.name for f in facts), origin="state"
        )  # type: ignore[arg-type]
        action = decide(verdict, self._history, self.policy, self._means())
        self._run.incident(verdict, action, facts, self._taps, None, self._moment)
        reading = self._run.last_reading(self.tally.steps, self.training.learning_rate())
        if action.kind != "commit":
            self._go_back(verdict, action)
        self._finish(verdict, action, reading)
        return verdict

    def _answer_failure(self, error: Exception) -> Verdict:
        """The guard itself failed: say so loudly, and fall back to the plainest check there is."""
        verdict = Verdict(
            kind="guard-failed", step=self.tally.steps, level="guard", names=(f"{type(error).__name__}: {error}",)
        )
        self.tally.failures.append(verdict.names[0])
        log.error("nanproof: the guard itself failed at step %d: %s", verdict.step, verdict.names[0], exc_info=error)
        action = decide(verdict, self._history, self.policy, self._means())
        if action.kind == "stop":
            self._stop(verdict, action)
        if all(is_finite(g) for _, g in self.training.gradients()):
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for _, p in self.training.parameters], self.max_norm)
            act.step_optimizers(self.training, self._backoff)
            if self.training.scaler is not None:
                self.training.scaler.update()
            for scheduler in self.training.schedulers:
                scheduler.step()
            act.update_average(self.training)
            self.tally.updates += 1
        elif self._moment.taken:
            self._moment.restore()
        return verdict

    def _go_back(self, verdict: Verdict, action: Action) -> None:
        """Roll back, restore, or stop."""
        match action.kind:
            case "rollback":
                snapshot = self._ring.newest()
                assert snapshot is not None
                snapshot.restore()
                self._ring.spend(snapshot)
                self.tally.updates = snapshot.update
                self._backoff.start(self.policy.lr_backoff, self.policy.lr_recovery)
                log.warning(
                    "nanproof: rolled back to update %s, learning rate × %g",
                    f"{snapshot.update:,}",
                    self._backoff.factor,
                )
            case "restore":
                path = self._keeper.last_good
                assert path is not None
                self._keeper.load(self, path)
                self._backoff.start(self.policy.lr_backoff, self.policy.lr_recovery)
                log.warning("nanproof: restored %s, learning rate × %g", path, self._backoff.factor)
            case _:
                self._stop(verdict, action)

    def _stop(self, verdict: Verdict, action: Action) -> None:
        self._run.record(self._run.last_reading(verdict.step, self.training.learning_rate()), verdict, action)
        self.training.zero_grad()
        good = self._keeper.last_good
        self.close()
        raise GuardStop(
            f"training was stopped at {verdict}: {action.reason}",
            hint=f"nanproof diagnose {self._run.path or '.'}"
            + (f"; the last good checkpoint is {good}" if good else ""),
        )

    def _warn(self, seen: Seen) -> Verdict | None:
        """Headroom that keeps shrinking, a model that is dead: recorded, never vetoed."""
        reading = seen.reading
        dead = self._trends.dead(reading.step, *self._window.medians())
        warning = self._trends.headroom(reading.step, dict(seen.headroom or {})) or dead
        if warning is not None:
            action = decide(warning, self._history, self.policy, self._means())
            self._run.incident(warning, action, [], self._taps, None, self._moment)
        return warning

    # --- "late" timing ----------------------------------------------------------------------------------------

    def _commit_late(self, good: Tensor, norm: Tensor) -> Verdict:
        """Let the device decide: nothing is read, a bad step changes nothing, its verdict comes a step later."""
        t = self.training
        act.clip(t, self.max_norm, norm)
        act.step_optimizers(t, self._backoff, veto=~good)
        self._moment.select_buffers(good)
        self._schedules = (
            [s.state_dict() for s in t.schedulers],
            [g["lr"] for o in t.optimizers for g in o.param_groups],
        )
        if t.scaler is not None:
            t.scaler.update()
        act.step_schedulers(t, 0.0)
        return Verdict(kind="ok", step=self.tally.steps)

    def _catch_up(self) -> Verdict | None:
        """The step before has arrived on the host: account for it and undo what the host did too early."""
        t = self.training
        seen = self._probe.late(self._ranks.world)
        verdict = self._judge(seen)
        if verdict.ok:
            self._after_update(seen.reading)
            self._finish(verdict, Action(kind="commit"), seen.reading)
            self._warn(seen)
            return None
        states, rates = self._schedules
        for scheduler, state in zip(t.schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        for group, lr in zip((g for o in t.optimizers for g in o.param_groups), rates, strict=True):
            group["lr"] = lr
        action = decide(verdict, self._history, self.policy, self._means())
        self._run.incident(verdict, action, [], self._taps, None, self._moment)
        if action.kind in ("rollback", "restore", "stop"):
            self._go_back(verdict, action)
            self._finish(verdict, action, seen.reading)
            return verdict
        self._finish(verdict, Action(kind="skip", reason=action.reason), seen.reading)
        return None

    # --- checkpoints, state, the end --------------------------------------------------------------------------

    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint, atomically; a state that is not finite is refused and nothing is written."""
        return self._keeper.save(self, Path(path), dict(extra or {}), trusted=self._history.consecutive == 0)

    def resume(self, path: str | Path, *, accept_drift: bool = False, fresh_schedule: bool = False) -> custody.Audit:
        """Load a checkpoint, or the last healthy one of a folder, after checking that it is what was configured."""
        return self._keeper.resume(self, Path(path), accept_drift=accept_drift, fresh_schedule=fresh_schedule)

    def state_dict(self) -> dict[str, Any]:
        """The guard's own memory, in plain values."""
        return {
            "tally": self.tally.state_dict(),
            "window": self._window.state_dict(),
            "micro_window": self._micro_window.state_dict(),
            "history": {**dataclasses.asdict(self._history)},
            "backoff": self._backoff.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tally.load_state_dict(state["tally"])
        self._window.load_state_dict(state["window"])
        self._micro_window.load_state_dict(state["micro_window"])
        history = dict(state["history"])
        self._history = History(**{k: tuple(v) if isinstance(v, list) else v for k, v in history.items()})
        self._backoff.load_state_dict(state["backoff"])

    def summary(self) -> str:
        """What happened so far, in a few lines."""
        return self._run.summary()

    def close(self) -> None:
        """End the run: account for what is pending, write the log, say what happened."""
        if not self._open:
            return
        self._open = False
        if self._late and self._probe.pending:
            self._catch_up()
        self._hook.remove()
        self._watches.close()
        self._taps.deafen()
        self._run.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- small things -----------------------------------------------------------------------------------------

    def _limits(self, window: Window) -> Limits:
        limits = window.limits() if self.policy.spikes == "skip" else Limits()
        if self._ranks.share == "gradients" and not self._ranks.alone:
            limits = dataclasses.replace(limits, loss=float("inf"))  # a local loss must not decide for one rank alone
        return limits

    def _means(self) -> Means:
        return Means(snapshot=self._ring.newest() is not None, checkpoint=self._keeper.last_good is not None)

    def _arm(self) -> None:
        """Say whether the next backward pass reduces gradients; DDP decides that in the forward pass."""
        self._synced = not self._local and self._micro == self.accumulate - 1
        self._ranks.sync(self.training.model, self._synced or self.training.sharded)

    def _reduce(self, count: int) -> int:
        """Bring gradients together where the backward passes did not; the number of micro-batches in them."""
        ddp = isinstance(self.training.model, nn.parallel.DistributedDataParallel)
        if self._ranks.alone or not ddp or self._synced:
            return count
        for _, p in self.training.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return self._ranks.sum_([g for _, g in self.training.gradients()], count)


def _close_at_exit(guard: weakref.ref[Guard]) -> None:
    found = guard()
    if found is not None:
        found.close()


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}", hint=f"use {' or '.join(known)}")


def _check_numbers(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise UsageError(
                f"{name} is {value}", hint="give a positive number" + (", or None" if name == "max_norm" else "")
            )


def _check_late(training: Training, accumulate: int, on_bad_microbatch: str) -> None:
    for optimizer in training.optimizers:
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise UsageError(
                f"sync='late' needs an optimizer that can leave a step out on the device; {type(optimizer).__name__} cannot",
                hint="build it with fused=True (Adam, AdamW, SGD, Adagrad), or use sync='exact'",
            )
    if training.ema is not None:
        raise UsageError("sync='late' cannot hold back an averaged model", hint="use sync='exact' with ema")
    if on_bad_microbatch == "microbatch" and accumulate > 1:
        raise UsageError("dropping single micro-batches needs their verdict at once", hint="use sync='exact'")
    if any(isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) for s in training.schedulers):
        raise UsageError("ReduceLROnPlateau needs the loss at once", hint="use sync='exact'")

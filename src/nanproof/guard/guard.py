"""The guard: what a training loop talks to."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import NanproofError, UsageError
from ..records import Action, Verdict
from . import checks
from .audit import Audit
from .ears import Ear
from .finder import Finder
from .judge import Trends
from .keeper import Keeper
from .late import Late
from .policy import Policy
from .post import Post
from .probe import Probe
from .ranks import Ranks, Share, carry
from .rundir import RunDir
from .signals import losses_of, total_norm
from .snapshots import Ring
from .state import Training
from .taps import Watches

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
    averaged model ``ema``, and zeroes the gradients. With ``accumulate=n`` it sums the gradients of n calls and
    divides once, so the loss must not be divided. A closure may return a loss, a dictionary of named losses
    (weighted by ``loss_weights``), ``(loss, prediction)``, or an output with ``.loss``. Loops that cannot hand
    over a closure call ``guard.backward(loss)`` and then ``guard.step()``. docs/guard.md explains every option.
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
        locate_seconds: float | None = 60.0,
        loggers: Sequence[Any] = (),
    ) -> None:
        checks.check_numbers(
            max_norm=max_norm, accumulate=accumulate, every=every, snapshot_every=snapshot_every, window=window,
            keep=keep, deadline=deadline, log_every=log_every, incident_bytes=incident_bytes, chance=chance,
            locate_seconds=locate_seconds,
        )  # fmt: skip
        checks.check_choice("on_bad_microbatch", on_bad_microbatch, ("window", "microbatch"))
        checks.check_choice("sync", sync, ("exact", "late"))
        checks.check_choice("share", share, ("flags", "gradients", "nothing"))
        checks.check_average(ema)
        policy = Policy.named(policy) if isinstance(policy, str) else policy
        self._drop = on_bad_microbatch == "microbatch" and accumulate > 1
        self.training = t = Training(model, optimizer, scheduler, scaler, ema)
        if sync == "late":
            checks.check_late(t, self._drop)
        t.require_finite("cannot guard a model that is bad already", "start from a healthy checkpoint: nanproof scan")
        self.accumulate = accumulate
        self._watches = Watches(t.model, watch_modules, watch_params, every)
        self._probe = Probe(t.device, self._watches, t.gradient_max())
        ranks = Ranks(t.roots, sharded=t.sharded, device=t.device, share=share, deadline=deadline)
        run = RunDir(run_dir, ranks.rank, ranks.world, t.device, log_every, incident_bytes, loggers)
        self._post = Post(
            training=t, policy=policy, ranks=ranks, run=run, ring=Ring(t, snapshot_every),
            keeper=Keeper(t, ranks, run, keep), trends=Trends(chance=chance), weights=dict(loss_weights or {}),
            window=window, max_norm=max_norm, local=self._drop and ranks.ddp,
            finder=Finder(t, ranks, seconds=locate_seconds) if locate_seconds else None,
        )  # fmt: skip
        self._late = Late(self._post, self._probe) if sync == "late" else None
        self.tally = run.tally
        self.tally.updates = t.updates_so_far()
        self._micro = self._good = 0
        self._aside: list[Tensor | None] = []
        self._begun = self._taken = self._synced = False
        self._open = True
        self._in_closure = False
        before, after = Ear(self._before_forward), Ear(self._after_forward)
        self._hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in t.roots]
        self._hooks += [m.register_forward_hook(after) for m in t.roots]
        atexit.register(_close_at_exit, weakref.ref(self))
        _guards.update(dict.fromkeys(t.optimizers, weakref.ref(self)))
        self._post.taps.listen()
        self._post.ring.take(0, self.tally.updates)
        self._arm()

    # --- the loop ---------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over a loader; incidents then keep the batch, and a last incomplete window is not lost."""
        yield from self._post.feed.through(loader)
        self.flush()

    def step(self, closure: Closure | None = None, *, batch: Any = None) -> Verdict:
        """Run forward and backward through the closure, judge, and act; without one, judge what `backward` did."""
        if not self.open:
            raise UsageError("this guard is closed", hint="make a new Guard")
        if closure is not None:
            self._begin()
            self._in_closure = True
            try:
                returned = closure()
            finally:
                self._in_closure = False
            self._post.feed.given(batch)
            self._take(returned)
        elif not self._taken:
            raise UsageError(
                "guard.step() was called without a loss", hint="pass a closure, or call guard.backward(loss) before"
            )
        self._micro += 1
        verdict = self._settle_microbatch() if self._drop else None
        if self._micro < self.accumulate:
            self._begun = self._taken = False
            self._arm()
            return verdict or Verdict(kind="ok", step=self.tally.steps)
        return self._settle(closure if self.accumulate == 1 else None, verdict)

    def backward(self, loss: Any, *, batch: Any = None) -> None:
        """Run the backward pass of a loss (or a dictionary of losses) under the guard; `step` comes next."""
        self._post.feed.given(batch)
        self._begin()
        self._post.seam.meet_backward(loss)
        self._take(loss)

    def flush(self) -> Verdict | None:
        """Carry out a window that is not full yet, as at the end of an epoch."""
        if not self._micro:
            return None
        if not self._drop:
            self._tell()
        return self._settle(None, None)

    def epoch(self) -> Verdict:
        """Look at every parameter, buffer and moment now; call it before each epoch."""
        if self._post.ranks.any(bool(self.training.sick())):
            return self._post.answer_state()
        return Verdict(kind="ok", step=self.tally.steps)

    # --- one micro-batch --------------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Loops without a closure: the first training forward of a step is where it begins."""
        if torch.compiler.is_compiling():
            return  # inside a compiled graph; give the compiled module itself to Guard, its hooks run outside
        if model.training and self._open and not self._begun:
            self._begin()
            if not self._in_closure and self.accumulate == 1:
                self._post.seam.before(model, args, kwargs)

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if model.training and self._begun and not self._in_closure and not self._taken and self.accumulate == 1:
            self._post.seam.after(model, output)

    def _begin(self) -> None:
        """The moment before a forward pass: remember random states and buffers."""
        if self._begun:
            return
        self._begun = True
        self._post.feed.begin()
        if self._micro == 0 or self._drop:
            self._post.moment.capture()
        self._post.taps.clear()
        self._post.taps.listen()
        self._watches.begin(self.tally.steps)

    def _take(self, returned: Any) -> None:
        """Backward from what a forward pass returned."""
        post, t = self._post, self.training
        losses = losses_of(returned, post.weights)
        self._probe.see(losses)
        with post.surviving("looking at the batch"):
            self._probe.look(post.feed.batch, losses.prediction)
        if self._drop or self._micro == self.accumulate - 1:
            self._tell()
        if self._drop:
            self._aside = [p.grad for _, p in t.parameters]
            for _, p in t.parameters:
                p.grad = None
        total = losses.total if t.scaler is None else t.scaler.scale(losses.total)
        # a bad loss must reach every rank through the gradients, never by leaving one rank out of backward
        total.backward(gradient=None if post.ranks.alone else carry(total))
        self._taken = True

    def _tell(self) -> None:
        """Let the other ranks know of this window, or where each micro-batch is judged by itself, of the last one."""
        post = self._post
        if not post.local and not post.ranks.alone:
            limits = post.limits(post.micro_window if self._drop else post.window)
            post.ranks.start(self._probe.flags(limits, last_only=self._drop), post.feed.position)

    def _settle_microbatch(self) -> Verdict:
        """Judge one micro-batch by itself: add its gradients to the window's, or leave it out."""
        post, t = self._post, self.training
        norm = total_norm([g for _, g in t.gradients()])
        scale = t.scale()
        good = self._probe.send(
            step=self.tally.steps, lr=t.learning_rate(), norm=norm if scale is None else norm / scale, scale=scale,
            shared=None if post.local else post.ranks.finish(), limits=post.limits(post.micro_window), last_only=True,
        )  # fmt: skip
        seen = self._probe.now(good, post.ranks.world)
        verdict = post.judge(seen)
        if verdict.ok or post.policy.mode == "observe":
            self._good += 1
            post.micro_window.add(loss=seen.reading.loss, grad_norm=seen.reading.grad_norm)
            for (_, p), old in zip(t.parameters, self._aside, strict=True):
                if old is not None:
                    p.grad = old if p.grad is None else old.add_(p.grad)
            return verdict
        trial = post.examine(verdict, seen, None)
        post.moment.restore()
        self._probe.forget_last()
        for (_, p), kept in zip(t.parameters, self._aside, strict=True):
            p.grad = kept
        self.tally.dropped += 1
        action = Action(kind="skip", reason="this micro-batch is left out of its window")
        post.note(trial.verdict, action, trial.facts)
        return trial.verdict

    # --- one optimizer step -----------------------------------------------------------------------------------

    def _settle(self, closure: Closure | None, micro: Verdict | None) -> Verdict:
        post, t = self._post, self.training
        count = self._good if self._drop else self._micro
        self.tally.steps += 1
        self._micro = self._good = 0
        try:
            if post.ring.state_is_bad():
                answered = post.answer_state()
                if post.taken.kind != "commit":
                    return answered
            void = self._late.catch_up() if self._late else None
            if void is not None:
                return void
            count = self._reduce(count)
            if count == 0:  # every micro-batch of the window was dropped
                post.history = post.history.after(Action(kind="skip"), self.tally.steps, post.policy)
                return micro or Verdict(kind="nonfinite", step=self.tally.steps, level="loss")
            if t.scaler is not None:
                for optimizer in t.optimizers:
                    t.scaler.unscale_(optimizer)
            return self._judge_and_act(count, closure)
        finally:
            t.zero_grad()
            self._probe.clear()
            post.moment.forget()
            post.feed.batch = None
            post.seam.clear()
            self._begun = self._taken = False  # only now: reruns pass the same hooks
            self._arm()

    def _judge_and_act(self, count: int, closure: Closure | None) -> Verdict:
        post, t = self._post, self.training
        try:
            grads = [g for _, g in t.gradients()]
            if count > 1:
                torch._foreach_div_([getattr(g, "_local_tensor", g) for g in grads], count)
            norm = total_norm(grads)
            good = self._probe.send(
                step=self.tally.steps, lr=t.learning_rate(), norm=norm, scale=t.scale(),
                shared=None if self._drop else post.ranks.finish(), limits=post.limits(post.window),
            )  # fmt: skip
            if self._late:
                return self._late.commit(good, norm)
            seen = self._probe.now(good, post.ranks.world)
            verdict = post.judge(seen)
        except NanproofError:
            raise
        except Exception as error:  # the guard's own failure must never end a healthy run
            return post.answer_failure(error)
        if verdict.ok:
            return post.commit(seen, verdict, Action(kind="commit"))
        return post.answer(seen, verdict, closure)

    def _arm(self) -> None:
        """Say whether the next backward pass reduces gradients; DDP decides that in the forward pass."""
        self._synced = not self._post.local and self._micro == self.accumulate - 1
        if self.accumulate > 1:  # else DDP is as it has to be already
            self._post.ranks.sync(self.training.roots, self._synced)

    def _reduce(self, count: int) -> int:
        """Bring gradients together where the backward passes did not; the number of micro-batches in them."""
        if not self._post.ranks.ddp or self._synced:
            return count
        for _, p in self.training.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return self._post.ranks.sum_([g for _, g in self.training.gradients()], count)

    def _release(self) -> None:
        """Leave the passes and steps to somebody who listens to the loop itself."""
        for hook in self._hooks:
            hook.remove()

    # --- checkpoints, state, the end --------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether it still guards: it was neither closed nor has it stopped the run."""
        return self._open and not self._post.run.closed

    @property
    def run_dir(self) -> Path | None:
        """Where its log and its incidents are."""
        return self._post.run.path

    @property
    def rank(self) -> int:
        return self._post.ranks.rank

    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint, atomically; a state that is not finite is refused and nothing is written."""
        trusted = self._post.history.consecutive == 0
        return self._post.keeper.save(Path(path), self.state_dict(), dict(extra or {}), trusted=trusted)

    def resume(self, path: str | Path, *, accept_drift: bool = False, fresh_schedule: bool = False) -> Audit:
        """Load a checkpoint, or the last healthy one of a folder, after checking that it is what was configured.

        ``fresh_schedule`` keeps the configured learning rate and schedule; ``accept_drift`` takes the checkpoint's.
        """
        audit, state = self._post.keeper.resume(Path(path), accept_drift=accept_drift, fresh_schedule=fresh_schedule)
        self.load_state_dict(state)
        return audit

    def state_dict(self) -> dict[str, Any]:
        """The guard's own memory, in plain values."""
        return self._post.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._post.load_state_dict(state)

    def summary(self) -> str:
        """What happened so far, in a few lines."""
        return f"{self._post.run.summary()}\n  {self._post.ring.cost()}"

    def close(self) -> None:
        """End the run: account for what is pending, write the log, say what happened."""
        if not self._open:
            return
        self._open = False
        if self._late:
            self._late.catch_up()
        for hook in self._hooks:
            hook.remove()
        self._watches.close()
        self._post.taps.deafen()
        self._post.run.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_at_exit(guard: weakref.ref[Guard]) -> None:
    found = guard()
    if found is not None:
        found.close()

"""The guard: what a training loop talks to."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import UsageError
from ..records import Repair, Verdict
from .audit import Audit
from .checkpoints import Checkpoints
from .checks import one_of, positive
from .context import Context
from .deferred import check_deferred
from .engine import Engine
from .heal import Heal
from .observers import Observer
from .options import Records, Watch
from .own_loop import Closure, OwnLoop
from .policy import Policy
from .ranks import Ranks
from .rundir import RunDir
from .tally import Tally
from .training import Training

log = logging.getLogger("nanproof")
T = TypeVar("T")
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
        positive(("max_norm",), max_norm=max_norm, accumulate=accumulate)
        one_of("on_bad_microbatch", on_bad_microbatch, "window", "microbatch")
        one_of("timing", timing, "exact", "deferred")
        one_of("heal", heal, "off", "offer", "open")
        policy = Policy.named(policy) if isinstance(policy, str) else policy
        watch, records = watch or Watch(), records or Records()
        dropping = on_bad_microbatch == "microbatch" and accumulate > 1
        self.training = t = Training(model, optimizer, scheduler, scaler, ema)
        if not external and any(isinstance(o, torch.optim.LBFGS) for o in t.optimizers):
            raise UsageError(
                "LBFGS evaluates its closure many times within one step, which Guard.step cannot hand to it",
                hint="run your own loop under `nanproof run`, which guards LBFGS, or use a first-order optimizer",
            )
        if timing == "deferred":
            check_deferred(t, dropping)
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
        self._context = context = Context(
            t,
            policy=policy,
            ranks=ranks,
            run=run,
            checkpoints=Checkpoints(t, ranks, run, records.keep),
            loss_weights=dict(loss_weights or {}),
            own_rates=external,
        )
        self._engine = Engine(context, watch=watch, heal=heal)
        context.tally.updates = t.updates_so_far()
        if external:
            context.tally.steps = context.tally.updates  # a run that was resumed goes on counting
        if continues is not None:
            context.tally.load_state_dict(continues.state_dict())
        self._open = True
        atexit.register(_close_at_exit, weakref.ref(self))
        _guards.update(dict.fromkeys(t.optimizers, weakref.ref(self)))
        with context.surviving("taking a snapshot"):
            context.snapshots.take(0, context.tally.updates)
        self._loop: OwnLoop | None = None
        if not external:
            late = timing == "deferred"
            self._loop = OwnLoop(self, max_norm=max_norm, accumulate=accumulate, dropping=dropping, deferred=late)

    # --- the loop ---------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over a loader; incidents then keep the batch, and a last incomplete window is not lost."""
        return self._own_loop.batches(loader)

    def step(self, closure: Closure | None = None, *, batch: Any = None) -> Verdict:
        """Run forward and backward through the closure, judge, and act; without one, judge what `backward` did.

        The closure returns a loss, a dictionary of named losses, (loss, prediction), or an output with ``.loss``.
        """
        self._require_open()
        return self._own_loop.step(closure, batch)

    def backward(self, loss: Any, *, batch: Any = None) -> None:
        """Run the backward pass of a loss (or a dictionary of losses) under the guard; `step` comes next."""
        self._require_open()
        self._own_loop.backward(loss, batch)

    def flush(self) -> Verdict | None:
        """Carry out a window that is not full yet, as at the end of an epoch."""
        return self._own_loop.flush()

    def epoch(self) -> Verdict:
        """Look at every parameter, buffer and moment now; call it before each epoch."""
        return self._engine.check_state()

    @property
    def _own_loop(self) -> OwnLoop:
        if self._loop is None:
            raise UsageError("another loop takes the steps of this guard", hint="step the optimizer, as it does")
        return self._loop

    @property
    def hooks(self) -> list[RemovableHandle]:
        """Every hook that this guard has on modules of the model."""
        return [*(self._loop.hooks if self._loop is not None else ()), *self._engine.warnings.foresight.hooks]

    def observe(self, name: str, value: Tensor | float, *, limit: float | None = None) -> None:
        """Follow a number of your own, such as a policy's entropy: it is logged with the step and forecast.

            guard.observe("entropy", entropy.mean(), limit=0.01)

        ``limit`` is where it breaks, from above or from below. A tensor is not waited for.
        """
        self._require_open()
        self._engine.warnings.foresight.observe(name, value, limit)

    # --- checkpoints, state, the end --------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether it still guards: it was neither closed nor has it stopped the run."""
        return self._open and not self._context.run.closed

    def _require_open(self) -> None:
        self._context.require_running()
        if not self.open:
            raise UsageError("this guard is closed", hint="make a new Guard")

    @property
    def tally(self) -> Tally:
        """Counts of steps, updates, skips and the rest."""
        return self._context.tally

    @property
    def run_dir(self) -> Path | None:
        """Where its log and its incidents are."""
        return self._context.run.path

    @property
    def repairs(self) -> list[Repair]:
        """The repairs in force: modules that compute in float32 since a step left the range of half precision."""
        return list(self._engine.healer.repairs)

    @property
    def rank(self) -> int:
        return self._context.ranks.rank

    def subscribe(self, observer: Observer) -> None:
        """Tell somebody about every step and incident from now on."""
        self._context.run.observers.append(observer)

    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint, atomically; a state that is not finite is refused and nothing is written."""
        trusted = self._context.groups.all.history.consecutive == 0
        return self._context.checkpoints.save(Path(path), self.state_dict(), dict(extra or {}), trusted=trusted)

    def blocks_save(self, target: Any, bad: str, *, among: int | None = None) -> bool:
        """Whether somebody else's save must not happen, because it holds a tensor that is ``bad``, on any rank.

        ``among`` ranks save together, by default all; those that ask come to the same answer.
        """
        context, ranks = self._context, self._context.ranks
        if context.policy.mode == "observe" or not self.open or not ranks.any_in_save(target, bool(bad), among):
            return False
        bad = bad or "a tensor on another rank"
        context.tally.blocked.append(f"{target}: {bad}")
        context.tell("event", event="save-blocked", path=str(target), reason=bad)
        if ranks.share != "gradients" and self.training.nonfinite():  # else ranks might not be of one mind
            context.snapshots.suspect()  # the next step answers for it
        log.error("nanproof: did not save %s: %s", target, bad)
        return True

    def resume(self, path: str | Path, *, accept_drift: bool = False, fresh_schedule: bool = False) -> Audit:
        """Load a checkpoint, or the last healthy one of a folder, after checking that it is what was configured.

        ``fresh_schedule`` keeps the configured learning rate and schedule; ``accept_drift`` takes the checkpoint's.
        """
        checkpoints = self._context.checkpoints
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
        return f"{self._context.run.summary()}\n  {self._context.snapshots.cost()}"

    def close(self) -> None:
        """End the run: account for what is pending, write the log, say what happened."""
        if not self._open:
            return
        self._open = False
        if self._loop is not None:
            self._loop.close()
        self._engine.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_at_exit(guard: weakref.ref[Guard]) -> None:
    found = guard()
    if found is not None:
        found.close()

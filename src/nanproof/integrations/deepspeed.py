"""DeepSpeed: its engine skips bad steps itself; this says why, names the batch, and vetoes where it does not look.

    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    guard = guard_engine(engine, run_dir="runs/a")

Nothing here communicates. The rank whose loss is bad leaves a note in the store before it steps; DeepSpeed's own
reduction inside the step has then brought all ranks together, and each can read the note.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import GuardStop
from ..guard.boundary import Boundary
from ..guard.data import DataSource, describe_batch
from ..guard.examine import batch_facts
from ..guard.forward_capture import ForwardCapture
from ..guard.hooks import Hook
from ..guard.options import Records
from ..guard.policy import History, Policy, Recoveries, decide
from ..guard.rundir import RunDir, describe
from ..guard.step import Pass
from ..locating import Location, locate
from ..records import Action, Reading, Verdict
from ..tensors import is_finite
from .object_patches import ObjectPatches

log = logging.getLogger("nanproof")


def guard_engine(engine: Any, **options: Any) -> EngineGuard:
    """Guard a DeepSpeed engine; its loop stays as it is. Options: ``run_dir``, ``policy``, ``records``, ``data``.

    An engine that is guarded already, as under `nanproof run`, keeps its guard.
    """
    known = _guards.get(engine)
    if known is None or not known.open:
        known = _guards[engine] = EngineGuard(engine, **options)
    return known


class EngineGuard(Boundary):
    """Watches one DeepSpeed engine: every step is recorded, every skipped one becomes an incident."""

    def __init__(
        self,
        engine: Any,
        *,
        run_dir: str | Path | None = None,
        policy: Policy | str = "default",
        records: Records | None = None,
        data: DataSource | None = None,
    ) -> None:
        super().__init__()
        self._engine, self._module = engine, engine.module
        self.policy = Policy.named(policy) if isinstance(policy, str) else policy
        self._data = data or DataSource()
        self.rank, self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.run = RunDir(run_dir, records or Records(), rank=self.rank, world=self._world, device=engine.device)
        self.tally = self.run.tally
        self.open = True
        self._history = History()
        self._streak = 0
        self._pass: Pass | None = None
        self._culprit: Pass | None = None
        """The micro-batch of this rank whose loss is bad, and where that came from."""
        self._location: Location | None = None
        several = dist.is_initialized()
        self._store: Any = (
            dist.distributed_c10d._get_default_store() if several else torch._C._distributed_c10d.HashStore()
        )
        self._losses: list[Tensor] = []
        self._good: list[tuple[Any, Any]] = []
        """Checkpoints that the engine has written while no step was being skipped."""
        self._left = self.policy.locate_seconds or 0.0
        self._key = f"nanproof/deepspeed/{_next_number()}"
        self._must_veto = self._prepare_veto()
        before, after = Hook(self._before_forward), Hook(self._after_forward)
        self._hooks = [
            self._module.register_forward_pre_hook(before, with_kwargs=True),
            self._module.register_forward_hook(after),
        ]
        self._patches = ObjectPatches()
        self._patches.put(engine, "backward", self._wrap_backward)
        self._patches.put(engine, "step", self._wrap_step)
        self._patches.put(engine, "save_checkpoint", self._wrap_save)

    @property
    def run_dir(self) -> Path | None:
        return self.run.path

    def summary(self) -> str:
        """What happened so far, in a few lines."""
        return self.run.summary()

    def close(self) -> None:
        """Leave the engine as it was and write what is waiting."""
        if not self.open:
            return
        self.open = False
        self._patches.undo()
        for hook in self._hooks:
            hook.remove()
        for observer in self.run.observers:
            observer.closed()
        self.run.close()

    # --- what the loop does -----------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        with self.surviving("watching a forward pass"):
            named = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
            given = named if kwargs else args[0] if len(args) == 1 else args
            self._pass = Pass(inputs=given, capture=ForwardCapture())
            self._pass.capture.before(module, args, kwargs)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._pass is not None and module.training and torch.is_grad_enabled():
            with self.surviving("watching a forward pass"):
                self._pass.capture.after(module, output)

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            with self.surviving("reading a loss"):
                if isinstance(loss, Tensor) and loss.numel() == 1:
                    self._losses.append(loss.detach())
                    if self._culprit is None and not is_finite(loss.detach()):
                        self._note_culprit()
            return original(loss, *args, **kwargs)

        return backward

    def _wrap_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
            saved = original(save_dir, tag, *args, **kwargs)
            if not self._history.consecutive:
                self._good.append((save_dir, tag if tag is not None else f"global_step{self._engine.global_steps}"))
            return saved

        return save_checkpoint

    def _wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            engine = self._engine
            steps, skipped, start = engine.global_steps, engine.skipped_steps, time.monotonic()
            with self._veto() if self._must_veto else nullcontext():
                result = original(*args, **kwargs)
            if engine.global_steps > steps:  # else: between the micro-batches of one update
                self._judge(engine.skipped_steps > skipped, time.monotonic() - start)
            return result

        return step

    # --- one step ---------------------------------------------------------------------------------------------

    def _judge(self, skipped: bool, seconds: float) -> None:
        """The engine has made its step, or not; all ranks know which, and come to the same answer."""
        number = self.tally.steps + 1
        verdict, action = Verdict(kind="ok", step=number), Action(kind="commit")
        reading = Reading.unread(number)
        with self.surviving("judging a step"):
            reading = self._read(number, seconds)
            if skipped:
                verdict = self._verdict(number)
                action = self._decide(verdict)
                self._tell_skip(verdict, action)
        if verdict.kind != "overflow":  # the search for a loss scale is no reason to go back
            self._history = self._history.after(action, number, self.policy)
        self.tally.updates += not skipped
        self._count_streak(skipped)
        self._losses.clear()
        self._pass = self._culprit = self._location = None
        if action.kind == "stop":
            self._stop(verdict, action, reading)
        self.tally.count(verdict, action)
        self._end_step(reading, verdict, action)
        if action.kind == "restore":
            self._restore()

    def _end_step(self, reading: Reading, verdict: Verdict, action: Action) -> None:
        with self.surviving("writing the log"):
            for observer in self.run.observers:
                observer.step_ended(reading, verdict, action, self.tally.updates)

    def _read(self, number: int, seconds: float) -> Reading:
        engine = self._engine
        loss = float(torch.stack(self._losses).float().mean()) if self._losses else math.nan
        norm, scale = engine.get_global_grad_norm(), None
        if engine.fp16_enabled():
            scale = float(engine.optimizer.cur_scale if hasattr(engine.optimizer, "cur_scale") else math.nan)
        return Reading(
            step=number,
            loss=loss,
            grad_norm=float(norm) if norm is not None else math.nan,
            lr=float(engine.get_lr()[0]),
            scale=scale,
            seconds=seconds,
        )

    def _verdict(self, number: int) -> Verdict:
        """What a skipped step was: whose loss was bad, or the loss scale's ordinary search."""
        rank, _, level = self._ask(number, "who").partition(" ")
        if rank:
            return Verdict(kind="nonfinite", step=number, level="input" if level == "input" else "loss", rank=int(rank))
        if self._engine.fp16_enabled():
            return Verdict(kind="overflow", step=number, level="gradient", origin="scale")
        return Verdict(kind="nonfinite", step=number, level="gradient")

    def _decide(self, verdict: Verdict) -> Action:
        if verdict.kind == "overflow":
            self.tally.overflows += 1
            return Action(kind="skip", reason="DeepSpeed looks for a loss scale")
        action = decide(verdict, self._history, self.policy, Recoveries(checkpoint=bool(self._good)))
        if action.kind == "commit":  # the policy only observes, and DeepSpeed skips all the same
            return Action(kind="skip", reason="DeepSpeed skipped it")
        return action

    def _tell_skip(self, verdict: Verdict, action: Action) -> None:
        """Record a skipped step, with what this rank or the culprit's knows about it."""
        if verdict.kind == "overflow":
            return
        mine = verdict.rank == self.rank
        elsewhere = f"rank {verdict.rank}: {self._ask(verdict.step, 'text')}" if verdict.rank is not None else ""
        count = f"{self._engine.skipped_steps:,} of {self._engine.global_steps:,} steps"
        self.run.incident(
            verdict,
            action,
            culprit=self._culprit if mine else None,
            location=self._location if mine else None,
            elsewhere="" if mine else elsewhere,
            notes=[f"DeepSpeed has skipped {count}"],
        )

    def _count_streak(self, skipped: bool) -> None:
        """Say when no step has been applied for a while: the loss that is logged may look healthy all the same."""
        self._streak = self._streak + 1 if skipped else 0
        if self.rank == 0 and (self._streak in (10, 100) or (self._streak and self._streak % 1000 == 0)):
            log.error(
                "nanproof: DeepSpeed has skipped the last %d steps: no parameter has moved since update %d, even if the"
                " loss looks healthy",
                self._streak,
                self.tally.updates,
            )

    def _locate(self, culprit: Pass) -> Location | None:
        """The operation, by a forward pass over the module's inputs; sharded weights would have to be gathered."""
        play, start = culprit.capture.forward_only(), time.monotonic()
        if play is None or self._left <= 0 or self._engine.zero_optimization_partition_weights():
            return None
        try:
            found = locate(play, model=self._module, batch=culprit.batch, verify=False)
        except Exception as error:
            log.warning("nanproof: the bad step could not be located: %s: %s", type(error).__name__, error)
            return None
        finally:
            self._left -= time.monotonic() - start
        return found if found.reproduced else None

    # --- the ladder -------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        folder, tag = self._good[-1]
        log.warning("nanproof: restoring %s of %s, the last checkpoint before the bad steps", tag, folder)
        self._engine.load_checkpoint(folder, tag=tag)
        self.tally.go_back_to(self._engine.global_steps - self._engine.skipped_steps)

    def _stop(self, verdict: Verdict, action: Action, reading: Reading) -> None:
        self.tally.count(verdict, action)
        self._end_step(reading, verdict, action)
        stopped = GuardStop(
            f"training was stopped at {verdict}: {action.reason}", hint=f"nanproof diagnose {self.run.path or '.'}"
        )
        log.error("nanproof: GuardStop, exit code %d: %s", GuardStop.exit_code, stopped)
        self.close()
        raise stopped

    # --- where DeepSpeed does not look ------------------------------------------------------------------------

    def _prepare_veto(self) -> bool:
        """Whether steps must be vetoed here; where DeepSpeed can check but was told not to, it is told to."""
        if self.policy.mode == "observe":
            return False
        optimizer = self._engine.optimizer
        by_norm = getattr(optimizer, "compute_grad_norm", False) and optimizer.dtype != torch.bfloat16
        if getattr(optimizer, "check_grad_overflow", True) is False and not by_norm:
            optimizer.check_grad_overflow = True
            log.warning("nanproof: check_grad_overflow is on: without it DeepSpeed steps with non-finite gradients")
        return isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "overflow")

    @contextmanager
    def _veto(self) -> Iterator[None]:
        """A plain optimizer inside the engine: leave a bad step out in the way that DeepSpeed's own optimizers do.

        Gradients are reduced by now and the same on every rank, so every rank vetoes, or none does.
        """
        optimizer = self._engine.optimizer
        boundary = self._engine.is_gradient_accumulation_boundary()
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not boundary or all(is_finite(g) for g in grads):
            yield
            return
        replaced = vars(optimizer).get("step")
        optimizer.overflow, optimizer.step = True, lambda *_, **__: None
        try:
            yield
        finally:
            del optimizer.overflow, optimizer.step
            if replaced is not None:
                optimizer.step = replaced

    # --- notes between ranks ----------------------------------------------------------------------------------

    def _note_culprit(self) -> None:
        """This rank's loss is bad: say so before the step; the first of several ranks is the culprit."""
        number, self._culprit = self.tally.steps + 1, self._pass
        if self._pass is None:
            return
        describe_batch(self._pass, self._data)
        bad = self._pass.has_bad_input
        mine = f"{self.rank} {'input' if bad else 'loss'}"
        if bytes(self._store.compare_set(f"{self._key}/{number}/who", "", mine)).decode() == mine:
            self._location = self._locate(self._pass)
            facts = batch_facts(self._pass.batch)
            said = describe(self._location, self._pass, bad, facts) or "its loss is not finite"
            self._store.set(f"{self._key}/{number}/text", said)

    def _ask(self, number: int, what: str) -> str:
        """A note of the culprit's rank, if there is one; nobody waits for it."""
        key = f"{self._key}/{number}/{what}"
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""

    def _record_failure(self, doing: str, said: str, *, first: bool) -> None:
        self.tally.fail(said)


_guards: weakref.WeakKeyDictionary[Any, EngineGuard] = weakref.WeakKeyDictionary()
_engines = 0


def _next_number() -> int:
    """Counts the engines of this process; all ranks make theirs in the same order."""
    global _engines
    _engines += 1
    return _engines

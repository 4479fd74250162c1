"""The step engine: `begin` opens a step, `judge` decides about it, `finish` accounts for what was done.

    step = engine.begin()
    step.saw(losses, batch)                  # after each forward pass
    decision = engine.judge(step)            # read, judge on all ranks, answer; a bad step is undone
    if decision.go: ...                      # the driver makes the update
    verdict = engine.finish(step, decision, carried_out=decision.go)

Three drivers use it: the guard's own loop (`guard.py`), deferred timing (`deferred.py`) and loops that step by
themselves (`external.py`). Everything here is the guard's own work: whatever it raises is recorded, and training goes
on under the plainest check there is.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..captured import CapturedState
from ..errors import DesyncError, GuardStop
from ..losses import Losses
from ..records import Action, Reading, Verdict
from ..tensors import is_finite
from .answer import Answers
from .context import Context
from .early_warnings import EarlyWarnings
from .heal import Heal
from .judge import judge
from .optimizer_groups import OptimizerGroup
from .options import Watch
from .policy import History
from .ranks import SHARED, PeerFailed, RanksLost
from .readback import Part, Readback, Reader
from .recovery import Recovery
from .repairs import Repairs
from .signals import norms, total_norm
from .step import Decision, OpenStep
from .training import gradients_of
from .update import Hyperparameters
from .window import Limits


class Engine:
    """Judges the steps of one guarded run and lets bad ones be answered: skip, rerun, roll back, restore, stop."""

    def __init__(self, context: Context, *, watch: Watch, heal: Heal = "off") -> None:
        self.context = context
        self.before = CapturedState(context.training.slots, [p for _, p in context.training.unstepped])
        self.repairs = Repairs(context, heal)
        self.healer = self.repairs.healer
        self.recovery = Recovery(context)
        self.backoff = self.recovery.backoff
        self.warnings = EarlyWarnings(context, watch, self.repairs, self.backoff)
        self._answers = Answers(context, self.recovery, self.repairs)
        self._reader = Reader(context.training.device)
        self._hyperparameters = Hyperparameters()
        self._last_scale: float | None = None
        context.taps.listen()

    # --- the three calls --------------------------------------------------------------------------------------

    def begin(
        self, group: OptimizerGroup | None = None, *, before: CapturedState | None = None, capture: bool = True
    ) -> OpenStep:
        """Open a step: remember random states and buffers, so that it can be undone.

        ``group`` are the optimizers that step, by default all; ``before`` is where the state is kept.
        """
        context = self.context
        context.require_running()
        step = OpenStep(
            engine=self,
            group=group or context.groups.all,
            number=context.tally.steps + 1,
            before=before or self.before,
            scaler=context.training.scaler,
            scale=self._last_scale,
            local=context.ranks.uneven,
        )
        if capture:
            with context.surviving("capturing the state before a step"):
                step.before.capture()
        self.next_pass(step)
        return step

    def judge(self, step: OpenStep, *, wait: bool = True) -> Decision:
        """Read the step, judge it together with all ranks, and answer; a step that is not to be made is undone.

        Without ``wait`` the numbers are only sent on their way and the decision is pending: the device's own flag
        decides. Asked again, the answer is the real one.
        """
        self.context.require_running()
        try:
            if step.sent is None:
                self._send(step)
            assert step.sent is not None
            if wait:
                return self._decide(step)
            step.deferred = True
            return Decision(
                verdict=Verdict(kind="pending", step=step.number),
                action=Action(kind="commit"),
                reading=Reading.unread(step.number),
                norm=step.sent.norm,
                good=step.sent.good,
            )
        except DesyncError:
            raise
        except Exception as error:
            return self.fall_back(step, error)
        except BaseException:  # an interrupt while a bad step was examined: leave it undone
            if self.context.stopped is None:
                self.recovery.undo(step)
            raise

    def finish(self, step: OpenStep, decision: Decision, *, carried_out: bool) -> Verdict:
        """Close a step: learn from it if it was made, count it, record it, look for early warnings."""
        if decision.go and not carried_out:
            return decision.verdict  # the loop itself left a good step out: there was no step
        verdict = None
        with self.context.surviving("accounting for a step"):
            verdict = self._account(step, decision)
        return verdict or decision.verdict

    # --- inside a step, called by it --------------------------------------------------------------------------

    def next_pass(self, step: OpenStep) -> None:
        """A forward pass begins: taps and watches start afresh."""
        with self.context.surviving("watching a forward pass"):
            self.context.taps.clear()
            self.context.taps.listen()
            if not step.micro:
                self.warnings.foresight.begin(step.number - 1)

    def see(self, step: OpenStep, losses: Losses, batch: Any, *, announce: bool) -> None:
        """A forward pass has ended; with ``announce`` the other ranks are told, behind the backward pass."""
        with self.context.surviving("reading a loss"):
            step.signals.see(losses)
            step.signals.look(batch, losses.prediction)
        if announce and self.context.ranks.reduced and not step.local:
            with self.context.surviving("telling the other ranks"):
                self._announce(step)

    def abandon(self, step: OpenStep, error: BaseException, state: CapturedState) -> None:
        """The loop raised inside the step: undo what it did and record it; the exception is the loop's own."""
        if isinstance(error, GuardStop):
            return
        self.context.ranks.drop()
        step.announced = False
        self.recovery.undo(step, state=state)
        if isinstance(error, Exception):
            with self.context.surviving("recording an exception"):
                self._answers.answer_exception(step, error)
        else:  # Ctrl-C, sys.exit
            reason = f"{type(error).__name__}: {error}"
            self.context.tell("event", event="interrupted", step=step.number, reason=reason)

    def lowered(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """A block in which an optimizer steps: with an eps that works, and the lower rate after a rollback."""
        with self.context.surviving("checking an update"):
            self.repairs.check_update(optimizer)
        return self.context.around("lowering the learning rate", lambda: self.backoff.on(optimizer))

    def died(self, step: OpenStep, error: BaseException) -> None:
        """The loop ends by an exception after a forward pass of the step."""
        self._answers.answer_death(step, error)

    # --- reading ----------------------------------------------------------------------------------------------

    def _announce(self, step: OpenStep, norm: Tensor | None = None, *, failed: bool = False) -> None:
        """Tell the other ranks of this step; one that fails takes part all the same, so that nobody waits."""
        step.announced = True
        self._look_at_state(step)
        context = self.context
        try:
            flags = self._reader.flags(
                step.signals,
                self._limits(step.group),
                norm=norm,
                state=step.state_is_bad,
                snapshot=context.snapshots.overdue,
                warning=self.warnings.untold is not None,
                failed=failed,
            )
        except Exception as error:
            context.failed("telling the other ranks", error)
            flags = torch.tensor([name == "failed" for name in SHARED])
        context.ranks.start(flags, step.position)

    def _look_at_state(self, step: OpenStep) -> None:
        """Whether the state was found bad, or so many single micro-batches were that their window must go back."""
        context = self.context
        exhausted = not step.micro and context.groups.micro.history.exceeds(context.policy)
        step.state_is_bad = step.state_is_bad or exhausted or context.snapshots.state_is_bad()

    def _send(self, step: OpenStep) -> None:
        """Start everything that the verdict needs on its way to the host."""
        context, ranks = self.context, self.context.ranks
        step.hyperparameters = tuple(self._hyperparameters.check(step.group.optimizers))
        gradients = gradients_of(step.parameters)
        norm, each = norms([g for _, g in gradients]) if step.measure is None else (step.measure(), None)
        gradients = gradients if step.measure is None else []  # those are still scaled
        if beside := gradients_of(step.beside):  # a bad one among them would spread to all in clipping
            norm = torch.where(total_norm([g for _, g in beside]).isfinite(), norm, math.nan)
        if ranks.alone or step.local:
            self._look_at_state(step)
        elif not step.announced:
            self._announce(step, None if ranks.reduced else norm)
        shared = None if step.local else ranks.finish()
        if ranks.detached:
            context.run.go_alone()
        early: list[Part] = [] if step.micro else self.warnings.read(gradients, each)
        rate = float(step.group.optimizers[0].param_groups[0].get("lr", math.nan))
        limits, lr = self._limits(step.group), rate * self.backoff.factor
        step.sent = self._reader.send(step, lr=lr, norm=norm, shared=shared, limits=limits, early=early)

    def _limits(self, group: OptimizerGroup) -> Limits:
        return group.window.limits() if self.context.policy.spikes == "skip" else Limits()

    # --- judging ----------------------------------------------------------------------------------------------

    def _decide(self, step: OpenStep) -> Decision:
        """The decision about a step whose numbers have been sent."""
        context, ranks = self.context, self.context.ranks
        assert step.sent is not None
        seen = self._reader.receive(step.sent, ranks.world, wait=not step.deferred)
        if "apart" in seen.shared:
            ranks.raise_apart()
        if "failed" in seen.shared:
            raise PeerFailed(f"the guard failed on rank {seen.rank}")
        step.snapshot_agreed = "snapshot" in seen.shared
        if "warning" in seen.shared:  # all ranks know it, so all of them come here
            step.warned = self.warnings.hear(seen.shared["warning"])
        nothing_shared = ranks.alone or step.local or ranks.share == "gradients"
        if "state" in seen.shared or (step.state_is_bad and nothing_shared):
            diverged = self.healer.diverged and not context.training.nonfinite()
            diverged = diverged if nothing_shared else ranks.any(diverged)
            answered = self._answers.answer_state(step, diverged=diverged)
            if not answered.go:
                return answered
        if step.empty:
            verdict = Verdict(kind="nonfinite", step=step.number, level="loss")
            action = Action(kind="skip", reason="every micro-batch of the window was left out")
            return Decision(verdict=verdict, action=action, reading=Reading.unread(step.number), scale=step.scale)
        verdict = self._verdict(step, seen)
        if not step.signals.losses:  # a loop that makes its gradients in another way: its loss is not known
            seen = dataclasses.replace(seen, reading=dataclasses.replace(seen.reading, loss=math.nan))
        if verdict.ok:
            if not step.local and self.healer.is_steep(seen.reading.grad_norm):
                self.recovery.lower_rate(step.number, seen.reading.grad_norm)
            return Decision(
                verdict=verdict,
                action=Action(kind="commit"),
                reading=seen.reading,
                norm=seen.reading.grad_norm,
                early=seen.early,
            )
        answer = self._answers.answer_deferred if step.deferred else self._answers.answer
        return answer(step, seen, verdict)

    def _verdict(self, step: OpenStep, seen: Readback) -> Verdict:
        """The verdict, the same on every rank."""
        scale = seen.reading.scale
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            step.hyperparameters = (*step.hyperparameters, "loss scale")
        elif scale is not None:
            self._last_scale = step.scale = scale
        if step.hyperparameters:
            return Verdict(kind="nonfinite", step=step.number, level="hyperparameter", names=step.hyperparameters)
        if step.broken:
            return Verdict(kind="exception", step=step.number, names=(step.broken,))
        verdict = judge(seen.reading, seen.limits)
        if "spike" in seen.shared and verdict.kind in ("ok", "spike"):
            verdict = Verdict(kind="spike", step=verdict.step, level="gradient")  # of some rank's own gradients
        ranks = self.context.ranks
        if not verdict.ok and not ranks.alone and verdict.level in ("input", "prediction", "loss", "gradient"):
            mine = seen.rank in (None, ranks.rank)
            verdict = dataclasses.replace(verdict, rank=seen.rank, value=verdict.value if mine else None)
        return verdict

    def fall_back(self, step: OpenStep, error: Exception) -> Decision:
        """Judging failed: the plainest check there is, on this rank's own gradients."""
        context, ranks = self.context, self.context.ranks
        shards = ranks.sharded and not ranks.alone
        verdict = context.failure(context.failed("judging a step", error))
        told = isinstance(error, PeerFailed | RanksLost) or step.local
        bad = False
        try:
            if not told and step.sent is None and not ranks.alone:  # the others wait for this rank's flags
                told = True
                if not step.announced:
                    self._announce(step, failed=True)
                ranks.finish()
            bad = not all(is_finite(g) for _, g in gradients_of([*step.parameters, *step.beside]))
            if bad and not told:
                ranks.fail()  # the others are examining this step: they must do as we do
        except Exception as second:
            context.failed("the plainest check", second)
        if context.policy.mode == "observe" or shards:
            bad = False  # shards disagree: a veto of one rank would split the model
        action = Action(kind="skip" if bad else "commit", reason="the guard itself failed; only finiteness was checked")
        if bad:
            with context.surviving("undoing a step"):
                self.recovery.undo(step)
        return Decision(verdict=verdict, action=action, reading=Reading.unread(step.number), scale=step.scale)

    # --- accounting -------------------------------------------------------------------------------------------

    def _account(self, step: OpenStep, decision: Decision) -> Verdict:
        context, verdict, action = self.context, decision.verdict, decision.action
        step.group.history = step.group.history.after(action, step.number, context.policy, step.data)
        if decision.go:
            with context.surviving("learning what is normal"):
                step.group.window.add(loss=decision.reading.loss, grad_norm=decision.reading.grad_norm)
            self.repairs.follow(step, verdict, decision.reading)
        if step.micro:
            context.tally.dropped += not decision.go
            return verdict
        context.tally.count(verdict, action)
        if not verdict.ok and not step.local:
            context.ranks.note(verdict.kind, action.kind, str(step.number))
        if not decision.go and action.kind != "skip":
            context.groups.micro.history = History()
        if decision.go:
            self._account_update(step)
        reading, early, warning = self.warnings.look(step, decision)
        context.tell("step_ended", reading, verdict, action, context.tally.updates)
        if step.warned is not None:
            self.warnings.answer(step.warned, together=True)
        if (own := self.warnings.share(early, step)) is not None:
            self.warnings.answer(own, together=context.ranks.alone)
        return warning or verdict

    def _account_update(self, step: OpenStep) -> None:
        context = self.context
        context.tally.updates += 1
        self.backoff.advance()
        with context.surviving("remembering learning rates"):
            self._hyperparameters.remember(step.group.optimizers)  # as the schedule has set them for the next step
        late = context.snapshots.overdue if context.ranks.alone else step.snapshot_agreed
        if late or context.snapshots.due(context.tally.updates):
            with context.surviving("taking a snapshot"):
                context.snapshots.take(context.tally.steps, context.tally.updates)

    # --- between steps ----------------------------------------------------------------------------------------

    def check_state(self) -> Verdict:
        """Look at every parameter, buffer and moment now, and answer if one is bad."""
        context = self.context
        context.require_running()
        if not context.ranks.any(bool(context.training.nonfinite())):
            return Verdict(kind="ok", step=context.tally.steps)
        step = self.begin(capture=False)
        decision = self._answers.answer_state(step)
        if not decision.go:
            context.tally.count(decision.verdict, decision.action, step=False)
            step.group.history = step.group.history.after(decision.action, step.number, context.policy)
            context.ranks.note(decision.verdict.kind, decision.action.kind, str(step.number))
        return decision.verdict

    def state_dict(self) -> dict[str, Any]:
        return {
            "tally": self.context.tally.state_dict(),
            "groups": self.context.groups.state_dict(),
            "backoff": self.backoff.state_dict(),
            "repairs": self.healer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.context.tally.load_state_dict(state["tally"])
        self.context.groups.load_state_dict(state["groups"])
        self.backoff.load_state_dict(state["backoff"])
        self.healer.load_state_dict(state.get("repairs", []))

    def close(self) -> None:
        context = self.context
        for part in (self.warnings.foresight.close, context.taps.stop, context.ranks.close, context.end):
            with context.surviving("closing the run"):
                part()

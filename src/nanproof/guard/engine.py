"""The step engine: `begin` opens a step, `judge` decides about it, `finish` accounts for what was done.

    step = engine.begin()
    step.saw(losses, batch)                  # after each forward pass
    decision = engine.judge(step)            # read, judge on all ranks, examine, answer; a bad step is undone
    if decision.go: ...                      # the driver makes the update
    verdict = engine.finish(step, decision, carried_out=decision.go)

Three drivers use it and touch nothing else of it: the guard's own loop (`guard.py`), deferred timing
(`deferred.py`) and loops that step by themselves (`external.py`). Everything here is the guard's own work: whatever
it raises is recorded, and training goes on under the plainest check there is.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..captured import CapturedState
from ..errors import DesyncError, GuardStop
from ..forecast import EarlyWarning
from ..locating import Location
from ..locating.collectives import no_collectives
from ..losses import Losses
from ..records import Action, Incident, Level, Origin, Reading, TensorFacts, Verdict
from ..rng import random_states, set_random_states
from ..tensors import facts_of, is_finite, tensors_in
from ..text import clean_record
from .auto_locate import AutoLocate
from .checkpoints import Checkpoints
from .examine import Rerun, backed_off, is_ordinary_overflow, look_closely, second_reading
from .exceptions import at_exception, nonfinite_locals, where_raised
from .foresight import Foresight
from .forward_capture import ForwardCapture, differentiable, without_autocast
from .heal import DIVERGED_AFTER, Heal, Healer, Healing, too_small
from .heal_replay import ModelReplay, Replay, StepReplay, as_it_was
from .hooks import Hook
from .judge import Trends, judge
from .motion import Motion
from .observers import Observer
from .optimizer_groups import OptimizerGroup, OptimizerGroups
from .policy import History, Policy, Recoveries, decide
from .ranks import SHARED, PeerFailed, Ranks, RanksLost
from .readback import Readback, Reader
from .rows import rank_rows
from .rundir import RunDir, describe
from .signals import total_norm
from .snapshots import Snapshot, Snapshots
from .step import Decision, OpenStep, Pass
from .taps import Taps
from .training import Training, gradients_of, scale_of
from .update import Backoff, Hyperparameters
from .window import Limits

log = logging.getLogger("nanproof")
log.addFilter(clean_record)  # names of modules and parameters come from anywhere, and go to any handler


class Engine:
    """Judges steps and answers bad ones: skip, rerun, roll back, restore, stop."""

    def __init__(
        self,
        training: Training,
        *,
        policy: Policy,
        ranks: Ranks,
        run: RunDir,
        checkpoints: Checkpoints,
        foresight: Foresight,
        motion: Motion,
        trends: Trends,
        loss_weights: Mapping[str, float],
        heal: Heal = "off",
        own_rates: bool = False,
    ) -> None:
        """``own_rates``: the loop may set learning rates itself, so that a rollback leaves those without a schedule."""
        self.training, self.policy, self.ranks, self.run = training, policy, ranks, run
        self.checkpoints, self.loss_weights = checkpoints, loss_weights
        self.groups = OptimizerGroups(training, policy.spike_window)
        self.snapshots = Snapshots(training, policy.snapshot_every, policy.snapshot_seconds)
        self.backoff = Backoff()
        self.before = CapturedState(training.slots)
        self.tally = run.tally
        self.stopped: GuardStop | None = None
        self._own_rates = own_rates
        self._reader = Reader(training.device)
        self._taps = Taps()
        self._foresight, self._motion, self._trends = foresight, motion, trends
        self._hyperparameters = Hyperparameters()
        seconds = policy.locate_seconds
        self._locate = AutoLocate(training, seconds=seconds, weights=loss_weights) if seconds else None
        self.healer = Healer(training, ranks, mode=heal, seconds=policy.heal_seconds)
        self._failed_parts: set[str] = set()
        self._last_scale: float | None = None
        self._nobody = Ranks(training.model, device=training.device, share="nothing", deadline=policy.deadline)
        self._taps.listen()
        if heal == "open":
            with self.surviving("opening the repairs of an earlier run"):
                self.healer.reopen(run.read_repairs())

    # --- the three calls --------------------------------------------------------------------------------------

    def begin(
        self, group: OptimizerGroup | None = None, *, before: CapturedState | None = None, capture: bool = True
    ) -> OpenStep:
        """Open a step: remember random states and buffers, so that it can be undone.

        ``group`` are the optimizers that step, by default all; ``before`` is where the state is kept.
        """
        self.require_running()
        step = OpenStep(
            engine=self,
            group=group or self.groups.all,
            number=self.tally.steps + 1,
            before=before or self.before,
            scaler=self.training.scaler,
            local=self.ranks.uneven,
        )
        if capture:
            with self.surviving("capturing the state before a step"):
                step.before.capture()
        self.watch_pass(step)
        return step

    def judge(self, step: OpenStep, *, wait: bool = True) -> Decision:
        """Read the step, judge it together with all ranks, and answer; a step that is not to be made is undone.

        Without ``wait`` the numbers are only sent on their way and the decision is pending: the device's own flag
        decides. Asked again, the answer is the real one.
        """
        self.require_running()
        try:
            if step.sent is None:
                self._send(step)
            assert step.sent is not None
            if not wait:
                step.deferred = True
                return Decision(
                    verdict=Verdict(kind="pending", step=step.number),
                    action=Action(kind="commit"),
                    reading=self._no_reading(step.number),
                    norm=step.sent.norm,
                    good=step.sent.good,
                )
            return self._answer(step)
        except DesyncError:
            raise
        except Exception as error:
            return self.fall_back(step, error)
        except BaseException:  # an interrupt while a bad step was examined: leave it undone
            if self.stopped is None:
                self._undo(step)
            raise

    def finish(self, step: OpenStep, decision: Decision, *, carried_out: bool) -> Verdict:
        """Close a step: learn from it if it was made, count it, record it, look for early warnings."""
        if decision.go and not carried_out:
            return decision.verdict  # the loop itself left a good step out: there was no step
        verdict = None
        with self.surviving("accounting for a step"):
            verdict = self._account(step, decision)
        return verdict or decision.verdict

    def _account(self, step: OpenStep, decision: Decision) -> Verdict:
        verdict, action, reading = decision.verdict, decision.action, decision.reading
        step.group.history = step.group.history.after(action, step.number, self.policy, step.data)
        if decision.go:
            with self.surviving("learning what is normal"):
                step.group.window.add(loss=reading.loss, grad_norm=reading.grad_norm)
            with self.surviving("following repairs"):
                if self.healer.follow(step.number, reading.loss):
                    self.snapshots.suspect()
            if verdict.ok:
                with self.surviving("keeping a good batch"):
                    self.healer.remember(step)
        if step.micro:
            self.tally.dropped += not decision.go
            return verdict
        self.tally.count(verdict, action)
        if not verdict.ok and not step.local:
            self.ranks.note(verdict.kind, action.kind, str(step.number))
        if not decision.go and action.kind != "skip":
            self.groups.micro.history = History()
        warning = None
        if decision.go:
            self.tally.updates += 1
            self.backoff.advance()
            with self.surviving("remembering learning rates"):
                self._hyperparameters.remember(step.group.optimizers)  # as the schedule has set them for the next step
            late = self.snapshots.overdue if self.ranks.alone else step.snapshot_agreed
            if late or self.snapshots.due(self.tally.updates):
                with self.surviving("taking a snapshot"):
                    self.snapshots.take(self.tally.steps, self.tally.updates)
            with self.surviving("looking for early warnings"):
                warning = self._warning(step, decision)
        early = None
        with self.surviving("forecasting"):
            reading, early = self._foresight.forecast(reading, decision.signals)
        self._tell("step_ended", reading, verdict, action, self.tally.updates)
        if early is not None:
            self._answer_warning(early)
        return warning or verdict

    # --- what the loop does inside a step ----------------------------------------------------------------------

    def watch_pass(self, step: OpenStep) -> None:
        """A forward pass begins: taps and watches start afresh."""
        with self.surviving("watching a forward pass"):
            self._taps.clear()
            self._taps.listen()
            if not step.micro:
                self._foresight.begin(step.number - 1)

    def see(self, step: OpenStep, losses: Losses, batch: Any, *, announce: bool) -> None:
        """A forward pass has ended; with ``announce`` the other ranks are told, behind the backward pass."""
        with self.surviving("reading a loss"):
            step.signals.see(losses)
            step.signals.look(batch, losses.prediction)
        if announce and self.ranks.reduced and not step.local:
            with self.surviving("telling the other ranks"):
                self._announce(step)

    def before_call(self) -> None:
        """The model is about to be called by a loop that cannot be run again."""
        if self.healer.live:
            with self.surviving("capturing the state before a forward pass"):
                self.healer.before_pass.capture()

    def heal_call(self, step: OpenStep, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The model was called by such a loop: a bad output is healed before the loop goes on with it.

        Returns the output of the call, run again with the repair; else ``output`` itself.
        """
        before = self.healer.before_pass
        if not self.healer.live or not before.taken:
            before.forget()
            return output
        healed = [output]
        with self.surviving("healing a forward pass"):
            if all(map(is_finite, differentiable(output))):
                before.forget()
                return output
            replay = ModelReplay(
                ForwardCapture.of(module, args, kwargs, output).step(probe=True) or (lambda: output),
                before.restore,
                (args, kwargs),
                self.training,
                self.ranks,
            )
            self._taps.mute()
            with as_it_was(self.training.slots), without_autocast():
                healing = self.healer.heal_pass(step.number, replay)
            if healing is not None and healing.opened:
                self._account_healed(step, healing)
                before.restore()
                self._keep_for_healing()
                self.watch_pass(step)
                healed.append(module(*args, **kwargs))
        before.forget()
        return healed[-1]

    def _account_healed(self, step: OpenStep, healing: Healing) -> None:
        verdict = Verdict(kind="nonfinite", step=step.number, level="prediction", origin="range")
        reason = f"{healing.reason.split(' from now')[0]}: run again, the forward pass is finite"
        action = Action(kind="heal", reason=reason)
        self.tally.count(verdict, action, step=False)
        if step.name_batch is not None and step.passes:
            step.name_batch(step.passes[-1])
        culprit = step.passes[-1] if step.passes else None
        self._record(step, verdict, action, culprit=culprit, location=healing.location)
        self._tell_repairs(healing)

    def _keep_for_healing(self) -> None:
        """The state in which an island was opened, to come back to if the run diverges with it."""
        if self.healer.calm:
            with self.surviving("taking a snapshot of a healed run"):
                self.snapshots.take_streak(self.tally.steps, self.tally.updates)

    def _tell_repairs(self, healing: Healing) -> None:
        if not healing.opened:
            return
        for repair in healing.repairs:
            self._tell_event(event="repair", **repair.to_json())
        self.run.write_repairs(self.healer.repairs)

    def abandon(self, step: OpenStep, error: BaseException, state: CapturedState) -> None:
        """The loop raised inside the step: undo what it did and record it; the exception is the loop's own."""
        if isinstance(error, GuardStop):
            return
        self.ranks.drop()
        step.announced = False
        self._undo(step, state=state)
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            self._tell_event(event="interrupted", step=step.number, reason=said)
            return
        self.tally.abandoned += 1
        verdict = Verdict(kind="exception", step=step.number, names=(said[:500],))
        action = Action(kind="skip", reason="the step raised; everything is as if its batch had never come")
        bad = nonfinite_locals(error)
        self._record(
            step,
            verdict,
            action,
            culprit=step.passes[-1] if step.passes else None,
            facts=[facts_of(name, t) for name, t in bad[:4]],
            location=where_raised(error, bad),
        )

    def died(self, step: OpenStep, error: BaseException) -> None:
        """The loop ends by an exception after a forward pass: an incident, if that pass or its data is not finite."""
        culprit, bad = step.passes[-1], nonfinite_locals(error)
        if not bad and not culprit.has_bad_input:
            return
        level: Level = "input" if culprit.has_bad_input else "loss" if bad[0][1].ndim == 0 else "prediction"
        self.tally.abandoned += 1
        verdict = Verdict(
            kind="exception", step=step.number, level=level, names=(f"{type(error).__name__}: {error}"[:500],)
        )
        self.tally.kinds[f"exception, nonfinite {level}"] += 1
        location = None
        if self._locate is not None and not self.ranks.sharded:
            with self.surviving(f"locating step {step.number}"), no_collectives(self.training.model):
                location = self._locate.find(step, verdict, culprit, self._nobody)
        self._record(
            step,
            verdict,
            Action(kind="skip", reason="the script ended by itself; the step was not made"),
            culprit=culprit,
            facts=[facts_of(name, t) for name, t in bad[:4]],
            location=at_exception(location, where_raised(error, bad)),
        )
        self._undo(step)

    def block(self, path: Any, what: str, *, suspect: bool) -> None:
        """A save was not carried out, because what it would have saved is bad.

        With ``suspect`` the next step answers for the state; several ranks must be of one mind there.
        """
        self.tally.blocked.append(f"{path}: {what}")
        self._tell_event(event="save-blocked", path=str(path), reason=what)
        if suspect:
            self.snapshots.suspect()
        log.error("nanproof: did not save %s: %s", path, what)

    def check_state(self) -> Verdict:
        """Look at every parameter, buffer and moment now, and answer if one is bad."""
        self.require_running()
        if not self.ranks.any(bool(self.training.nonfinite())):
            return Verdict(kind="ok", step=self.tally.steps)
        step = self.begin(capture=False)
        decision = self._answer_state(step)
        if not decision.go:
            self.tally.count(decision.verdict, decision.action, step=False)
            step.group.history = step.group.history.after(decision.action, step.number, self.policy)
            self.ranks.note(decision.verdict.kind, decision.action.kind, str(step.number))
        return decision.verdict

    # --- reading ----------------------------------------------------------------------------------------------

    def _announce(self, step: OpenStep, norm: Tensor | None = None, *, failed: bool = False) -> None:
        """Tell the other ranks of this step; one that fails takes part all the same, so that nobody waits."""
        step.announced = True
        step.state_is_bad = step.state_is_bad or self.snapshots.state_is_bad()
        signals, limits = step.signals, self._limits(step.group)
        try:
            flags = self._reader.flags(
                signals,
                limits,
                norm=norm,
                state=step.state_is_bad,
                snapshot=self.snapshots.overdue,
                failed=failed,
            )
        except Exception as error:
            self._failed("telling the other ranks", error)
            flags = torch.tensor([name == "failed" for name in SHARED])
        self.ranks.start(flags, step.position)

    def _send(self, step: OpenStep) -> None:
        """Start everything that the verdict needs on its way to the host."""
        t = self.training
        step.hyperparameters = tuple(self._hyperparameters.check(step.group.optimizers))
        scale = scale_of(step.scaler, t.device)
        norm = step.measure() if step.measure is not None else total_norm([g for _, g in gradients_of(step.parameters)])
        if self.ranks.alone or step.local:
            step.state_is_bad = step.state_is_bad or self.snapshots.state_is_bad()
        elif not step.announced:
            self._announce(step, None if self.ranks.reduced else norm)
        shared = None if step.local else self.ranks.finish()
        if self.ranks.detached:
            self.run.go_alone()
        scaled = step.measure is not None and step.scaler is not None
        early = ([], []) if step.micro else self._foresight.read(gradients=not scaled)
        moved = None if step.micro else self._motion.look(self.tally.updates)
        step.sent = self._reader.send(
            step.signals,
            step=step.number,
            lr=self._rate(step) * self.backoff.factor,
            norm=norm,
            shared=shared,
            scale=scale,
            limits=self._limits(step.group),
            divided=step.divided,
            moved=moved,
            early=early,
        )

    def _limits(self, group: OptimizerGroup) -> Limits:
        return group.window.limits() if self.policy.spikes == "skip" else Limits()

    def _rate(self, step: OpenStep) -> float:
        return float(step.group.optimizers[0].param_groups[0].get("lr", math.nan))

    def _no_reading(self, step: int) -> Reading:
        return Reading(step=step, loss=math.nan, grad_norm=math.nan, lr=math.nan)

    # --- judging and answering --------------------------------------------------------------------------------

    def _answer(self, step: OpenStep) -> Decision:
        assert step.sent is not None
        read = self._reader.later if step.deferred else self._reader.now
        seen = read(step.sent, self.ranks.world)
        if "apart" in seen.shared:
            self.ranks.raise_apart()
        if "failed" in seen.shared:
            raise PeerFailed(f"the guard failed on rank {seen.rank}")
        step.snapshot_agreed = "snapshot" in seen.shared
        nothing_shared = self.ranks.alone or step.local or self.ranks.share == "gradients"
        if "state" in seen.shared or (step.state_is_bad and nothing_shared):
            diverged = self.healer.diverged and not self.training.nonfinite()
            diverged = diverged if nothing_shared else self.ranks.any(diverged)
            answered = self._answer_state(step, diverged=diverged)
            if not answered.go:
                return answered
        if step.empty:
            verdict = Verdict(kind="nonfinite", step=step.number, level="loss")
            action = Action(kind="skip", reason="every micro-batch of the window was left out")
            return Decision(
                verdict=verdict, action=action, reading=self._no_reading(step.number), scale=self._last_scale
            )
        if not step.signals.losses:  # a loop that makes its gradients in another way: its loss is not known
            seen = dataclasses.replace(seen, reading=dataclasses.replace(seen.reading, loss=math.nan))
        verdict = self._verdict(step, seen)
        if verdict.ok:
            return Decision(
                verdict=verdict,
                action=Action(kind="commit"),
                reading=seen.reading,
                norm=seen.reading.grad_norm,
                signals=seen.signals,
                moved=seen.moved,
            )
        if step.deferred:
            return self._answer_deferred(step, seen, verdict)
        return self._answer_bad(step, seen, verdict)

    def _verdict(self, step: OpenStep, seen: Readback) -> Verdict:
        """The verdict, the same on every rank."""
        scale = seen.reading.scale
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            step.hyperparameters = (*step.hyperparameters, "loss scale")
        elif scale is not None:
            self._last_scale = scale
        if step.hyperparameters:
            return Verdict(kind="nonfinite", step=step.number, level="hyperparameter", names=step.hyperparameters)
        if step.broken:
            return Verdict(kind="exception", step=step.number, names=(step.broken,))
        reading = seen.reading
        if not step.signals.losses:
            reading = dataclasses.replace(reading, loss=0.0)
        verdict = judge(reading, seen.limits)
        if "spike" in seen.shared and verdict.kind in ("ok", "spike"):
            verdict = Verdict(kind="spike", step=verdict.step, level="gradient")  # of some rank's own gradients
        if not verdict.ok and not self.ranks.alone and verdict.level in ("input", "prediction", "loss", "gradient"):
            mine = seen.rank in (None, self.ranks.rank)
            verdict = dataclasses.replace(verdict, rank=seen.rank, value=verdict.value if mine else None)
        return verdict

    def _answer_deferred(self, step: OpenStep, seen: Readback, verdict: Verdict) -> Decision:
        """A bad step that the device has vetoed by itself, one step ago: its state is gone, so nothing is replayed."""
        action = self._decide(step, verdict)
        if action.kind == "commit":
            action = Action(kind="skip", reason=action.reason)
        self._record(step, verdict, action)
        if action.kind != "skip":
            self._go_back(verdict, action)
        return Decision(verdict=verdict, action=action, reading=seen.reading)

    def _answer_bad(self, step: OpenStep, seen: Readback, verdict: Verdict) -> Decision:
        """A bad step: look closely, run it again if that can tell something, decide, record, undo."""
        now = random_states()
        self._taps.mute()
        self._tell("examining", True)
        try:
            return self._examine(step, seen, verdict, now)
        finally:
            self._tell("examining", False)

    def _examine(self, step: OpenStep, seen: Readback, verdict: Verdict, now: Mapping[str, Any]) -> Decision:
        reading, ranks = seen.reading, self._ranks_of(step)
        culprit = step.culprit(reading.bad)
        if culprit is not None and culprit.random and step.before.taken and culprit.closure is None:
            step.before.random.update(culprit.random)  # an external loop: the pass to blame may not be the first
        facts: Sequence[TensorFacts] = ()
        rerun: Rerun | None = None
        if verdict.kind != "exception" and not step.hyperparameters:
            verdict, facts = look_closely(step, verdict, ranks)
        if verdict.kind in ("nonfinite", "overflow") and self.policy.mode != "observe" and not step.hyperparameters:
            rerun, origin = self._rerun(step)
            rank = verdict.rank if verdict.rank is not None or rerun is None else rerun.culprit
            verdict = dataclasses.replace(verdict, origin=origin, rank=rank)
            if is_ordinary_overflow(step, reading, origin, self.policy.min_scale, ranks):
                return self._lower_scale(step, verdict, reading)
        action = self._decide(step, verdict)
        location = self._find(step, verdict, action, culprit)
        healing = self._heal(step, verdict, action, culprit, location, rerun)
        if healing is not None:
            action = self._decide(step, verdict, healing)
            self._tell_repairs(healing)
            if healing.opened:
                self._keep_for_healing()
        if action.kind in ("rerun", "heal") and rerun is not None:
            loss, norm = second_reading(rerun, step, self.training, len(step.passes))
            reading = dataclasses.replace(reading, loss=loss, grad_norm=norm, bad=(), components={})
        self._record(
            step,
            verdict,
            action,
            facts=facts,
            culprit=culprit,
            location=location if location is not None or healing is None else healing.location,
            elsewhere=self._ask_culprit(step, verdict, location, culprit, facts),
            notes=self._rows(step, verdict, culprit),
        )
        scale = self._last_scale if step.scaler is not None else None
        decision = Decision(verdict=verdict, action=action, reading=reading, norm=reading.grad_norm, scale=scale)
        if decision.go:
            if verdict.kind == "spike" and self.policy.mode == "protect":
                step.group.window.clear()  # a new level was accepted: learn it
            if action.kind == "commit":
                set_random_states(dict(now))
            return decision
        self._undo(step, now=now, undone=action.kind == "skip")
        if action.kind == "skip" and step.group.history.consecutive == 1 and not step.micro:
            with self.surviving("taking a snapshot of a streak"):  # after the undoing: buffers were bad
                self.snapshots.take_streak(self.tally.steps, self.tally.updates)
        if action.kind != "skip":
            self._go_back(verdict, action)
        return decision

    def _ranks_of(self, step: OpenStep) -> Ranks:
        return self._nobody if step.local else self.ranks

    def _rerun(self, step: OpenStep) -> tuple[Rerun | None, Origin | None]:
        """Learn from a rerun, if there can be one, what kind of bad step this is."""
        if not self.policy.rerun or step.local:
            return None, None
        if self.ranks.any(step.closures is None or not step.before.taken):  # all ranks run it again, or none does
            return None, None
        if step.scaler is not None:
            step.scaler.update(self._last_scale)  # forget its own check: the overflow is judged here
        rerun = Rerun(step, self.training, self.ranks, step.before, self.loss_weights)
        origin: Origin | None = None
        with self._together(f"running step {step.number} again"):
            origin = rerun.classify(older=self.snapshots.older_than(self.tally.updates))
        return rerun, origin

    def _find(self, step: OpenStep, verdict: Verdict, action: Action, culprit: Pass | None) -> Location | None:
        """The operation that broke a step which is not carried out."""
        wanted = verdict.kind in ("nonfinite", "overflow") and action.kind not in ("commit", "rerun")
        if self._locate is None or not wanted or step.local or step.hyperparameters:
            return None
        with self._together(f"locating step {step.number}"):
            older = self.snapshots.older_than(self.tally.updates)
            return self._locate.find(step, verdict, culprit, self.ranks, older)

    def _heal(
        self,
        step: OpenStep,
        verdict: Verdict,
        action: Action,
        culprit: Pass | None,
        location: Location | None,
        rerun: Rerun | None,
    ) -> Healing | None:
        """Search for a repair of a bad step, if precision may be the reason."""
        wanted = verdict.kind in ("nonfinite", "overflow") and action.kind not in ("commit", "rerun")
        state = verdict.level in ("parameter", "buffer") or verdict.origin in ("state", "data")
        if not wanted or state or step.local or step.hyperparameters or self.policy.mode != "protect":
            return None
        if location is not None and location.reproduced and not too_small(location) and self.ranks.alone:
            self.healer.decline(location)
            return None
        replay: Replay | None = None
        if rerun is not None:
            replay = StepReplay(step, rerun, culprit, self.training, self.ranks, self.loss_weights)
        elif culprit is not None and (play := culprit.capture.step(probe=True)) is not None:
            batch = culprit.batch if culprit.inputs is None else culprit.inputs
            restore = step.before.restore if step.before.taken else lambda: None
            replay = ModelReplay(play, restore, batch, self.training, self.ranks)
        self.healer.arm(blind=replay is None)
        with self._together(f"healing step {step.number}"):
            return self.healer.heal(step.number, replay, location)

    def _rows(self, step: OpenStep, verdict: Verdict, culprit: Pass | None) -> list[str]:
        """For a finite spike: the rows of the batch that it comes from."""
        if verdict.kind != "spike" or culprit is None or culprit.closure is None or not step.before.taken:
            return []
        found = ""
        with self.surviving("ranking the rows of a spike"), no_collectives(self.training.model):
            sizes = [t.shape[0] for _, t in tensors_in(culprit.batch) if t.ndim]
            if sizes and len(step.passes) == 1 and not self.ranks.sharded:
                step.before.restore()
                found = rank_rows(culprit.closure.again, sizes[0])
        return [found] if found else []

    def _ask_culprit(
        self,
        step: OpenStep,
        verdict: Verdict,
        location: Location | None,
        culprit: Pass | None,
        facts: Sequence[TensorFacts],
    ) -> str:
        """On several ranks: what the rank that broke the step knows about it, on every rank."""
        if self.ranks.alone or step.local:
            return ""
        rank, said = verdict.rank, ""
        with self._together("asking the culprit's rank"):
            bad_batch = culprit is not None and culprit.has_bad_input
            mine = describe(location, culprit, bad_batch, facts)
            rank = self.ranks.lowest(bool(mine)) if rank is None else rank
            if rank is not None:
                _, said = self.ranks.hear(rank, 0, mine)
        return f"rank {rank}: {said}" if said and rank != self.ranks.rank else ""

    def _lower_scale(self, step: OpenStep, verdict: Verdict, reading: Reading) -> Decision:
        """GradScaler looks for its scale: not an incident. The pass leaves its traces, as without the guard."""
        assert reading.scale is not None
        self.tally.overflows += 1
        return Decision(
            verdict=dataclasses.replace(verdict, kind="overflow", origin="scale"),
            action=Action(kind="skip", reason="the loss scale was too large"),
            reading=reading,
            scale=backed_off(step.scaler, reading.scale, self.policy.min_scale),
        )

    def _answer_state(self, step: OpenStep, *, diverged: bool = False) -> Decision:
        """Parameters, buffers or moments are bad, or every micro-batch is: skipping cannot help, going back can."""
        bad = self.training.nonfinite()
        level: Level = "buffer" if bad and all(kind == "buffer" for kind, _ in bad) else "parameter"
        facts = [f for _, f in bad]
        names = tuple(f.name for f in facts)
        verdict = Verdict(kind="nonfinite", step=step.number, level=level, names=names, origin="state")
        if diverged:
            value, limit = self.healer.last_loss, self.healer.loss_limit
            verdict = Verdict(kind="spike", step=step.number, level="loss", value=value, limit=limit, origin="state")
        action, updates = self._decide(step, verdict), self.tally.updates
        now = random_states()
        self._record(step, verdict, action, facts=facts)
        if action.kind != "commit":
            self._undo(step, now=now, undone=False)
            self._go_back(verdict, action)
        if diverged:
            self.healer.settle(updates - self.tally.updates)
        return Decision(verdict=verdict, action=action, reading=self._no_reading(step.number), scale=self._last_scale)

    def _decide(self, step: OpenStep, verdict: Verdict, healing: Healing | None = None) -> Action:
        snapshot = self._snapshot_for(verdict)
        recoveries = Recoveries(
            snapshot=self.tally.updates - snapshot.update if snapshot is not None else None,
            checkpoint=self.checkpoints.last_good is not None,
            repair=healing.reason if healing is not None and healing.opened else "",
            repaired=healing is not None and healing.committed,
        )
        action = decide(verdict, step.group.history, self.policy, recoveries)
        if step.micro and action.kind in ("rollback", "restore", "stop"):
            # left out for now; the window that it belongs to goes back, together with all ranks
            return Action(kind="skip", reason=action.reason)
        return action

    def _snapshot_for(self, verdict: Verdict) -> Snapshot | None:
        """The snapshot that a rollback would go to; one from before the losses that say that the run has diverged."""
        weights = _is_about_weights(verdict)
        since = DIVERGED_AFTER if weights and verdict.kind == "spike" else 0
        return self.snapshots.choose(self.tally.updates - since, weights_are_bad=weights)

    def micro_batches_fail(self) -> bool:
        """Whether so many single micro-batches were bad that their window must go back, not leave them out."""
        history, policy = self.groups.micro.history, self.policy
        return policy.mode == "protect" and (
            history.consecutive > policy.max_consecutive or len(history.skips) > policy.max_skips
        )

    def _undo(
        self,
        step: OpenStep,
        *,
        now: Mapping[str, Any] | None = None,
        undone: bool = True,
        state: CapturedState | None = None,
    ) -> None:
        """Buffers and random states as before the step; ``undone`` is False when the run goes further back."""
        before = state or step.before
        with self.surviving("undoing a step"):
            if not before.taken:
                return
            before.restore_buffers()
            if step.random_after is not None:
                set_random_states(dict(step.random_after(now if now is not None else random_states(), undone)))
            else:
                set_random_states(before.random)

    def _go_back(self, verdict: Verdict, action: Action) -> None:
        """Roll back, restore, or stop."""
        if action.kind == "rollback":
            snapshot = self._snapshot_for(verdict)
            assert snapshot is not None
            scheduled = {id(getattr(s, "optimizer", None)) for s in self.training.schedulers}
            own = [o for o in self.training.optimizers if id(o) not in scheduled] if self._own_rates else []
            snapshot.restore(random_states=not self._own_rates, keep_rates=own)
            self.snapshots.spend(snapshot)
            lost = self.tally.go_back_to(snapshot.update)
            where = f"rolled back to update {snapshot.update:,}"
        elif action.kind == "restore":
            assert self.checkpoints.last_good is not None
            lost = self.tally.go_back_to(self.checkpoints.reload())
            where = f"restored {self.checkpoints.last_good}"
        else:
            self.stop(verdict, action.reason)
        self.backoff.start(self.policy.lr_backoff, self.policy.lr_recovery)
        undone = f"{lost:,} update{'' if lost == 1 else 's'} undone" if lost else "no update lost"
        log.warning("nanproof: %s (%s), learning rate × %g", where, undone, self.backoff.factor)

    def stop(self, verdict: Verdict, reason: str) -> None:
        """End the run on purpose; from then on every call raises the same `GuardStop`."""
        action = Action(kind="stop", reason=reason)
        self.tally.count(verdict, action)
        self._tell("step_ended", self._no_reading(verdict.step), verdict, action, self.tally.updates)
        good = self.checkpoints.last_good
        self._end()
        self.stopped = GuardStop(
            f"training was stopped at {verdict}: {reason}",
            hint=f"nanproof diagnose {self.run.path or '.'}"
            + (f"; the last good checkpoint is {good}" if good else ""),
        )
        log.error("nanproof: GuardStop, exit code %d: %s", GuardStop.exit_code, self.stopped)
        raise self.stopped

    def require_running(self) -> None:
        if self.stopped is not None:
            raise self.stopped

    # --- early warnings ---------------------------------------------------------------------------------------

    def _warning(self, step: OpenStep, decision: Decision) -> Verdict | None:
        """A model that is dead or does not move: recorded, never vetoed."""
        number = step.number
        found = None
        if self._trends.chance is not None:
            found = self._trends.dead(number, *step.group.window.medians())
        if found is None and decision.moved is not None:
            still = self._motion.is_still(decision.moved)
            found = self._trends.still(number, not still, self._why_still(step))
        if self.backoff.ignored_by:
            log.warning(
                "nanproof: %s sets its own learning rate inside step(), so the lower rate after the rollback is not"
                " in force",
                self.backoff.ignored_by,
            )
            self.backoff.ignored_by = ""
        if found is not None:
            self.tally.warn(found)
            self._record(step, found, decide(found, step.group.history, self.policy, Recoveries()))
        return found

    @property
    def hooks(self) -> list[RemovableHandle]:
        """The engine's own hooks on modules."""
        return self._foresight.hooks

    def observe(self, name: str, value: Tensor | float, limit: float | None) -> None:
        """A number of the loop's own, sent and logged with the next step."""
        self._foresight.observe(name, value, limit)

    def _answer_warning(self, early: EarlyWarning) -> None:
        """The run is likely to break soon: say so, and do what the policy wants; the step itself stays as it is."""
        how, said = self.policy.on_warning, f"{early}; risk {early.risk:.2f}"
        if how in ("heal", "stop") and not self.ranks.alone:
            how = "snapshot"  # forecasts are each rank's own, and what all ranks must do together all must agree on
        verdict = Verdict(kind="forecast", step=early.step, names=tuple(t.name for t in early.trends[:3]))
        done = ""
        if how != "nothing":
            with self.surviving("preparing for a bad step"):
                self.checkpoints.pin_next = True
                self.snapshots.demand()
                done = "; a snapshot follows, and the next checkpoint is kept"
        self.tally.warn(verdict)
        if self.ranks.rank == 0:
            urgent = "early warning" if early.severity == "warning" else "it gets worse"
            log.warning("nanproof: step %s: %s: %s%s", f"{early.step:,}", urgent, said, done)
        self._tell_event(event="warning", **early.to_json())
        if how == "heal":
            self.healer.allow()
        elif how == "stop":
            self.stop(verdict, f"the policy stops at a warning: {early}")

    def _why_still(self, step: OpenStep) -> str:
        """Why no parameter moved, as far as it can be seen."""
        rates = [g.get("lr") for o in step.group.optimizers for g in o.param_groups]
        if all(isinstance(r, float | int) and r == 0 for r in rates):
            return "the learning rate is 0"
        if not gradients_of(step.parameters):
            return "no parameter of the optimizer has a gradient"
        if self.tally.overflows and step.scaler is not None:
            return "the loss scaler has skipped steps"
        return "updates were made and changed nothing: the optimizer may hold other parameters than the model's"

    # --- the failure boundary ---------------------------------------------------------------------------------

    @contextmanager
    def surviving(self, doing: str) -> Iterator[None]:
        """A block of the guard's own work: if it fails, that is recorded and printed once, and training goes on."""
        try:
            yield
        except Exception as error:
            self._failed(doing, error)

    @contextmanager
    def around(self, doing: str, ours: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """A block of the loop's own work inside one of the guard's: if the guard's fails, the loop's goes on."""
        with ExitStack() as stack:
            with self.surviving(doing):
                stack.enter_context(ours())
            yield

    def lowered(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """A block in which an optimizer steps with the lower learning rate after a rollback."""
        return self.around("lowering the learning rate", lambda: self.backoff.on(optimizer))

    def hook(self, doing: str, call: Callable[..., Any]) -> Hook:
        """A hook on one of the loop's own modules: if it fails, the forward pass goes on."""
        return Hook(call, functools.partial(self._failed, doing))

    @contextmanager
    def _together(self, doing: str) -> Iterator[None]:
        """Own work in which ranks wait for each other: a failure must reach the others, so it ends the judging."""
        if not self.ranks.alone:
            yield
            return
        with self.surviving(doing):
            yield

    def _failed(self, doing: str, error: Exception) -> Verdict:
        said = f"{doing}: {type(error).__name__}: {error}"
        self.tally.fail(said)
        verdict = Verdict(kind="guard-failed", step=self.tally.steps + 1, level="guard", names=(said,))
        first = doing not in self._failed_parts
        self._failed_parts.add(doing)
        if first:
            log.error("nanproof: guard-failed, %s", said, exc_info=error)
            self._tell_event(event="guard-failed", step=verdict.step, reason=said)
        if isinstance(error, RanksLost):
            log.error("nanproof: from now on rank %d is guarded alone", self.ranks.rank)
            self.ranks.detach()
            self.run.go_alone()
        if self.policy.on_guard_failure == "stop" and self.stopped is None:
            self.stop(verdict, "the guard itself failed, and the policy stops then")
        return verdict

    def fall_back(self, step: OpenStep, error: Exception) -> Decision:
        """Judging failed: the plainest check there is, on this rank's own gradients."""
        shards = self.ranks.sharded and not self.ranks.alone
        verdict = self._failed("judging a step", error)
        told = isinstance(error, PeerFailed | RanksLost) or step.local
        bad = False
        try:
            if not told and step.sent is None and not self.ranks.alone:  # the others wait for this rank's flags
                told = True
                if not step.announced:
                    self._announce(step, failed=True)
                self.ranks.finish()
            bad = not all(is_finite(g) for _, g in gradients_of(step.parameters))
            if bad and not told:
                self.ranks.fail()  # the others are examining this step: they must do as we do
        except Exception as second:
            self._failed("the plainest check", second)
        if self.policy.mode == "observe" or shards:
            bad = False  # shards disagree: a veto of one rank would split the model
        action = Action(kind="skip" if bad else "commit", reason="the guard itself failed; only finiteness was checked")
        if bad:
            with self.surviving("undoing a step"):
                self._undo(step)
        return Decision(verdict=verdict, action=action, reading=self._no_reading(step.number), scale=self._last_scale)

    # --- records ----------------------------------------------------------------------------------------------

    def subscribe(self, observer: Observer) -> None:
        """Tell somebody about every step and incident from now on."""
        self.run.observers.append(observer)

    def _tell(self, event: str, *args: Any) -> None:
        for observer in self.run.observers:
            with self.surviving(f"telling {type(observer).__name__}"):
                getattr(observer, event)(*args)

    def _tell_event(self, **fields: object) -> None:
        for observer in self.run.observers:
            with self.surviving(f"telling {type(observer).__name__}"):
                observer.event(**fields)

    def _record(self, step: OpenStep, verdict: Verdict, action: Action, **evidence: Any) -> Incident | None:
        """Keep an incident; that must not fail the run."""
        incident = None
        with self.surviving("keeping an incident"):
            weights: dict[str, Tensor] = {} if self.training.sharded else dict(self.training.model.named_parameters())
            incident = self.run.incident(
                verdict, action, taps=self._taps, before=step.before, weights=weights, **evidence
            )
        if incident is not None:
            self._tell("incident", incident)
        return incident

    # --- memory, the end --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "tally": self.tally.state_dict(),
            "groups": self.groups.state_dict(),
            "backoff": self.backoff.state_dict(),
            "repairs": self.healer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tally.load_state_dict(state["tally"])
        self.groups.load_state_dict(state["groups"])
        self.backoff.load_state_dict(state["backoff"])
        self.healer.load_state_dict(state.get("repairs", []))

    def close(self) -> None:
        for part in (self._foresight.close, self._taps.stop, self.ranks.close, self._end):
            with self.surviving("closing the run"):
                part()

    def _end(self) -> None:
        """Write what is waiting, say what happened, release the folder."""
        if not self.run.closed:
            with self.surviving("accounting for repairs"):
                for line in self.healer.account() if self.ranks.rank == 0 else ():
                    log.warning("nanproof: %s", line)
            self._tell("closed")
            self.run.close()


def _is_about_weights(verdict: Verdict) -> bool:
    """Whether finite weights are to blame: then a snapshot of the same update is no way out."""
    return verdict.origin == "state" and verdict.level not in ("parameter", "buffer")

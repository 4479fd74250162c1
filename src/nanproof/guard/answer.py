"""The answer to a bad step: look closely, run it again, decide, locate, heal, record, and put everything back.

`Answers.answer` is this path from top to bottom. A good step never comes here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..locating import Location
from ..locating.collectives import no_collectives
from ..records import Action, Level, Origin, Reading, TensorFacts, Verdict
from ..rng import random_states, set_random_states
from ..tensors import facts_of, tensors_in
from .auto_locate import AutoLocate
from .context import Context
from .examine import Rerun, is_ordinary_overflow, look_closely, second_reading
from .exceptions import at_exception, nonfinite_locals, where_raised
from .loss_scale import backed_off
from .readback import Readback
from .recovery import Recovery
from .repairs import Repairs
from .rows import rank_rows
from .rundir import describe
from .step import Decision, OpenStep, Pass


class Answers:
    """Answers bad steps, a bad state, and exceptions of the loop."""

    def __init__(self, context: Context, recovery: Recovery, repairs: Repairs) -> None:
        self._context, self._recovery, self._repairs = context, recovery, repairs
        seconds = context.policy.locate_seconds
        self._locate = AutoLocate(context.training, seconds=seconds, weights=context.loss_weights) if seconds else None

    # --- a bad step -------------------------------------------------------------------------------------------

    def answer(self, step: OpenStep, seen: Readback, verdict: Verdict) -> Decision:
        """What is done about a bad step; when it is not to be made, it is undone."""
        context, now = self._context, random_states()
        context.taps.mute()
        context.tell("examining", True)
        try:
            return self._answer(step, seen, verdict, now)
        finally:
            context.tell("examining", False)

    def _answer(self, step: OpenStep, seen: Readback, verdict: Verdict, now: Mapping[str, Any]) -> Decision:
        context, recovery = self._context, self._recovery
        reading, ranks = seen.reading, context.ranks_of(step)
        culprit = step.culprit(reading.bad)
        facts: Sequence[TensorFacts] = ()
        rerun: Rerun | None = None
        values_are_bad = verdict.kind in ("nonfinite", "overflow") and not step.hyperparameters
        if verdict.kind == "spike" or values_are_bad:
            verdict, facts = look_closely(step, verdict, ranks)
        if values_are_bad and context.policy.mode != "observe":
            rerun, origin = self._rerun(step)
            rank = verdict.rank if verdict.rank is not None or rerun is None else rerun.culprit
            if origin is None and ranks.any(any(kind == "parameter" for kind, _ in context.training.nonfinite())):
                origin = "state"  # no rerun is needed to know; buffers may be this step's own work
            verdict = dataclasses.replace(verdict, origin=origin, rank=rank)
            if is_ordinary_overflow(step, reading, origin, context.policy.min_scale, ranks):
                return self._lower_scale(step, verdict, reading)
        action = recovery.decide(step, verdict)
        location: Location | None = None
        found_at: Location | None = None
        if values_are_bad and action.kind not in ("commit", "rerun"):
            culprit = culprit or self._blame(step, verdict)
            location = found_at = self._find(step, verdict, culprit)
            healing = self._repairs.heal(step, verdict, culprit, location, rerun)
            if healing is not None:
                action = recovery.decide(step, verdict, healing)
                found_at = location or healing.location
        if action.kind in ("rerun", "heal") and rerun is not None:
            loss, norm = second_reading(rerun, step, context.training, len(step.passes))
            reading = dataclasses.replace(reading, loss=loss, grad_norm=norm, bad=(), components={})
        verdict, elsewhere = self._ask_culprit(step, verdict, location, culprit, facts)
        context.record(
            step,
            verdict,
            action,
            facts=facts,
            culprit=culprit,
            location=found_at,
            elsewhere=elsewhere,
            notes=self._rows(step, verdict, culprit),
        )
        decision = Decision(verdict=verdict, action=action, reading=reading, norm=reading.grad_norm, scale=step.scale)
        if decision.go:
            if verdict.kind == "spike" and context.policy.mode == "protect":
                step.group.window.clear()  # a new level was accepted: learn it
            if action.kind == "commit":
                set_random_states(dict(now))
            return decision
        recovery.undo(step, now=now, undone=action.kind == "skip")
        if action.kind == "skip" and step.group.history.consecutive == 1 and not step.micro:
            with context.surviving("taking a snapshot of a streak"):  # after the undoing: buffers were bad
                context.snapshots.take_streak(context.tally.steps, context.tally.updates)
        if action.kind != "skip":
            recovery.go_back(verdict, action)
        return decision

    def answer_deferred(self, step: OpenStep, seen: Readback, verdict: Verdict) -> Decision:
        """A bad step that the device has vetoed by itself, one step ago: its state is gone, so nothing is replayed."""
        action = self._recovery.decide(step, verdict)
        if action.kind == "commit":
            action = Action(kind="skip", reason=action.reason)
        self._context.record(step, verdict, action)
        if action.kind != "skip":
            self._recovery.go_back(verdict, action)
        return Decision(verdict=verdict, action=action, reading=seen.reading)

    def _rerun(self, step: OpenStep) -> tuple[Rerun | None, Origin | None]:
        """Learn from a rerun, if there can be one, what kind of bad step this is."""
        context = self._context
        if not context.policy.rerun or step.local:
            return None, None
        if context.ranks.any(step.closures is None or not step.before.taken):  # all ranks run it again, or none does
            return None, None
        if step.scaler is not None:
            step.scaler.update(step.scale)  # forget its own check: the overflow is judged here
        rerun = Rerun(step, context.training, context.ranks, step.before, context.loss_weights)
        origin: Origin | None = None
        with context.together(f"running step {step.number} again"):
            origin = rerun.classify(older=context.snapshots.older_than(context.tally.updates))
        return rerun, origin

    def _find(self, step: OpenStep, verdict: Verdict, culprit: Pass | None) -> Location | None:
        """The operation that broke a step which is not carried out."""
        context = self._context
        if self._locate is None or step.local:
            return None
        with context.together(f"locating step {step.number}"):
            older = context.snapshots.older_than(context.tally.updates)
            return self._locate.find(step, verdict, culprit, context.ranks, older)

    def _blame(self, step: OpenStep, verdict: Verdict) -> Pass | None:
        """The micro-batch that a bad gradient comes from, which a finite loss does not tell."""
        if self._locate is None or step.local or verdict.level != "gradient" or not step.before.taken:
            return None
        culprit = None
        with self._context.surviving("looking for the micro-batch to blame"):
            culprit = self._locate.blame(step)
        return culprit  # noqa: RET504  # the block survives what it raises

    def _rows(self, step: OpenStep, verdict: Verdict, culprit: Pass | None) -> list[str]:
        """For a finite spike: the rows of the batch that it comes from."""
        if verdict.kind != "spike" or culprit is None or culprit.closure is None or not step.before.taken:
            return []
        context, found = self._context, ""
        with context.surviving("ranking the rows of a spike"), no_collectives(context.training.model):
            sizes = [t.shape[0] for _, t in tensors_in(culprit.batch) if t.ndim]
            if sizes and len(step.passes) == 1 and not context.ranks.sharded:
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
    ) -> tuple[Verdict, str]:
        """On several ranks: which of them broke the step, and what it knows about it, on every rank."""
        ranks = self._context.ranks_of(step)
        if ranks.alone:
            return verdict, ""
        rank, said = verdict.rank, ""
        with self._context.together("asking the culprit's rank"):
            bad_batch = culprit is not None and culprit.has_bad_input
            mine = describe(location, culprit, bad_batch, facts)
            if rank is None:  # a reduced gradient is bad on every rank, but its origin may have been found on one
                rank = ranks.lowest(location is not None)
                if rank is not None and ranks.any(location is None):
                    verdict = dataclasses.replace(verdict, rank=rank)
            rank = ranks.lowest(bool(mine)) if rank is None else rank
            if rank is not None:
                _, said = ranks.hear(rank, 0, mine)
        return verdict, f"rank {rank}: {said}" if said and rank != ranks.rank else ""

    def _lower_scale(self, step: OpenStep, verdict: Verdict, reading: Reading) -> Decision:
        """GradScaler looks for its scale: not an incident. The pass leaves its traces, as without the guard."""
        assert reading.scale is not None
        self._context.tally.overflows += 1
        return Decision(
            verdict=dataclasses.replace(verdict, kind="overflow", origin="scale"),
            action=Action(kind="skip", reason="the loss scale was too large"),
            reading=reading,
            scale=backed_off(step.scaler, reading.scale, self._context.policy.min_scale),
        )

    # --- a bad state ------------------------------------------------------------------------------------------

    def answer_state(self, step: OpenStep, *, diverged: bool = False) -> Decision:
        """Parameters, buffers or moments are bad, or every micro-batch is: skipping cannot help, going back can."""
        context, recovery, healer = self._context, self._recovery, self._repairs.healer
        bad = context.training.nonfinite()
        level: Level = "buffer" if bad and all(kind == "buffer" for kind, _ in bad) else "parameter"
        facts = [f for _, f in bad]
        names = tuple(f.name for f in facts)
        verdict = Verdict(kind="nonfinite", step=step.number, level=level, names=names, origin="state")
        if diverged:
            value, limit = healer.last_loss, healer.loss_limit
            verdict = Verdict(kind="spike", step=step.number, level="loss", value=value, limit=limit, origin="state")
        action, updates = recovery.decide(step, verdict), context.tally.updates
        now = random_states()
        context.record(step, verdict, action, facts=facts)
        if action.kind != "commit":
            recovery.undo(step, now=now, undone=False)
            recovery.go_back(verdict, action)
        if diverged:
            healer.settle(updates - context.tally.updates)
        return Decision(verdict=verdict, action=action, reading=Reading.unread(step.number), scale=step.scale)

    # --- exceptions -------------------------------------------------------------------------------------------

    def answer_exception(self, step: OpenStep, error: Exception) -> None:
        """The loop raised inside a step, which is undone: an incident."""
        said = f"{type(error).__name__}: {error}"[:500]
        full = isinstance(error, MemoryError | torch.OutOfMemoryError)  # no room to look at anything
        bad_input = bool(step.passes) and not full and step.passes[-1].has_bad_input
        verdict = Verdict(kind="exception", step=step.number, level="input" if bad_input else None, names=(said,))
        if bad_input:
            self._context.tally.kinds["exception, nonfinite input"] += 1
        action = Action(kind="skip", reason="the step raised; everything is as if its batch had never come")
        self._record_exception(step, error, verdict, action, None)

    def answer_death(self, step: OpenStep, error: BaseException) -> None:
        """The loop ends by an exception after a forward pass: an incident, if that pass or its data is not finite."""
        context, culprit, bad = self._context, step.passes[-1], nonfinite_locals(error)
        if not bad and not culprit.has_bad_input:
            return
        level: Level = "input" if culprit.has_bad_input else "loss" if bad[0][1].ndim == 0 else "prediction"
        said = f"{type(error).__name__}: {error}"[:500]
        verdict = Verdict(kind="exception", step=step.number, level=level, names=(said,))
        context.tally.kinds[f"exception, nonfinite {level}"] += 1
        location = None
        if self._locate is not None and not context.ranks.sharded:
            with context.surviving(f"locating step {step.number}"), no_collectives(context.training.model):
                location = self._locate.find(step, verdict, culprit, context.nobody)
        action = Action(kind="skip", reason="the script ended by itself; the step was not made")
        self._record_exception(step, error, verdict, action, location)
        self._recovery.undo(step)

    def _record_exception(
        self, step: OpenStep, error: BaseException, verdict: Verdict, action: Action, location: Location | None
    ) -> None:
        self._context.tally.abandoned += 1
        bad = nonfinite_locals(error)
        self._context.record(
            step,
            verdict,
            action,
            culprit=step.passes[-1] if step.passes else None,
            facts=[facts_of(name, t) for name, t in bad[:4]],
            location=at_exception(location, where_raised(error, bad)),
        )

"""Early warnings of a guarded run: it is likely to break soon, has stopped learning, or does not move.

They are recorded and said, and the policy may answer them; none of them vetoes a step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, nn

from ..forecast import EarlyWarning
from ..records import Reading, Verdict
from .context import Context
from .foresight import Foresight
from .motion import Motion
from .options import Watch
from .policy import Recoveries, decide
from .readback import Part, signals_of
from .repairs import Repairs
from .step import Decision, OpenStep
from .training import gradients_of
from .update import Backoff

log = logging.getLogger("nanproof")
DEAD_NORM, DEAD_AFTER = 0.1, 200
"""A loss at chance level with smaller gradients, over so many steps: a model that has stopped learning."""


class EarlyWarnings:
    """Reads early signs of trouble with each step, and says what they mean."""

    def __init__(self, context: Context, watch: Watch, repairs: Repairs, backoff: Backoff) -> None:
        self._context, self._repairs, self._backoff = context, repairs, backoff
        self.foresight = Foresight(context.training, watch)
        self._motion = Motion(context.training.parameters, watch.still_after)
        self._chance, self._dead, self._still = watch.chance, 0, False
        self.untold: EarlyWarning | None = None
        """A warning of this rank that the others do not know yet."""

    def read(self, gradients: Sequence[tuple[str, nn.Parameter | Tensor]], norms: Tensor | None) -> list[Part]:
        """What is to be sent with the step's other numbers."""
        moved = self._motion.look(self._context.tally.updates)
        return [*([moved] if moved is not None else []), *self.foresight.read(gradients, norms)]

    def look(self, step: OpenStep, decision: Decision) -> tuple[Reading, EarlyWarning | None, Verdict | None]:
        """The reading of a step with its risk, an early warning that is due, and what else is wrong with the run."""
        context, reading = self._context, decision.reading
        signals, early, found = dict[str, float](), None, None
        with context.surviving("reading early signs"):
            signals = signals_of(decision.early)
        moved = signals.pop("moved", None)
        if decision.go:
            with context.surviving("looking for early warnings"):
                found = self._look(step, moved)
        with context.surviving("forecasting"):
            reading, early = self.foresight.forecast(reading, signals)
        return reading, early, found

    def _look(self, step: OpenStep, moved: float | None) -> Verdict | None:
        """A model that is dead or does not move: recorded, never vetoed."""
        context = self._context
        found = self._look_dead(step)
        if found is None and moved is not None:
            before, self._still = self._still, self._motion.is_still(bool(moved))
            if self._still and not before:  # said once
                why = (self._why_still(step),)
                found = Verdict(kind="unmoved", step=step.number, level="parameter", names=why)
        if self._backoff.ignored_by:
            log.warning(
                "nanproof: %s sets its own learning rate inside step(), so the lower rate after the rollback is not"
                " in force",
                self._backoff.ignored_by,
            )
            self._backoff.ignored_by = ""
        if found is not None:
            context.tally.warn(found)
            context.record(step, found, decide(found, step.group.history, context.policy, Recoveries()))
        return found

    def _look_dead(self, step: OpenStep) -> Verdict | None:
        """A warning, once, when the typical loss stays at chance level while gradients vanish."""
        if self._chance is None:
            return None
        loss, norm = step.group.window.medians()
        stuck = abs(loss - self._chance) <= 0.02 * abs(self._chance) and norm < DEAD_NORM
        self._dead = self._dead + 1 if stuck else 0
        return Verdict(kind="dead", step=step.number, level="loss", value=loss) if self._dead == DEAD_AFTER else None

    def _why_still(self, step: OpenStep) -> str:
        """Why no parameter moved, as far as it can be seen."""
        rates = [g.get("lr") for o in step.group.optimizers for g in o.param_groups]
        if all(isinstance(r, float | int) and r == 0 for r in rates):
            return "the learning rate is 0"
        if not gradients_of(step.parameters):
            return "no parameter of the optimizer has a gradient"
        if self._context.tally.overflows and step.scaler is not None:
            return "the loss scaler has skipped steps"
        return "updates were made and changed nothing: the optimizer may hold other parameters than the model's"

    def share(self, early: EarlyWarning | None, step: OpenStep) -> EarlyWarning | None:
        """The warning, if this rank answers it by itself; else the others are told with the next step."""
        ranks = self._context.ranks
        early, self.untold = early or self.untold, None
        if ranks.alone or ranks.share != "flags" or step.local:
            return early
        self.untold = early
        return None

    def hear(self, rank: int) -> EarlyWarning | None:
        """The warning of this rank, on every rank; all of them come here in the same step."""
        mine, self.untold = self.untold, None
        told = (round(mine.risk * 1e6), f"{mine.step} {mine}") if mine is not None else (0, "")
        ranks = self._context.ranks
        risk, text = ranks.hear(rank, *told)
        if rank == ranks.rank and mine is not None:
            return mine
        step, _, reason = text.partition(" ")
        if not reason:  # deferred timing: it was told before the last answer
            return None
        early = EarlyWarning(step=int(step), risk=risk / 1e6, reason=f"on rank {rank}: {reason}")
        self.foresight.know(early)
        return early

    def answer(self, early: EarlyWarning, *, together: bool) -> None:
        """The run is likely to break soon: say so, and do what the policy wants; the step itself stays as it is.

        ``together``: every rank answers it after the same step.
        """
        context = self._context
        how, said = context.policy.on_warning, f"{early}; risk {early.risk:.2f}"
        if how in ("heal", "stop") and not together:
            how = "snapshot"  # what all ranks must do together all must agree on
        verdict = Verdict(kind="forecast", step=early.step, names=tuple(t.name for t in early.trends[:3]))
        done = ""
        if how != "nothing":
            with context.surviving("preparing for a bad step"):
                context.checkpoints.pin_next = True
                context.snapshots.demand()
                done = "; a snapshot follows, and the next checkpoint is kept"
        context.tally.warn(verdict)
        if context.ranks.rank == 0:
            urgent = "early warning" if early.severity == "warning" else "it gets worse"
            log.warning("nanproof: step %s: %s: %s%s", f"{early.step:,}", urgent, said, done)
        context.tell("event", event="warning", **early.to_json())
        if how == "heal":
            self._repairs.healer.allow()
        elif how == "stop":
            context.stop(verdict, f"the policy stops at a warning: {early}")

"""Going back: undo a step, roll back to a snapshot, restore a checkpoint; and what there is to go back to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..captured import CapturedState
from ..records import Action, Verdict
from ..rng import random_states, set_random_states
from .context import Context
from .heal import DIVERGED_AFTER, Healing
from .policy import Recoveries, decide
from .snapshots import Snapshot
from .step import OpenStep
from .update import Backoff

log = logging.getLogger("nanproof")


class Recovery:
    """Decides about bad steps by what can be gone back to, and goes there."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.backoff = Backoff()

    def decide(self, step: OpenStep, verdict: Verdict, healing: Healing | None = None) -> Action:
        context = self._context
        snapshot = self._snapshot_for(verdict)
        recoveries = Recoveries(
            snapshot=context.tally.updates - snapshot.update if snapshot is not None else None,
            checkpoint=context.checkpoints.last_good is not None,
            repair=healing.reason if healing is not None and healing.opened else "",
            repaired=healing is not None and healing.committed,
        )
        action = decide(verdict, step.group.history, context.policy, recoveries)
        if step.micro and action.kind in ("rollback", "restore", "stop"):
            # left out for now; the window that it belongs to goes back, together with all ranks
            return Action(kind="skip", reason=action.reason)
        return action

    def _snapshot_for(self, verdict: Verdict) -> Snapshot | None:
        """The snapshot that a rollback would go to; one from before the losses that say that the run has diverged."""
        # finite weights are to blame: a snapshot of the same update is no way out
        weights = verdict.origin == "state" and verdict.level not in ("parameter", "buffer")
        since = DIVERGED_AFTER if weights and verdict.kind == "spike" else 0
        context = self._context
        return context.snapshots.choose(context.tally.updates - since, weights_are_bad=weights)

    def undo(
        self,
        step: OpenStep,
        *,
        now: Mapping[str, Any] | None = None,
        undone: bool = True,
        state: CapturedState | None = None,
    ) -> None:
        """Buffers and random states as before the step; ``undone`` is False when the run goes further back."""
        before = state or step.before
        with self._context.surviving("undoing a step"):
            if not before.taken:
                return
            before.restore_buffers()
            if step.random_after is not None:
                set_random_states(dict(step.random_after(now if now is not None else random_states(), undone)))
            else:
                set_random_states(before.random)

    def lower_rate(self, number: int, norm: float) -> None:
        """Make an update with a lower learning rate, which returns to its schedule as after a rollback."""
        context = self._context
        if context.policy.lr_backoff == 1:
            return
        self.backoff.start(context.policy.lr_backoff, context.policy.lr_recovery)
        said = f"gradient norm {norm:.3g} is far above the last ones: learning rate × {self.backoff.factor:.2g}"
        said += f" from here on, back at its schedule after {context.policy.lr_recovery:,} updates"
        if context.ranks.rank == 0:
            log.warning("nanproof: heal: step %s: %s", f"{number:,}", said)
        context.tell("event", event="lower-rate", step=number, message=said)

    def go_back(self, verdict: Verdict, action: Action) -> None:
        """Roll back, restore, or stop."""
        context = self._context
        if action.kind == "rollback":
            snapshot, training = self._snapshot_for(verdict), context.training
            assert snapshot is not None
            scheduled = {id(getattr(s, "optimizer", None)) for s in training.schedulers}
            own = [o for o in training.optimizers if id(o) not in scheduled] if context.own_rates else []
            snapshot.restore(random_states=not context.own_rates, keep_rates=own)
            context.snapshots.spend(snapshot)
            lost = context.tally.go_back_to(snapshot.update)
            where = f"rolled back to update {snapshot.update:,}"
        elif action.kind == "restore":
            assert context.checkpoints.last_good is not None
            lost = context.tally.go_back_to(context.checkpoints.reload())
            where = f"restored {context.checkpoints.last_good}"
        else:
            context.stop(verdict, action.reason)
        self.backoff.start(context.policy.lr_backoff, context.policy.lr_recovery)
        undone = f"{lost:,} update{'' if lost == 1 else 's'} undone" if lost else "no update lost"
        log.warning("nanproof: %s (%s), learning rate × %g", where, undone, self.backoff.factor)

"""Repairs of a running model: searched for in a bad step, or at once when a loop's own forward pass goes bad.

What can be repaired, and how that is proved, is in `heal.py`; here is when it is asked for and what follows.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..locating import Location
from ..records import Action, Reading, Verdict
from ..tensors import is_finite
from .context import Context
from .examine import Rerun
from .forward_capture import ForwardCapture, differentiable, without_autocast
from .heal import Heal, Healer, Healing, repairable
from .heal_replay import ModelReplay, Replay, StepReplay, as_it_was
from .step import OpenStep, Pass

log = logging.getLogger("nanproof")


class Repairs:
    """Asks the healer, and tells what it did."""

    def __init__(self, context: Context, mode: Heal) -> None:
        self._context = context
        self.healer = Healer(context.training, context.ranks, mode=mode, seconds=context.policy.heal_seconds)
        context.at_end.append(self._account)
        if mode == "open":
            with context.surviving("opening the repairs of an earlier run"):
                self.healer.reopen(context.run.read_repairs())
                if self.healer.repairs:
                    context.run.write_repairs(self.healer.repairs)

    def _account(self) -> None:
        """Say which repairs are in force at the end."""
        for line in self.healer.account() if self._context.ranks.rank == 0 else ():
            log.warning("nanproof: %s", line)

    # --- a bad step -------------------------------------------------------------------------------------------

    def heal(
        self, step: OpenStep, verdict: Verdict, culprit: Pass | None, location: Location | None, rerun: Rerun | None
    ) -> Healing | None:
        """Search for a repair of a bad step, if precision may be the reason."""
        context, healer = self._context, self.healer
        weights = verdict.level in ("parameter", "buffer")
        state = weights or verdict.origin == "state"
        if not weights and not step.local and verdict.origin in ("data", "state"):
            # one kernel may be to blame instead of the data; and where weights are sharded, float32 was not tried
            kinds = {"eager", "math-attention"} if verdict.origin == "data" else set()
            kinds |= {"float32"} if context.training.sharded else set()
            with context.together(f"looking for a repair of step {step.number}"):
                state = not context.ranks.any(location is not None and repairable(location) in kinds)
        if state or step.local or context.policy.mode != "protect":
            return None
        if location is not None and location.reproduced and not repairable(location) and context.ranks.alone:
            healer.decline(location)
            return None
        replay: Replay | None = None
        if rerun is not None:
            replay = StepReplay(step, rerun, culprit, context.training, context.ranks, context.loss_weights)
        elif culprit is not None and (play := culprit.capture.step(probe=True)) is not None:
            batch = culprit.batch if culprit.inputs is None else culprit.inputs
            rewind = functools.partial(step.rewind, culprit) if step.before.taken else lambda: None
            replay = ModelReplay(play, rewind, batch, context.training, context.ranks)
        healer.arm(blind=replay is None)
        healing: Healing | None = None
        with context.together(f"healing step {step.number}"):
            healing = healer.heal(step.number, replay, location)
        if healing is not None and healing.opened:
            self._tell(healing)
            self._keep_state()
        return healing

    # --- a forward pass ---------------------------------------------------------------------------------------

    def before_call(self) -> None:
        """The model is about to be called by a loop that cannot be run again."""
        if self.healer.live:
            with self._context.surviving("capturing the state before a forward pass"):
                self.healer.before_pass.capture()

    def heal_call(self, step: OpenStep, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The model was called by such a loop: a bad output is healed before the loop goes on with it.

        Returns the output of the call, run again with the repair; else ``output`` itself.
        """
        context, before = self._context, self.healer.before_pass
        healed = output
        if self.healer.live and before.taken:
            with context.surviving("healing a forward pass"):
                if not all(map(is_finite, differentiable(output))) and self._heal_pass(
                    step, module, args, kwargs, output
                ):
                    healed = module(*args, **kwargs)
        before.forget()
        return healed

    def _heal_pass(self, step: OpenStep, module: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether a repair was opened with which the forward pass is to be run again; then all is as before it."""
        context, before = self._context, self.healer.before_pass
        replay = ModelReplay(
            ForwardCapture.of(module, args, kwargs, output).step(probe=True) or (lambda: output),
            before.restore,
            (args, kwargs),
            context.training,
            context.ranks,
        )
        context.taps.mute()
        with as_it_was(context.training.slots), without_autocast():
            healing = self.healer.heal_pass(step.number, replay)
        if healing is None or not healing.opened:
            return False
        verdict = Verdict(kind="nonfinite", step=step.number, level="prediction", origin="range")
        reason = f"{healing.reason.split(' from now')[0]}: run again, the forward pass is finite"
        action = Action(kind="heal", reason=reason)
        context.tally.count(verdict, action, step=False)
        culprit = step.passes[-1] if step.passes else None
        if step.name_batch is not None and culprit is not None:
            step.name_batch(culprit)
        context.record(step, verdict, action, culprit=culprit, location=healing.location)
        self._tell(healing)
        before.restore()
        self._keep_state()
        step.next_pass()
        return True

    # --- what follows -----------------------------------------------------------------------------------------

    def check_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: repair an eps that is 0 in the dtype of its state."""
        healing = self.healer.check_update(optimizer, self._context.tally.steps + 1)
        if healing is not None and healing.opened:
            self._tell(healing)

    def follow(self, step: OpenStep, verdict: Verdict, reading: Reading) -> None:
        """An update was made: look how the run goes on with its repairs, and keep good batches to compare with."""
        context = self._context
        with context.surviving("following repairs"):
            if self.healer.follow(step.number, reading.loss, reading.grad_norm):
                context.snapshots.suspect()
        if verdict.ok:
            with context.surviving("keeping a good batch"):
                self.healer.remember(step)

    def _keep_state(self) -> None:
        """The state in which an island was opened, to come back to if the run diverges with it."""
        context = self._context
        if self.healer.calm:
            with context.surviving("taking a snapshot of a healed run"):
                context.snapshots.take_streak(context.tally.steps, context.tally.updates)

    def _tell(self, healing: Healing) -> None:
        for repair in healing.repairs:
            message = f"{repair.name} {repair.does}: {repair.why}"
            self._context.tell("event", event="repair", message=message, **repair.to_json())
        with self._context.surviving("writing the repairs down"):
            self._context.run.write_repairs(self.healer.repairs)

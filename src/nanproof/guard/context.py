"""What all parts of a guarded run share: the training, its ranks and records, and the one failure boundary.

    with context.surviving("taking a snapshot"):
        context.snapshots.take(steps, updates)
    context.tell("step_ended", reading, verdict, action, update)

Whatever fails inside the boundary is recorded, and training goes on; telling observers and keeping incidents are inside
of it themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor

from ..errors import GuardStop
from ..records import Action, Reading, Verdict
from ..text import clean_record
from .boundary import Boundary
from .checkpoints import Checkpoints
from .optimizer_groups import OptimizerGroups
from .policy import Policy
from .ranks import Ranks, RanksLost
from .rundir import RunDir
from .snapshots import Snapshots
from .step import OpenStep
from .taps import Taps
from .training import Training

log = logging.getLogger("nanproof")
log.addFilter(clean_record)  # names of modules and parameters come from anywhere, and go to any handler


class Context(Boundary):
    """One guarded run, for its driver and every part of its engine."""

    def __init__(
        self,
        training: Training,
        *,
        policy: Policy,
        ranks: Ranks,
        run: RunDir,
        checkpoints: Checkpoints,
        loss_weights: Mapping[str, float],
        own_rates: bool = False,
    ) -> None:
        """``own_rates``: the loop may set learning rates itself, so that a rollback leaves those without a schedule."""
        super().__init__()
        self.training, self.policy, self.ranks, self.run = training, policy, ranks, run
        self.checkpoints, self.loss_weights, self.own_rates = checkpoints, loss_weights, own_rates
        self.tally = run.tally
        self.groups = OptimizerGroups(training, policy.spike_window)
        self.snapshots = Snapshots(training, policy.snapshot_every, policy.snapshot_seconds)
        self.taps = Taps()
        self.nobody = Ranks(training.model, device=training.device, share="nothing", deadline=policy.deadline)
        """For a step that this rank judges alone."""
        self.stopped: GuardStop | None = None
        self.at_end: list[Callable[[], None]] = []

    def ranks_of(self, step: OpenStep) -> Ranks:
        return self.nobody if step.local else self.ranks

    # --- records ----------------------------------------------------------------------------------------------

    def tell(self, what: str, /, *args: Any, **fields: Any) -> None:
        """Call a method of every observer."""
        for observer in self.run.observers:
            with self.surviving(f"telling {type(observer).__name__}"):
                getattr(observer, what)(*args, **fields)

    def record(self, step: OpenStep, verdict: Verdict, action: Action, **evidence: Any) -> None:
        """Keep an incident; that must not fail the run."""
        with self.surviving("keeping an incident"):
            weights: dict[str, Tensor] = {} if self.training.sharded else dict(self.training.model.named_parameters())
            incident = self.run.incident(
                verdict, action, taps=self.taps, before=step.before, weights=weights, **evidence
            )
            self.tell("incident", incident)

    # --- failures ---------------------------------------------------------------------------------------------

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Own work in which ranks wait for each other: a failure must reach the others, so it ends the judging."""
        if not self.ranks.alone:
            yield
            return
        with self.surviving(doing):
            yield

    def failed(self, doing: str, error: Exception) -> str:
        said = super().failed(doing, error)
        if isinstance(error, RanksLost):
            log.error("nanproof: from now on rank %d is guarded alone", self.ranks.rank)
            self.ranks.detach()
            self.run.go_alone()
        if self.policy.on_guard_failure == "stop" and self.stopped is None:
            self.stop(self.failure(said), "the guard itself failed, and the policy stops then")
        return said

    def _record_failure(self, doing: str, said: str, *, first: bool) -> None:
        self.tally.fail(said)
        if first:
            self.tell("event", event="guard-failed", step=self.tally.steps + 1, reason=said)

    def failure(self, said: str) -> Verdict:
        return Verdict(kind="guard-failed", step=self.tally.steps + 1, level="guard", names=(said,))

    # --- the end ----------------------------------------------------------------------------------------------

    def stop(self, verdict: Verdict, reason: str) -> NoReturn:
        """End the run on purpose; from then on every call raises the same `GuardStop`."""
        action = Action(kind="stop", reason=reason)
        self.tally.count(verdict, action, step=verdict.kind != "forecast")  # that was a good step
        self.tell("step_ended", Reading.unread(verdict.step), verdict, action, self.tally.updates)
        good = self.checkpoints.last_good
        self.end()
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

    def end(self) -> None:
        """Write what is waiting, say what happened, release the folder."""
        if not self.run.closed:
            for account in self.at_end:
                with self.surviving("accounting for the run"):
                    account()
            self.tell("closed")
            self.run.close()

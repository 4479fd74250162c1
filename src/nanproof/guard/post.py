"""The guard's post: everything it has at hand, and the answers it can give to a verdict."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import GuardStop
from ..locating import Location
from ..records import Action, Level, Reading, TensorFacts, Verdict
from ..tensors import is_finite
from . import act
from .feed import Feed
from .finder import Finder
from .judge import Trends, judge
from .keeper import Keeper
from .moment import Moment
from .policy import History, Means, Policy, decide
from .probe import Seen
from .ranks import Ranks
from .rundir import RunDir
from .seam import Seam
from .snapshots import Ring
from .state import Training
from .taps import Taps
from .trial import Trial
from .window import Limits, Window

log = logging.getLogger("nanproof")
Closure = Callable[[], Any]


class Post:
    """Judges a step and carries the answer out: commit, skip, rerun, roll back, restore, stop."""

    def __init__(
        self,
        *,
        training: Training,
        policy: Policy,
        ranks: Ranks,
        run: RunDir,
        ring: Ring,
        keeper: Keeper,
        trends: Trends,
        weights: Mapping[str, float],
        window: int,
        max_norm: float | None,
        local: bool,
        finder: Finder | None,
    ) -> None:
        self.training, self.policy, self.ranks, self.run = training, policy, ranks, run
        self.ring, self.keeper, self.trends, self.weights = ring, keeper, trends, weights
        self.max_norm = max_norm
        self.finder = finder
        self.local = local
        """Whether this rank judges its micro-batches by itself (DDP, dropping single ones)."""
        self.window = Window(size=window, warmup=max(1, window // 2))
        # single micro-batches scatter more than windows of them do: they have a range of their own
        self.micro_window = Window(size=window, warmup=max(1, window // 2))
        self.moment = Moment(training.slots)
        self.taps = Taps()
        self.feed: Feed[Any] = Feed()
        self.seam = Seam()
        self.backoff = act.Backoff()
        self.history = History()
        self.tally = run.tally
        self.hands_off = False
        """Whether the loop itself carries steps out; then a commit is only promised to it."""
        self.promised: tuple[Seen, Verdict, Action] | None = None
        self.taken = Action(kind="commit")
        """The answer to the last step."""
        self.stopped: GuardStop | None = None

    def renew(self) -> None:
        """A foreign loop's next step: nothing is promised yet."""
        self.promised, self.taken = None, Action(kind="skip")

    # --- judging ----------------------------------------------------------------------------------------------

    def limits(self, window: Window) -> Limits:
        limits = window.limits() if self.policy.spikes == "skip" else Limits()
        if self.ranks.share == "gradients" and not self.ranks.alone:
            limits = dataclasses.replace(limits, loss=math.inf)  # a local loss must not decide for one rank alone
        return limits

    def judge(self, seen: Seen) -> Verdict:
        """The verdict, the same on every rank."""
        if seen.apart:
            self.ranks.raise_apart()
        verdict = judge(seen.reading, seen.limits)
        if seen.spike and verdict.kind in ("ok", "spike") and verdict.level != "loss":
            verdict = Verdict(kind="spike", step=verdict.step, level="loss")  # another rank's loss
        if not self.ranks.alone and not self.ranks.reduced and not self.local:
            bad = self.ranks.gather(int(not verdict.ok))
            if any(bad) and verdict.ok:
                verdict = Verdict(kind="nonfinite", step=verdict.step, level="gradient", rank=bad.index(1))
        if not verdict.ok and verdict.level in ("input", "prediction", "loss"):
            mine = seen.rank in (None, self.ranks.rank)
            verdict = dataclasses.replace(verdict, rank=seen.rank, value=verdict.value if mine else None)
        return verdict

    def examine(self, verdict: Verdict, seen: Seen, closure: Closure | None) -> Trial:
        """Look at a bad step closely and, with a closure, run it again."""
        # a snapshot of this very state could not tell state from data
        older = next((s for s in self.ring.healthy() if s.update < self.tally.updates), None)
        ranks = None if self.local else self.ranks
        self.taps.mute()
        return Trial(
            self.training, ranks, self.moment, older, self.policy, self.weights, verdict, seen, self._again(closure)
        )

    def find(self, verdict: Verdict, action: Action, closure: Closure | None) -> Location | None:
        """The operation that broke a step which is not carried out."""
        if self.finder is None or verdict.kind not in ("nonfinite", "overflow") or action.kind in ("commit", "rerun"):
            return None
        batch = self.feed.batch if self.feed.played is None else self.feed.played
        return self.finder.find(verdict, self._again(closure), self.seam, batch, self.moment)

    def _again(self, closure: Closure | None) -> Closure | None:
        """The closure for a replay: it must see the same batches, and not use up new ones."""

        def replay() -> Any:
            assert closure is not None
            with self.feed.replaying():
                return closure()

        return replay if closure is not None else None

    def decide(self, verdict: Verdict) -> Action:
        means = Means(snapshot=self.ring.newest() is not None, checkpoint=self.keeper.last_good is not None)
        return decide(verdict, self.history, self.policy, means)

    # --- answers ----------------------------------------------------------------------------------------------

    def commit(self, seen: Seen, verdict: Verdict, action: Action) -> Verdict:
        """Carry the step out; early warnings are recorded after it."""
        t, reading = self.training, seen.reading
        act.clip(t, self.max_norm, reading.grad_norm)
        if self.hands_off:
            self.promised = (seen, verdict, action)
            return verdict
        act.step_optimizers(t, self.backoff, scaled=not math.isfinite(reading.grad_norm))
        if t.scaler is not None:
            t.scaler.update()
        act.step_schedulers(t, reading.loss)
        act.update_average(t)
        return self.account(seen, verdict, action)

    def account(self, seen: Seen, verdict: Verdict, action: Action) -> Verdict:
        """A step was carried out: learn from it, and look for early warnings."""
        self.after_update(seen.reading)
        self.finish(verdict, action, seen.reading)
        return self.warn(seen) or verdict

    def answer(self, seen: Seen, verdict: Verdict, closure: Closure | None) -> Verdict:
        """A bad step: look closely, run it again if that can tell something, decide, act, record."""
        trial = self.examine(verdict, seen, closure)
        if verdict.kind != "spike" and self.policy.mode != "observe":
            trial.run_again()
            if trial.ordinary_overflow():
                self.tally.overflows += 1
                self.run.record(seen.reading, trial.verdict, Action(kind="skip", reason="the loss scale was too large"))
                return trial.verdict
        verdict = trial.verdict
        action = self.decide(verdict)
        if action.kind == "rerun":
            seen = dataclasses.replace(seen, reading=trial.second_reading())
        self.note(verdict, action, trial.facts, self.find(verdict, action, closure))
        if action.kind in ("commit", "rerun"):
            if verdict.kind == "spike" and self.policy.mode == "protect":
                self.window.clear()  # a new level was accepted: learn it
            self.commit(seen, verdict, action)
            return verdict
        if self.moment.taken:
            self.moment.restore()
        if seen.reading.scale is not None:
            act.hold_scale(self.training, seen.reading.scale)
        if action.kind != "skip":
            self.go_back(verdict, action)
        self.finish(verdict, action, seen.reading)
        return verdict

    def answer_state(self) -> Verdict:
        """Parameters, buffers or moments are bad: skipping cannot help, going back can."""
        sick = self.training.sick()
        level: Level = "buffer" if sick and all(kind == "buffer" for kind, _ in sick) else "parameter"
        facts = [f for _, f in sick]
        names = tuple(f.name for f in facts)
        verdict = Verdict(kind="nonfinite", step=self.tally.steps, level=level, names=names, origin="state")
        action = self.decide(verdict)
        self.note(verdict, action, facts)
        if action.kind != "commit":
            self.go_back(verdict, action)
        self.finish(verdict, action, self._no_reading(verdict))
        return verdict

    def answer_failure(self, error: Exception) -> Verdict:
        """The guard itself failed: say so loudly, and fall back to the plainest check there is."""
        t = self.training
        said = f"{type(error).__name__}: {error}"
        verdict = Verdict(kind="guard-failed", step=self.tally.steps, level="guard", names=(said,))
        self.tally.failures.append(said)
        log.error("nanproof: the guard itself failed at step %d: %s", verdict.step, said, exc_info=error)
        if self.decide(verdict).kind == "stop":
            self.stop(verdict, "the guard itself failed, and the policy stops then")
        if all(is_finite(g) for _, g in t.gradients()):
            if self.hands_off:
                unread = Seen(reading=self._no_reading(verdict), limits=Limits())
                self.promised = (unread, verdict, Action(kind="commit"))
                return verdict
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for _, p in t.parameters], self.max_norm)
            act.step_optimizers(t, self.backoff)
            if t.scaler is not None:
                t.scaler.update()
            act.step_schedulers(t, math.nan)
            act.update_average(t)
            self.tally.updates += 1
        elif self.moment.taken:
            self.moment.restore()
        return verdict

    def go_back(self, verdict: Verdict, action: Action) -> None:
        """Roll back, restore, or stop."""
        if action.kind == "rollback":
            snapshot = self.ring.newest()
            assert snapshot is not None
            snapshot.restore()
            self.ring.spend(snapshot)
            self.tally.updates, where = snapshot.update, f"rolled back to update {snapshot.update:,}"
        elif action.kind == "restore":
            assert self.keeper.last_good is not None
            self.tally.updates = self.keeper.reload()
            where = f"restored {self.keeper.last_good}"
        else:
            self.stop(verdict, action.reason)
        self.backoff.start(self.policy.lr_backoff, self.policy.lr_recovery)
        log.warning("nanproof: %s, learning rate × %g", where, self.backoff.factor)

    def stop(self, verdict: Verdict, reason: str) -> None:
        """End the run on purpose."""
        self.run.record(self._no_reading(verdict), verdict, Action(kind="stop", reason=reason))
        good = self.keeper.last_good
        self.run.close()
        stop = GuardStop(
            f"training was stopped at {verdict}: {reason}",
            hint=f"nanproof diagnose {self.run.path or '.'}"
            + (f"; the last good checkpoint is {good}" if good else ""),
        )
        log.error("nanproof: GuardStop, exit code %d: %s", stop.exit_code, stop)
        self.stopped = stop
        raise stop

    def block(self, path: Any, what: str, *, suspect: bool) -> None:
        """A save was not carried out, because what it would have saved is bad.

        With ``suspect`` the next step answers for the state; several ranks must be of one mind there.
        """
        self.tally.blocked.append(f"{path}: {what}")
        self.run.event(event="save-blocked", path=str(path), reason=what)
        if suspect:
            self.ring.suspect()
        log.error("nanproof: did not save %s: %s", path, what)

    def warn(self, seen: Seen) -> Verdict | None:
        """Headroom that keeps shrinking, a model that is dead: recorded, never vetoed."""
        step = seen.reading.step
        warning = self.trends.headroom(step, dict(seen.headroom))
        if warning is None and self.trends.chance is not None:
            warning = self.trends.dead(step, *self.window.medians())
        if warning is not None:
            self.note(warning, self.decide(warning), [])
        return warning

    # --- accounts ---------------------------------------------------------------------------------------------

    def after_update(self, reading: Reading) -> None:
        self.window.add(loss=reading.loss, grad_norm=reading.grad_norm)
        self.backoff.advance()
        self.tally.updates += 1
        if self.ring.due(self.tally.updates):
            with self.surviving("taking a snapshot"):
                self.ring.take(self.tally.steps, self.tally.updates)

    def finish(self, verdict: Verdict, action: Action, reading: Reading) -> None:
        self.taken = action
        self.history = self.history.after(action, verdict.step, self.policy)
        if not verdict.ok:
            self.ranks.note(verdict.kind, action.kind, str(verdict.step))
        self.run.record(reading, verdict, action)

    def note(
        self, verdict: Verdict, action: Action, facts: Sequence[TensorFacts], location: Location | None = None
    ) -> None:
        """Keep an incident; that must not fail the run."""
        with self.surviving(f"keeping the incident at step {verdict.step}"):
            weights: dict[str, Tensor] = {} if self.training.sharded else dict(self.training.model.named_parameters())
            self.run.incident(
                verdict, action, facts, self.taps, self.feed.batch, self.moment, weights, location, self.feed.about
            )

    @contextmanager
    def surviving(self, doing: str) -> Iterator[None]:
        """A block of the guard's own work: if it fails, that is said loudly and counted, and training goes on."""
        try:
            yield
        except Exception as error:
            said = f"{doing}: {type(error).__name__}: {error}"
            self.tally.failures.append(said)
            log.error("nanproof: guard-failed, %s", said, exc_info=error)
            if self.policy.on_guard_failure == "stop":
                self.stop(
                    Verdict(kind="guard-failed", step=self.tally.steps, level="guard", names=(said,)),
                    "the guard itself failed, and the policy stops then",
                )

    def _no_reading(self, verdict: Verdict) -> Reading:
        return Reading(step=verdict.step, loss=math.nan, grad_norm=math.nan, lr=self.training.learning_rate())

    def state_dict(self) -> dict[str, Any]:
        return {
            "tally": self.tally.state_dict(),
            "window": self.window.state_dict(),
            "micro_window": self.micro_window.state_dict(),
            "history": {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self.history).items()},
            "backoff": self.backoff.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tally.load_state_dict(state["tally"])
        self.window.load_state_dict(state["window"])
        self.micro_window.load_state_dict(state["micro_window"])
        history: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in state["history"].items()}
        self.history = History(**history)
        self.backoff.load_state_dict(state["backoff"])

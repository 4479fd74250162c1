"""What to do about a bad step: a pure function of the verdict, the history and what there is to go back to.

>>> from nanproof.records import Verdict
>>> bad = Verdict(kind="nonfinite", step=7, level="loss")
>>> decide(bad, History(), Policy(), Recoveries(snapshot=12)).kind
'skip'
>>> decide(bad, History(consecutive=5), Policy(), Recoveries(snapshot=12)).kind
'rollback'
>>> decide(bad, History(consecutive=5), Policy(), Recoveries(snapshot=100_000)).kind
'stop'
>>> decide(bad, History(), Policy.strict(), Recoveries()).kind
'stop'
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UsageError
from ..records import Action, Verdict
from .checks import at_least, one_of, positive

Mode = Literal["protect", "stop", "observe"]
Share = Literal["flags", "gradients", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the guard answers a bad step: skip, then roll back, then restore a checkpoint, then stop.

    >>> Policy(max_consecutive=3, snapshot_every=100).mode
    'protect'

    `Policy()` protects, `Policy.strict()` stops at the first bad step, `Policy.observe()` only records.
    """

    mode: Mode = "protect"
    rerun: bool = True
    """Run a bad step again (needs a closure) to learn whether it is transient, range, data or state."""
    spikes: Literal["skip", "observe"] = "skip"
    """Whether a finite but extreme step is skipped, or only recorded."""
    spike_window: int = 128
    """How many healthy steps say what is normal; spikes are judged once half of them have been seen."""
    max_consecutive: int = 5
    """Bad batches in a row before skipping gives way to rolling back. The same data counts once, however often
    it is trained on (an RL rollout)."""
    max_skips: int = 50
    """Bad batches within ``per_steps`` steps before skipping gives way to rolling back."""
    per_steps: int = 1000
    max_rollbacks: int = 3
    """Rollbacks within ten times ``per_steps`` before a checkpoint is restored or the run stopped."""
    max_restores: int = 1
    max_lost_updates: int | None = 1000
    """A rollback that would throw more updates away than this is not done: the next rung is taken instead.
    None: roll back however far it is."""
    snapshot_every: int | None = 200
    """A snapshot in host memory after that many updates; None keeps none, so that nothing is rolled back."""
    snapshot_seconds: float = 600.0
    """And after that many seconds, for runs with slow steps."""
    lr_backoff: float = 0.5
    """The learning rate is multiplied by this after a rollback, and for a steep update after an island was opened …"""
    lr_recovery: int = 200
    """… and returns to its schedule over that many steps."""
    min_scale: float = 1.0
    """GradScaler's scale is never allowed below this."""
    locate_seconds: float | None = 60.0
    """How long the guard may spend in a run on locating bad steps by itself; None switches it off."""
    heal_seconds: float = 120.0
    """How long the guard may spend in a run on searches for repairs that find none."""
    share: Share = "flags"
    """What ranks tell each other: a few bits with every step; only what gradients carry; nothing."""
    deadline: float = 600.0
    """How long a rank may keep the others waiting before it is named."""
    on_missing_rank: Literal["wait", "stop"] = "wait"
    """After the deadline: wait on, as the run would without the guard, or stop with exit code 66."""
    on_warning: Literal["snapshot", "heal", "stop", "nothing"] = "snapshot"
    """When the run is likely to break soon: take a snapshot and keep the next checkpoint; besides, let
    islands open at the first output that leaves its dtype's range; stop with exit code 66; or only say so. Ranks
    that share flags do it together, a step after one of them has warned; others only ever take a snapshot."""
    on_guard_failure: Literal["continue", "stop"] = "continue"
    """When the guard itself fails: train on under the plainest check, or stop."""

    def __post_init__(self) -> None:
        one_of("mode", self.mode, "protect", "stop", "observe")
        one_of("spikes", self.spikes, "skip", "observe")
        one_of("share", self.share, "flags", "gradients", "nothing")
        one_of("on_missing_rank", self.on_missing_rank, "wait", "stop")
        one_of("on_warning", self.on_warning, "snapshot", "heal", "stop", "nothing")
        one_of("on_guard_failure", self.on_guard_failure, "continue", "stop")
        given = {f"policy.{f.name}": getattr(self, f.name) for f in dataclasses.fields(self)}
        at_least(1, (), **{name: given[name] for name in _COUNTS})
        at_least(0, _OR_NONE, **{name: given[name] for name in _LIMITS})
        positive(_OR_NONE, **{name: given[name] for name in _AMOUNTS})
        if not 0 < self.lr_backoff <= 1:
            raise UsageError(f"policy.lr_backoff is {self.lr_backoff}", hint="give a factor above 0 and up to 1")

    @classmethod
    def strict(cls, **changes: Any) -> Policy:
        """Stop at the first bad step."""
        return cls(**{"mode": "stop", **changes})

    @classmethod
    def observe(cls, **changes: Any) -> Policy:
        """Record and let everything happen; nothing is vetoed."""
        return cls(**{"mode": "observe", "rerun": False, **changes})

    @classmethod
    def named(cls, name: str) -> Policy:
        """The policy called ``default``, ``strict`` or ``observe``."""
        one_of("policy", name, "default", "strict", "observe")
        return cls.strict() if name == "strict" else cls.observe() if name == "observe" else cls()


def _of_policy(*names: str) -> tuple[str, ...]:
    return tuple(f"policy.{name}" for name in names)


_COUNTS = _of_policy("spike_window", "max_consecutive", "max_skips", "per_steps", "lr_recovery")
_LIMITS = _of_policy("max_rollbacks", "max_restores", "max_lost_updates")
_AMOUNTS = _of_policy("snapshot_every", "snapshot_seconds", "locate_seconds", "heal_seconds", "deadline", "min_scale")
_OR_NONE = _of_policy("max_lost_updates", "snapshot_every", "locate_seconds")

MAX_REPEATS = 500
"""Bad steps on the same data before they count as a streak after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What has happened so far, as far as decisions depend on it."""

    consecutive: int = 0
    """Bad batches in a row, up to now; the same data counts once."""
    repeats: int = 0
    """Bad steps in a row on data that was bad before."""
    data: int | None = None
    """Which data the last bad step was trained on."""
    skips: tuple[int, ...] = ()
    """The steps at which new data was skipped, within the policy's window."""
    rollbacks: tuple[int, ...] = ()
    """The steps rolled back at, within ten of the policy's windows."""
    restores: int = 0

    def exceeds(self, policy: Policy) -> bool:
        """Whether so much was skipped that skipping must give way to going back."""
        many = self.consecutive > policy.max_consecutive or len(self.skips) > policy.max_skips
        return policy.mode == "protect" and many

    def after(self, action: Action, step: int, policy: Policy, data: int | None = None) -> History:
        """The history once ``action`` was taken on the step trained on ``data``."""
        recent = tuple(s for s in self.skips if s > step - policy.per_steps)
        rollbacks = tuple(s for s in self.rollbacks if s > step - 10 * policy.per_steps)
        fresh = {"consecutive": 0, "repeats": 0, "data": None}
        match action.kind:
            case "commit" | "rerun" | "heal":
                return dataclasses.replace(self, skips=recent, rollbacks=rollbacks, **fresh)  # type: ignore[arg-type]
            case "skip" if self.consecutive and data is not None and data == self.data:
                return dataclasses.replace(self, repeats=self.repeats + 1, skips=recent)
            case "skip":
                return dataclasses.replace(self, consecutive=self.consecutive + 1, skips=(*recent, step), data=data)
            case "rollback":
                return History(rollbacks=(*rollbacks, step), restores=self.restores)
            case "restore":
                return History(restores=self.restores + 1)
            case _:
                return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoveries:
    """What there is to go back to."""

    snapshot: int | None = None
    """How many updates a rollback would undo; None when there is no healthy snapshot."""
    checkpoint: bool = False
    repair: str = ""
    """A repair that was proved and is in force, in words."""
    repaired: bool = False
    """Whether the step itself was run again with it."""


def decide(verdict: Verdict, history: History, policy: Policy, recoveries: Recoveries) -> Action:
    """The answer to one verdict."""
    if verdict.kind in ("ok", "pending", "forecast", "dead", "unmoved"):
        return Action(kind="commit", reason="" if verdict.ok else "an early warning; the step itself is good")
    if policy.mode == "observe":
        return Action(kind="commit", reason="the policy only observes")
    if verdict.origin == "transient":
        return Action(kind="rerun", reason="the same step was good when run again")
    if policy.mode == "stop":
        return Action(kind="stop", reason="the policy stops at the first bad step")
    if recoveries.repair:
        return Action(kind="heal" if recoveries.repaired else "skip", reason=recoveries.repair)
    if verdict.kind == "guard-failed":
        if policy.on_guard_failure == "stop":
            return Action(kind="stop", reason="the guard itself failed and the policy stops then")
        return Action(kind="commit", reason="the guard itself failed; the gradients are finite")
    if verdict.kind == "spike":
        return _decide_spike(verdict, history, policy, recoveries)
    if verdict.level in ("parameter", "buffer") or verdict.origin == "state":
        # skipping cannot help: the next step starts from the same bad state
        return _climb("the training state itself is bad", history, policy, recoveries)
    if history.consecutive >= policy.max_consecutive:
        return _climb(f"{history.consecutive} bad steps in a row", history, policy, recoveries)
    if history.repeats >= MAX_REPEATS:
        return _climb(f"{history.repeats:,} bad steps in a row on the same data", history, policy, recoveries)
    recent = [s for s in history.skips if s > verdict.step - policy.per_steps]
    if len(recent) >= policy.max_skips:
        return _climb(f"{len(recent)} skips within {policy.per_steps:,} steps", history, policy, recoveries)
    return Action(kind="skip", reason=_why_skip(verdict))


def _decide_spike(verdict: Verdict, history: History, policy: Policy, recoveries: Recoveries) -> Action:
    if policy.spikes == "observe":
        return Action(kind="commit", reason="the policy lets spikes pass")
    if verdict.origin == "state":  # the weights are to blame, not the batch: skipping cannot help
        if _can_roll_back(history, policy, recoveries):
            return Action(kind="rollback", reason="the loss has diverged since a module was made a float32 island")
        return Action(kind="commit", reason="the loss has diverged, and there is nothing to go back to")
    if history.consecutive < policy.max_consecutive:
        return Action(kind="skip", reason="far outside the recent range")
    if _can_roll_back(history, policy, recoveries):
        return Action(kind="rollback", reason=f"{history.consecutive} spikes in a row")
    # finite and persistent: a new level, not a spike; a healthy run is never stopped for it
    return Action(kind="commit", reason="the new level persists and is finite; accepted as normal")


def _can_roll_back(history: History, policy: Policy, recoveries: Recoveries) -> bool:
    if recoveries.snapshot is None or len(history.rollbacks) >= policy.max_rollbacks:
        return False
    return policy.max_lost_updates is None or recoveries.snapshot <= policy.max_lost_updates


def _climb(why: str, history: History, policy: Policy, recoveries: Recoveries) -> Action:
    if _can_roll_back(history, policy, recoveries):
        return Action(kind="rollback", reason=why)
    if recoveries.checkpoint and history.restores < policy.max_restores:
        return Action(kind="restore", reason=f"{why}, and rolling back did not help" if history.rollbacks else why)
    tried = [
        f"{n} {word}{'s' if n > 1 else ''}"
        for n, word in ((len(history.rollbacks), "rollback"), (history.restores, "restore"))
        if n
    ]
    if tried:
        return Action(kind="stop", reason=f"{why} after {' and '.join(tried)}")
    lost = recoveries.snapshot
    if lost is not None and policy.max_lost_updates is not None and lost > policy.max_lost_updates:
        return Action(
            kind="stop",
            reason=f"{why}; the only snapshot is {lost:,} updates back, more than policy.max_lost_updates"
            f" ({policy.max_lost_updates:,})",
        )
    return Action(kind="stop", reason=f"{why}, with nothing to go back to")


def _why_skip(verdict: Verdict) -> str:
    return {
        "data": "this batch is bad from an older state too",
        "range": "finite in fp32: the range of the dtype is too small for this batch",
        None: "the update would have been harmful",
    }.get(verdict.origin, "the update would have been harmful")

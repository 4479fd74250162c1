"""What to do about a bad step: a pure function of the verdict, the history and what is at hand.

>>> from nanproof.records import Verdict
>>> bad = Verdict(kind="nonfinite", step=7, level="loss")
>>> decide(bad, History(), Policy(), Means(snapshot=True)).kind
'skip'
>>> decide(bad, History(consecutive=5), Policy(), Means(snapshot=True)).kind
'rollback'
>>> decide(bad, History(), Policy.strict(), Means()).kind
'stop'
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UsageError
from ..records import Action, Verdict

Mode = Literal["protect", "stop", "observe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the guard answers: skip, then roll back, then restore a checkpoint, then stop.

    `Policy()` protects, `Policy.strict()` stops at the first bad step, `Policy.observe()` only records.
    """

    mode: Mode = "protect"
    rerun: bool = True
    """Run a bad step again (needs a closure) to learn whether it is transient, range, data or state."""
    spikes: Literal["skip", "observe"] = "skip"
    max_consecutive: int = 5
    """Bad steps in a row before skipping gives way to rolling back."""
    max_skips: int = 50
    """Skips within ``per_steps`` steps before skipping gives way to rolling back."""
    per_steps: int = 1000
    max_rollbacks: int = 3
    """Rollbacks within ten times ``per_steps`` before a checkpoint is restored or the run stopped."""
    max_restores: int = 1
    lr_backoff: float = 0.5
    """The learning rate is multiplied by this after a rollback …"""
    lr_recovery: int = 200
    """… and returns to its schedule over that many steps."""
    min_scale: float = 1.0
    """GradScaler's scale is never allowed below this."""
    on_guard_failure: Literal["continue", "stop"] = "continue"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, ("protect", "stop", "observe"))
        _one_of("spikes", self.spikes, ("skip", "observe"))
        _one_of("on_guard_failure", self.on_guard_failure, ("continue", "stop"))
        for name in ("max_consecutive", "max_skips", "per_steps", "lr_recovery"):
            if getattr(self, name) < 1:
                raise UsageError(f"policy.{name} is {getattr(self, name)}", hint="give 1 or more")
        for name in ("max_rollbacks", "max_restores"):
            if getattr(self, name) < 0:
                raise UsageError(f"policy.{name} is {getattr(self, name)}", hint="give 0 or more")
        if not 0 < self.lr_backoff <= 1:
            raise UsageError(f"policy.lr_backoff is {self.lr_backoff}", hint="give a factor above 0 and up to 1")
        if not self.min_scale > 0:
            raise UsageError(f"policy.min_scale is {self.min_scale}", hint="give a positive number")

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
        _one_of("policy", name, ("default", "strict", "observe"))
        return cls.strict() if name == "strict" else cls.observe() if name == "observe" else cls()


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}", hint=f"use one of {', '.join(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What has happened so far, as far as decisions depend on it."""

    consecutive: int = 0
    """Bad steps in a row, up to now."""
    skips: tuple[int, ...] = ()
    """The steps skipped within the policy's window."""
    rollbacks: tuple[int, ...] = ()
    """The steps rolled back at, within ten of the policy's windows."""
    restores: int = 0

    def after(self, action: Action, step: int, policy: Policy) -> History:
        """The history once ``action`` was taken."""
        recent = tuple(s for s in self.skips if s > step - policy.per_steps)
        rollbacks = tuple(s for s in self.rollbacks if s > step - 10 * policy.per_steps)
        match action.kind:
            case "commit" | "rerun":
                return dataclasses.replace(self, consecutive=0, skips=recent, rollbacks=rollbacks)
            case "skip":
                return dataclasses.replace(self, consecutive=self.consecutive + 1, skips=(*recent, step))
            case "rollback":
                return dataclasses.replace(self, consecutive=0, skips=(), rollbacks=(*rollbacks, step))
            case "restore":
                return dataclasses.replace(self, consecutive=0, skips=(), rollbacks=(), restores=self.restores + 1)
            case _:
                return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What the guard has at hand to act with."""

    snapshot: bool = False
    checkpoint: bool = False


def decide(verdict: Verdict, history: History, policy: Policy, means: Means) -> Action:
    """The answer to one verdict."""
    if verdict.kind in ("ok", "headroom", "dead"):
        return Action(kind="commit", reason="" if verdict.ok else "an early warning; the step itself is good")
    if policy.mode == "observe":
        return Action(kind="commit", reason="the policy only observes")
    if verdict.origin == "transient":
        return Action(kind="rerun", reason="the same step was good when run again")
    if policy.mode == "stop":
        return Action(kind="stop", reason="the policy stops at the first bad step")
    if verdict.kind == "guard-failed":
        if policy.on_guard_failure == "stop":
            return Action(kind="stop", reason="the guard itself failed and the policy stops then")
        return Action(kind="commit", reason="the guard itself failed; the gradients are finite")
    if verdict.kind == "spike":
        return _decide_spike(verdict, history, policy, means)
    if verdict.level in ("parameter", "buffer") or verdict.origin == "state":
        # skipping cannot help: the next step starts from the same bad state
        return _climb("the training state itself is bad", history, policy, means)
    if history.consecutive >= policy.max_consecutive:
        return _climb(f"{history.consecutive} bad steps in a row", history, policy, means)
    recent = [s for s in history.skips if s > verdict.step - policy.per_steps]
    if len(recent) >= policy.max_skips:
        return _climb(f"{len(recent)} skips within {policy.per_steps:,} steps", history, policy, means)
    return Action(kind="skip", reason=_why_skip(verdict))


def _decide_spike(verdict: Verdict, history: History, policy: Policy, means: Means) -> Action:
    if policy.spikes == "observe":
        return Action(kind="commit", reason="the policy lets spikes pass")
    if history.consecutive < policy.max_consecutive:
        return Action(kind="skip", reason="far outside the recent range")
    if means.snapshot and len(history.rollbacks) < policy.max_rollbacks:
        return Action(kind="rollback", reason=f"{history.consecutive} spikes in a row")
    # finite and persistent: a new level, not a spike; a healthy run is never stopped for it
    return Action(kind="commit", reason="the new level persists and is finite; accepted as normal")


def _climb(why: str, history: History, policy: Policy, means: Means) -> Action:
    if means.snapshot and len(history.rollbacks) < policy.max_rollbacks:
        return Action(kind="rollback", reason=why)
    if means.checkpoint and history.restores < policy.max_restores:
        return Action(kind="restore", reason=f"{why}, and rolling back did not help" if history.rollbacks else why)
    tried = [
        f"{n} {word}{'s' if n > 1 else ''}"
        for n, word in ((len(history.rollbacks), "rollback"), (history.restores, "restore"))
        if n
    ]
    return Action(
        kind="stop", reason=why + (f" after {' and '.join(tried)}" if tried else ", with nothing to go back to")
    )


def _why_skip(verdict: Verdict) -> str:
    return {
        "data": "this batch is bad from an older state too",
        "range": "finite in fp32: the range of the dtype is too small for this batch",
        None: "the update would have been harmful",
    }.get(verdict.origin, "the update would have been harmful")

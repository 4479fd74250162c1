"""What happened in a run, counted, and said loudly at its end."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..records import Action, Verdict


class Tally:
    """Counts of steps, vetoes and their reasons."""

    def __init__(self) -> None:
        self.steps = 0
        """Optimizer steps attempted."""
        self.updates = 0
        """Optimizer steps that were carried out and not rolled back since."""
        self.overflows = 0
        """Ordinary GradScaler overflows: part of its search for a scale, not incidents."""
        self.dropped = 0
        """Single micro-batches dropped out of a window."""
        self.actions: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.failures: list[str] = []
        self.blocked: list[str] = []
        """Saves that were not carried out, each with its reason."""

    def count(self, verdict: Verdict, action: Action) -> None:
        self.actions[action.kind] += 1
        if not verdict.ok:
            origin = f", {verdict.origin}" if verdict.origin else ""
            self.kinds[f"{verdict.kind} {verdict.level or ''}".strip() + origin] += 1

    @property
    def clean(self) -> bool:
        return not self.kinds and not self.failures and not self.blocked

    def summary(self, where: str = "") -> str:
        """The end-of-run sentence.

        >>> Tally().summary()
        'nanproof: 0 steps, 0 updates; nothing went wrong'
        """
        parts = [f"nanproof: {self.steps:,} steps, {self.updates:,} updates"]
        for kind, word in (
            ("skip", "skipped"), ("rerun", "saved by a rerun"), ("rollback", "rolled back"),
            ("restore", "restored from a checkpoint"), ("stop", "stopped"),
        ):  # fmt: skip
            if self.actions[kind]:
                parts.append(f"{self.actions[kind]:,} {word}")
        if self.dropped:
            parts.append(f"{self.dropped:,} micro-batches dropped")
        if self.overflows:
            parts.append(f"{self.overflows:,} ordinary loss-scale overflows")
        line = ", ".join(parts)
        if self.clean:
            return f"{line}; nothing went wrong"
        why = "; ".join(f"{n:,} × {kind}" for kind, n in self.kinds.most_common())
        failed = (
            f"; the guard itself failed {len(self.failures)} times, first: {self.failures[0]}" if self.failures else ""
        )
        blocked = "".join(f"\n  not saved: {b}" for b in self.blocked)
        return f"{line}\n  why: {why or 'no bad step'}{failed}{blocked}" + (f"\n  incidents: {where}" if where else "")

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps, "updates": self.updates, "overflows": self.overflows, "dropped": self.dropped,
            "actions": dict(self.actions), "kinds": dict(self.kinds), "failures": list(self.failures),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.updates = state["steps"], state["updates"]
        self.overflows, self.dropped = state["overflows"], state["dropped"]
        self.actions, self.kinds = Counter(state["actions"]), Counter(state["kinds"])
        self.failures = list(state["failures"])

"""What happened in a run, counted so that it adds up, and said at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..records import Action, Repair, Verdict

KEPT_FAILURES = 20


class Tally:
    """Counts of steps and of how each ended.

    Every step is exactly one of: an update, skipped, an ordinary loss-scale overflow, or answered by going back or
    stopping. Updates in force are the updates made, less those that a rollback or a restore has undone.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Optimizer steps judged."""
        self.updates = 0
        """Optimizer updates in force: made, and not undone since."""
        self.undone = 0
        """Updates that a rollback or a restore has undone."""
        self.overflows = 0
        """Ordinary GradScaler overflows: part of its search for a scale, not incidents."""
        self.dropped = 0
        """Single micro-batches left out of a window."""
        self.abandoned = 0
        """Steps in which the loop itself raised an exception; they are undone, and not counted as steps."""
        self.discarded = 0
        """Passes that were not finite and that the loop itself threw away; they are no steps."""
        self.actions: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self.failed = 0
        """How often the guard itself failed."""
        self.failures: list[str] = []
        self.blocked: list[str] = []
        """Saves that were not carried out, each with its reason."""

    def count(self, verdict: Verdict, action: Action, *, step: bool = True) -> None:
        """One step is over; without ``step`` the state was answered for between two steps."""
        self.steps += step
        self.actions[action.kind] += 1
        if not verdict.ok:
            self.kinds[_name(verdict)] += 1

    def fail(self, said: str) -> None:
        """The guard itself failed; the first ones are kept in words."""
        self.failed += 1
        if len(self.failures) < KEPT_FAILURES:
            self.failures.append(said)

    def warn(self, verdict: Verdict) -> None:
        """An early warning about a step that was good."""
        self.warnings[_name(verdict)] += 1

    def go_back_to(self, update: int) -> int:
        """Updates after ``update`` are undone; how many."""
        lost = max(0, self.updates - update)
        self.undone += lost
        self.updates = update
        return lost

    @property
    def clean(self) -> bool:
        """Whether every step was judged and good, and nothing failed."""
        lost = self.dropped or self.abandoned or self.discarded
        return self.steps > 0 and not (self.kinds or self.warnings or self.failures or self.blocked or lost)

    def summary(self, where: str = "", repairs: Sequence[Repair] = ()) -> str:
        """The end-of-run sentence; a run that was good because of ``repairs`` names them.

        >>> tally = Tally(); tally.summary()
        'nanproof: no step was taken'
        >>> tally.count(Verdict(kind="ok", step=1), Action(kind="commit")); tally.updates = 1; tally.summary()
        'nanproof: 1 step, 1 update; nothing went wrong'
        >>> tally.summary(repairs=[Repair(path="AdamW", kind="eps", step=1, value=0.003)])
        'nanproof: 1 step, 1 update; all good since the repair: AdamW steps with eps 0.003'
        """
        if not self.steps and not self.abandoned and not self.failures:
            return "nanproof: no step was taken"
        parts = [_plural(self.steps, "step"), _plural(self.updates, "update") + (" in force" if self.undone else "")]
        words = (
            (self.actions["skip"] - self.overflows, "skipped"),
            (self.overflows, "skipped by the loss scaler"),
            (self.actions["rerun"], "saved by a rerun"),
            (self.actions["heal"], "healed"),
            (self.actions["rollback"], "rolled back"),
            (self.actions["restore"], "restored from a checkpoint"),
            (self.undone, f"update{'' if self.undone == 1 else 's'} undone"),
            (self.actions["stop"], "stopped"),
            (self.dropped, f"micro-batch{'' if self.dropped == 1 else 'es'} dropped"),
            (self.abandoned, "ended by an exception"),
            (self.discarded, "not finite and left out by the script"),
        )
        parts += [f"{n:,} {word}" for n, word in words if n > 0]
        line = f"nanproof: {', '.join(parts)}"
        if self.clean:
            return f"{line}; {_repaired(repairs) or 'nothing went wrong'}"
        lines = [line]
        if self.kinds:
            lines.append("  why: " + "; ".join(f"{n:,} × {kind}" for kind, n in self.kinds.most_common()))
        if self.warnings:
            lines.append("  warnings: " + "; ".join(f"{n:,} × {kind}" for kind, n in self.warnings.most_common()))
        if self.failures:
            times = "once" if self.failed == 1 else f"{self.failed:,} times"
            lines.append(f"  the guard itself failed {times}, first: {self.failures[0]}")
        lines += [f"  not saved: {b}" for b in self.blocked]
        return "\n".join([*lines, f"  incidents: {where}"] if where else lines)

    def state_dict(self) -> dict[str, Any]:
        return {
            k: dict(v) if isinstance(v, Counter) else list(v) if isinstance(v, list) else v
            for k, v in vars(self).items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            old = getattr(self, key)
            setattr(self, key, Counter(value) if isinstance(old, Counter) else type(old)(value))


def _name(verdict: Verdict) -> str:
    origin = f", {verdict.origin}" if verdict.origin else ""
    return f"{verdict.kind} {verdict.level or ''}".strip() + origin


def _repaired(repairs: Sequence[Repair]) -> str:
    if not repairs:
        return ""
    said = "; ".join(f"{r.name} {r.does}" for r in repairs)
    return f"all good since the repair{'s' if len(repairs) > 1 else ''}: {said}"


def _plural(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"

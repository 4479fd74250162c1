"""Comparing a checkpoint with the configuration before anything of it is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .training import Training

# what an optimizer group is configured with; a schedule moves lr itself
_OPTIONS = (
    "lr",
    "initial_lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
)
# what a scheduler counts while it runs, as opposed to what it was configured with
_RUNNING = {
    "last_epoch",
    "_step_count",
    "_last_lr",
    "verbose",
    "_get_lr_called_within_step",
    "_is_initial",
    "best",
    "num_bad_epochs",
    "cooldown_counter",
    "_schedulers",
    "T_cur",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What a resume found: what is restored, and what disagrees with the configuration."""

    path: str
    update: int
    learning_rate: float
    facts: tuple[str, ...] = ()
    drifts: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"resume {self.path}: update {self.update:,}, lr {self.learning_rate:.4g}"]
        lines += [f"  ok     {f}" for f in self.facts]
        lines += [f"  DRIFT  {d}" for d in self.drifts]
        return "\n".join(lines)


def find_drifts(training: Training, state: dict[str, Any]) -> list[str]:
    """Where the checkpoint's schedule and options differ from the configured ones."""
    found = []
    for i, (scheduler, saved) in enumerate(zip(training.schedulers, state["schedulers"], strict=False)):
        configured = scheduler.state_dict()
        for key, value in saved.items():
            if key in configured and key not in _RUNNING and _differs(value, configured[key]):
                found.append(_drift(f"scheduler {i} {key}", value, configured[key]))
    for i, (optimizer, saved) in enumerate(zip(training.optimizers, state["optimizers"], strict=False)):
        for j, (group, old) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=False)):
            for key in _OPTIONS:
                if training.schedulers and key in _scheduled(group):
                    continue  # moves with the schedule; initial_lr, max_lr, base_lrs say what was configured
                if key in group and key in old and _differs(old[key], group[key]):
                    found.append(_drift(f"optimizer {i} group {j} {key}", old[key], group[key]))
    found += _out_of_force(state)
    for name in ("optimizers", "schedulers"):
        mine, theirs = len(getattr(training, name)), len(state[name])
        if mine != theirs and not training.sharded:
            found.append(f"{name}: checkpoint has {theirs}, configured {mine}")
    return found


def compare_counters(state: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Whether optimizer, scheduler and guard count the same number of updates: what agrees, what does not."""
    updates = state["guard"]["tally"]["updates"]
    counts = {f"scheduler {i}": s["last_epoch"] for i, s in enumerate(state["schedulers"]) if "last_epoch" in s}
    for i, optimizer in enumerate(state["optimizers"]):
        steps = {int(s["step"]) for s in optimizer["state"].values() if "step" in s}
        if steps:
            counts[f"optimizer {i}"] = max(steps)
    apart = ", ".join(f"{k} at {v:,}" for k, v in counts.items() if v != updates)
    if apart:
        return [], [f"step counters disagree: guard at {updates:,}, {apart}"]
    return [f"guard, optimizers and schedulers all count {updates:,} updates"], []


def saved_lr(state: dict[str, Any], training: Training) -> float:
    """The learning rate that the checkpoint would put in force."""
    groups = state["optimizers"][0]["param_groups"] if state["optimizers"] else training.optimizers[0].param_groups
    return float(groups[0]["lr"])


def _out_of_force(state: dict[str, Any]) -> list[str]:
    """Where the checkpoint's learning rate in force is not the one that its own schedule last gave."""
    rates = [float(g["lr"]) for o in state["optimizers"] for g in o["param_groups"]]
    given = [float(v) for s in state["schedulers"] for v in s.get("_last_lr", [])]
    if len(given) != len(rates) or not _differs(rates, given):
        return []
    return [f"learning rate in force {_short(rates)}, the checkpoint's schedule says {_short(given)}"]


def _scheduled(group: dict[str, Any]) -> tuple[str, ...]:
    """What a schedule moves; those that cycle momentum leave its bounds in the group."""
    cycles = "max_momentum" in group or "base_momentum" in group
    return ("lr", "betas", "momentum") if cycles else ("lr",)


def _drift(what: str, saved: Any, configured: Any) -> str:
    return f"{what}: checkpoint {_short(saved)}, configured {_short(configured)}"


def _differs(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) != len(b) or any(_differs(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, int | float | Tensor) and isinstance(b, int | float | Tensor):
        return not math.isclose(float(a), float(b), rel_tol=1e-6)
    return False if isinstance(a, dict) or callable(a) else bool(a != b)


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_short(v) for v in value[:4]) + (", …]" if len(value) > 4 else "]")
    return f"{float(value):.4g}" if isinstance(value, float | Tensor) else str(value)

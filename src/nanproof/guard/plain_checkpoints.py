"""Checkpoints that a plain loop wrote with torch.save, converted to the form that the guard reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import FormatError
from .tally import Tally
from .update import Backoff

# the names that loops and trainers give to the same things
_NAMES = {
    "model": ("model", "state_dict", "model_state_dict", "model_state", "net", "module", "weights"),
    "optimizers": ("optimizer", "optimizers", "optimizer_state_dict", "optimizer_states", "optim", "opt"),
    "schedulers": ("scheduler", "schedulers", "lr_scheduler", "scheduler_state_dict", "lr_schedulers", "sched"),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler", "amp_scaler"),
    "ema": ("ema", "ema_state_dict", "model_ema", "ema_model"),
}


def read_plain(state: Any, name: str) -> dict[str, Any]:
    """The parts of a plain checkpoint under the guard's names; its update count is the optimizer's."""
    if not isinstance(state, Mapping):
        raise FormatError(f"{name} holds a {type(state).__name__}, not a dictionary of states")
    parts = {part: next((state[n] for n in names if n in state), None) for part, names in _NAMES.items()}
    if state and all(isinstance(v, Tensor) for v in state.values()):
        parts["model"] = state  # a bare state_dict
    if not isinstance(parts["model"], Mapping):
        raise FormatError(
            f"{name} has no model state among its keys {sorted(map(str, state))[:8]}",
            hint=f"save it under one of {', '.join(_NAMES['model'])}, or load it yourself and then make the Guard",
        )
    optimizers, schedulers = _listed(parts["optimizers"]), _listed(parts["schedulers"])
    tally = Tally()
    tally.updates = max(
        [int(s["step"]) for o in optimizers for s in o["state"].values() if "step" in s]
        or [s.get("last_epoch", 0) for s in schedulers]
        or [0]
    )
    guard = {"tally": tally.state_dict(), "groups": [], "backoff": Backoff().state_dict()}
    return {
        "model": parts["model"],
        "optimizers": optimizers,
        "schedulers": schedulers,
        "scaler": parts["scaler"],
        "ema": parts["ema"],
        "guard": guard,
        "random": None,
    }


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]

"""What a checkpoint would restore besides tensors: learning rates, steps, loss scale, saved arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .inert import ArrayRef
from .report import Settings
from .tree import dicts

_ARGUMENTS = {
    "learning_rate",
    "fp16",
    "bf16",
    "max_grad_norm",
    "adam_epsilon",
    "adam_beta1",
    "adam_beta2",
    "weight_decay",
    "warmup_steps",
    "warmup_ratio",
    "logging_nan_inf_filter",
    "gradient_accumulation_steps",
    "fp16_full_eval",
    "gradient_clip_val",
    "precision",
    "lr",
    "eps",
}


def number(value: Any) -> float | None:
    """A plain number, also from a zero-dimensional numpy array; None for all else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return float(value) if abs(value) < 1 << 1000 else None
    if isinstance(value, float):
        return float(value)
    if isinstance(value, ArrayRef) and value.shape == () and value.dtype.lstrip("<|=") in ("f8", "f4", "i8", "i4"):
        import numpy as np

        try:
            return float(np.frombuffer(value.data, value.dtype)[0])
        except (ValueError, IndexError, TypeError):
            return None
    return None


def _whole(value: Any) -> int | None:
    found = number(value)
    return int(found) if found is not None and math.isfinite(found) else None


def _first(value: Any) -> float | None:
    if isinstance(value, list | tuple):
        return next((n for n in map(number, value) if n is not None), None)
    return number(value)


class Gatherer:
    """Collects settings from the trees of all files of one checkpoint; the first word on each counts."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.arguments: dict[str, Any] = {}
        self.steps: list[int] = []

    def add(self, key: str, value: Any) -> None:
        if value is not None:
            self.found.setdefault(key, value)

    def take_tree(self, tree: Any) -> None:
        """Look through every dictionary of a pickle."""
        for name, d in dicts(tree):
            if isinstance(d.get("param_groups"), list):
                self._take_groups(d["param_groups"])
            for key in d if not name else ():
                self._take_flat(key, d[key])
            if "base_lrs" in d or "_last_lr" in d:
                self._take_scheduler(d)
            if "growth_factor" in d and "backoff_factor" in d:
                self.add("scale", number(d.get("scale")))
            if not name:
                for key in ("global_step", "global_steps", "step", "iteration"):
                    self.add("step", _whole(d.get(key)))
                self.add("epoch", _whole(d.get("epoch")))
            if "state" in d and isinstance(d["state"], dict):
                self._take_steps(d["state"].values())
            self.take_arguments(d)

    def _take_flat(self, key: Any, value: Any) -> None:
        """DCP flattens: ``optim.param_groups.0.weight.lr`` is a key of its own."""
        found = re.fullmatch(r"(?:.*\.)?param_groups\..*\.(lr|initial_lr|eps|weight_decay|betas)", str(key))
        if found and found[1] == "betas":
            self._take_groups([{"betas": value}])
        elif found:
            self.add(found[1], number(value))

    def take_arguments(self, values: Mapping[Any, Any]) -> None:
        """Saved training arguments: at least two of the names that they have."""
        known = {k: v for k, v in values.items() if isinstance(k, str) and k in _ARGUMENTS}
        if len(known) < 2 or "params" in values:
            return
        for key, value in known.items():
            if isinstance(value, bool | str | None):
                self.arguments.setdefault(key, value)
            elif (n := number(value)) is not None:
                self.arguments.setdefault(key, n)
        for key in ("warmup_steps", "num_warmup_steps"):
            self.add("warmup", number(values.get(key)))

    def take_trainer_state(self, state: Mapping[str, Any]) -> None:
        """``trainer_state.json`` of the HF Trainer."""
        self.add("step", _whole(state.get("global_step")))
        self.add("trainer_step", _whole(state.get("global_step")))
        self.add("epoch", _whole(state.get("epoch")))

    def _take_groups(self, groups: Iterable[Any]) -> None:
        for group in groups:
            if not isinstance(group, dict):
                continue
            for key in ("lr", "initial_lr", "max_lr", "eps", "weight_decay"):
                self.add(key, number(group.get(key)))
            if number(group.get("max_momentum")) is not None:
                self.add("cycled", True)
            betas = group.get("betas")
            if isinstance(betas, tuple | list):
                found = [number(b) for b in betas[:3]]
                self.add("betas", tuple(b for b in found if b is not None) or None)

    def _take_scheduler(self, d: dict[Any, Any]) -> None:
        self.add("base_lr", _first(d.get("base_lrs")))
        self.add("last_lr", _first(d.get("_last_lr")))
        self.add("scheduler_step", _whole(d.get("last_epoch")))
        for key in ("warmup_steps", "num_warmup_steps", "warmup"):
            self.add("warmup", number(d.get(key)))

    def _take_steps(self, states: Iterable[Any]) -> None:
        for state in states:
            if isinstance(state, dict) and (step := _whole(state.get("step"))) is not None:
                self.steps.append(step)

    def finish(self) -> Settings:
        """The settings as one record."""
        steps = (min(self.steps), max(self.steps)) if self.steps else None
        return Settings(**self.found, optimizer_steps=steps, arguments=self.arguments)

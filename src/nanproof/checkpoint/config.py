"""What a checkpoint would restore, against the numbers of a config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from .report import Settings


class Difference(NamedTuple):
    """One setting that a checkpoint would restore otherwise than configured."""

    setting: str
    checkpoint: float
    config: float
    key: str
    """The dotted key in the config file."""

    def __str__(self) -> str:
        return f"checkpoint will restore {self.setting} {self.checkpoint:.4g}, config says {self.config:g} ({self.key})"


# setting: what it is called in the checkpoint's settings, and by which keys configs know it
_KEYS = {
    "lr": ("initial_lr base_lr max_lr lr", r"(?:.*\.)?(?:lr|learning_rate|base_lr|max_lr|peak_lr)"),
    "beta1": ("beta1", r"(?:.*\.)?(?:adam_)?(?:beta1|betas\.0)"),
    "beta2": ("beta2", r"(?:.*\.)?(?:adam_)?(?:beta2|betas\.1)"),
    "eps": ("eps", r"(?:.*(?:optim|adam|train)\w*\.)?(?:eps|adam_epsilon|adam_eps|epsilon)"),
    "warm-up": ("warmup", r"(?:.*\.)?(?:num_)?warm_?up(?:_steps|_iters|_epochs)?"),
}


def differences(settings: Settings, config: Mapping[str, float]) -> tuple[Difference, ...]:
    """Every setting on which both have a word and the words differ; ``config`` holds numbers by dotted key."""
    betas = settings.betas or ()
    known = {
        "initial_lr": settings.initial_lr,
        "base_lr": settings.base_lr,
        "lr": settings.lr,
        "max_lr": settings.max_lr,
        "eps": settings.eps,
        "beta1": betas[0] if betas and not settings.cycled else None,
        "beta2": betas[1] if len(betas) > 1 else None,
        "warmup": settings.warmup,
    }
    found = []
    for setting, (sources, pattern) in _KEYS.items():
        key = min((k for k in config if re.fullmatch(pattern, k.lower())), key=len, default=None)
        values = [v for s in sources.split() if (v := known[s]) is not None]
        if key is None or not values:
            continue
        expected = config[key]
        # the peak or base rate decides; the momentary one is what a schedule makes of it
        if all(abs(v - expected) > 1e-6 * max(abs(v), abs(expected)) for v in values):
            shown = settings.lr if setting == "lr" and settings.lr is not None else values[0]
            found.append(Difference(setting=setting, checkpoint=shown, config=expected, key=key))
    return tuple(found)

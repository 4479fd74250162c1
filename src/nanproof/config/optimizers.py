"""Which optimizer a config means, and what kind it is."""

from __future__ import annotations

import re

from .calls import OPTIMIZERS
from .dialect import dialect_of
from .meaning import Meaning
from .value import Settings

_ADAM = re.compile(r"adam|lamb\b|lion|adabelief|amsgrad", re.I)
_FACTOR = re.compile(r"noam|transformer|rsqrt|inverse|prodigy|dadapt|lambda", re.I)
_HIGHEST = (
    ("adadelta", 3.0),
    ("prodigy", 3.0),
    ("dadapt", 3.0),
    ("adagrad", 0.2),
    ("adafactor", 0.05),
    ("ada", 3e-3),
    ("lion", 3e-3),
    ("sgd", 0.11),
    ("", 0.05),
)
_NO_RATE = re.compile(r"prodigy|dadapt|d_adapt|dadam|adafactor|schedule_?free|mechanize", re.I)


def optimizer_of(settings: Settings, meaning: Meaning) -> str:
    """The optimizer's name; '' when nothing tells.

    The HF trainers use AdamW by default.
    """
    for value in meaning.all("optimizer"):
        if value.known and isinstance(value.value, str) and value.value:
            return value.value.rpartition(".")[2]
    used = {v.key.partition(".")[0] for v in settings if v.origin == "call"} & OPTIMIZERS
    if len(used) == 1:
        return used.pop()
    hf = any(v.origin == "call" and v.key.partition(".")[0].endswith(("Arguments", "Config")) for v in settings)
    if hf or dialect_of(v.key for v in settings) == "transformers":
        return "AdamW"
    return "Adam" if any(meaning.get(c) for c in ("beta1", "beta2", "betas")) else ""


def is_adam(name: str) -> bool:
    """Whether a step of the optimizer is about as large as the learning rate.

    >>> is_adam("torch.optim.AdamW"), is_adam("adamw_torch_fused"), is_adam("SGD"), is_adam("Prodigy")
    (True, True, False, False)
    """
    return bool(_ADAM.search(name)) and not _NO_RATE.search(name)


def highest_rate(name: str) -> float:
    """The learning rate above which training with this optimizer rarely survives.

    >>> highest_rate("AdamW"), highest_rate("Adadelta"), highest_rate("")
    (0.003, 3.0, 0.05)
    """
    return next(limit for part, limit in _HIGHEST if part in name.lower())


def scales_rate(scheduler: str) -> bool:
    """Whether a schedule takes the configured rate for a factor, as Noam's does: 2.0 is right there."""
    return bool(_FACTOR.search(scheduler))

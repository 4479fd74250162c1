"""A learning rate that cannot be meant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePath

from ...records import Finding
from ..check import Check, report
from ..meaning import Meaning
from ..optimizers import is_adam, optimizer_of, scales_rate
from ..project import Project
from ..value import Settings, show

HIGHEST = 0.05
LOWEST = 1e-9


def check(settings: Settings, project: Project) -> Iterator[Finding]:
    meaning = Meaning.of(settings)
    value, lr = meaning.get("lr"), meaning.number("lr")
    if value is None or lr is None or _is_test(value.path):
        return
    if not math.isfinite(lr) or lr < 0:
        yield report("NP703", value, f"{value.label} is {show(value.value)}", "give a positive number")
        return
    if not is_adam(optimizer_of(settings, meaning)) or _is_factor(meaning, lr):
        return
    if lr > HIGHEST:
        yield report(
            "NP703",
            value,
            f"{value.label} is {lr:g} with {optimizer_of(settings, meaning)}: a step moves each weight by about {lr:g}",
            "rates for Adam lie between 1e-5 and 1e-2",
        )
    elif 0 < lr < LOWEST:
        yield report(
            "NP703",
            value,
            f"{value.label} is {lr:g}: steps that small are rounded away on weights above {lr * 2**24:.0e}",
            "rates for Adam lie between 1e-5 and 1e-2",
        )


def _is_test(path: str) -> bool:
    """Tests set rates on purpose that nobody would train with."""
    file = PurePath(path)
    return file.name.startswith("test_") or file.stem.endswith("_test") or "tests" in file.parts[-4:-1]


def _is_factor(meaning: Meaning, lr: float) -> bool:
    """Whether the rate is a factor of a schedule: NoamAnnealing multiplies it by d_model^-0.5 and warm-up terms."""
    scheduler = meaning.word("scheduler")
    if scheduler:
        return scales_rate(scheduler)
    warms = any(meaning.number(c) for c in ("warmup_steps", "warmup_ratio", "warmup_epochs"))
    return warms and lr >= 0.5


CHECK = Check(
    code="NP703",
    name="lr-out-of-range",
    what="Reports a learning rate for Adam and its relatives above 0.05 or below 1e-9, and one that is negative or not "
    "finite. With NoamAnnealing and its kind the rate is a factor, and 2.0 is right. Tests are left alone.",
    why="Adam normalizes the gradient, so one step moves each weight by about the learning rate itself, whatever the "
    "loss. Weights of a trained network are around 0.02: a step of 0.1 replaces them.",
    bad="optimizer:\n  type: AdamW\n  lr: 1.0\nepochs: 10\n",
    good="optimizer:\n  type: AdamW\n  lr: 1.0e-3\nepochs: 10\n",
    false_alarm="When the code multiplies the rate by a schedule of its own.",
    check=check,
)

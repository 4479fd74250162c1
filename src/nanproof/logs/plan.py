"""How a record of some keys is read: which of them is the step, the epoch, a limit, a column.

>>> plan = make_plan(("loss", "lr", "epoch", "current_steps", "total_steps", "percentage"))
>>> plan.step, plan.epoch, plan.limits, plan.columns
('current_steps', 'epoch', (('total_steps', 'max_steps'),), ('loss', 'lr'))
"""

from __future__ import annotations

import datetime
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import numbers
from .names import EPOCH_KEYS, IGNORED, LAST_STEP_KEYS, LOGGING_KEYS, MODE_KEYS, STEP_KEYS, meaning, pick
from .series import Floats, Ints


class Plan(NamedTuple):
    """How the records with one set of keys are read."""

    step: str | None
    epoch: str | None
    mode: str | None
    limits: tuple[tuple[str, str], ...]
    """Keys that tell ``max_steps`` or ``logging_steps``."""
    columns: tuple[str, ...]
    counts: bool
    """Whether such a record is a step of training, and not only a judgement between two."""
    telling: tuple[str, ...] = ()
    """The columns of losses and norms."""


def make_plan(keys: tuple[str, ...]) -> Plan:
    """The plan for records with these keys."""
    step, epoch, mode = pick(keys, STEP_KEYS), pick(keys, EPOCH_KEYS), pick(keys, MODE_KEYS)
    named = (("max_steps", pick(keys, LAST_STEP_KEYS)), ("logging_steps", pick(keys, LOGGING_KEYS)))
    limits = tuple((key, attribute) for attribute, key in named if key is not None)
    taken = {step, epoch, mode, *(key for key, _ in limits)}
    columns = tuple(k for k in keys if k not in taken and wanted(k))
    telling = tuple(k for k in columns if meaning(k).role in ("loss", "component", "grad_norm", "eval"))
    counts = any(meaning(k).role != "eval" for k in telling)
    return Plan(step, epoch, mode, limits, columns, counts, telling)


def wanted(key: str) -> bool:
    """Whether a key can be a column; names that start with an underline are the tools' own affairs."""
    plain = key.strip().lower()
    if not plain or len(plain) > 200 or plain in IGNORED or plain.endswith((".py", ".cpp", ".cc", ".c")):
        return False
    return plain[0] != "_" or plain == "_timestamp"


def flatten(record: Mapping[Any, object], prefix: str = "", depth: int = 0) -> dict[str, object]:
    """A record without inner objects: ``{"train": {"loss": 1}}`` has the key ``train/loss``."""
    flat: dict[str, object] = {}
    for key, inner in record.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping):
            if depth < 4:
                flat |= flatten(inner, f"{name}/", depth + 1)
        else:
            flat[name] = inner
    return flat


def read_step(value: object) -> tuple[int | None, int | None]:
    """The step, and the last step where both are told.

    >>> read_step("8265/11043"), read_step(7.0), read_step("?")
    ((8265, 11043), (7, None), (None, None))
    """
    if isinstance(value, str) and "/" in value:
        done, _, last = value.partition("/")
        return numbers.whole(done), numbers.whole(last)
    return numbers.whole(value), None


def read_value(key: str, value: object) -> float | None:
    """The number of a column; a clock time becomes seconds."""
    if meaning(key).role != "time":
        return numbers.of(value)
    number = numbers.of(value)
    if number is None and isinstance(value, str) and len(value) <= 40:
        try:
            return datetime.datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    return number / 1000 if number is not None and number > 1e11 else number  # milliseconds


class Block(NamedTuple):
    """Many records with the same keys, column by column."""

    steps: Ints
    epochs: Floats | None
    columns: tuple[tuple[str, Floats, NDArray[np.bool_] | None], ...]
    """Name and numbers, and where they belong if some records have none."""


def make_block(plan: Plan, keys: tuple[str, ...], records: Sequence[dict[str, Any]]) -> Block | None:
    """The records column by column; None if they do not all have these keys, an integer step, a plain epoch."""
    if set(map(len, records)) != {len(keys)}:
        return None
    steps, epochs, columns = None, None, []
    try:
        for key in keys:
            values = [record[key] for record in records]  # one with another key, being as long, lacks one of these
            if key == plan.step:
                steps = np.frombuffer(array("q", values), np.int64)
            elif key == plan.epoch:
                epochs = np.frombuffer(array("d", values), np.float64)
            elif key in plan.columns:
                columns.append(_column(key, values))
                if key in plan.telling and any(isinstance(v, str) and v and numbers.of(v) is None for v in values):
                    return None  # a word where a number belongs is told one by one
    except (KeyError, TypeError, OverflowError):
        return None
    if steps is None or (epochs is not None and not (np.abs(epochs) < 2**53).all()):
        return None
    return Block(steps, epochs, tuple(columns))


def _column(key: str, values: list[Any]) -> tuple[str, Floats, NDArray[np.bool_] | None]:
    if meaning(key).role != "time":
        with suppress(TypeError, OverflowError):
            return key, np.frombuffer(array("d", values), np.float64), None
    read = [read_value(key, v) for v in values]
    there = np.array([v is not None for v in read])
    return key, np.array([v for v in read if v is not None], np.float64), there

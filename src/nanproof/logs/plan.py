"""How a record of some keys is read: which of them is the step, the epoch, a limit, a column.

>>> plan = make_plan(("loss", "lr", "epoch", "current_steps", "total_steps", "percentage"))
>>> plan.step, plan.epoch, plan.limits, plan.columns
('current_steps', 'epoch', (('total_steps', 'max_steps'),), ('loss', 'lr'))
"""

from __future__ import annotations

import datetime
from array import array
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from . import numbers
from .names import EPOCH_KEYS, IGNORED, LAST_STEP_KEYS, LOGGING_KEYS, MODE_KEYS, STEP_KEYS, meaning, pick
from .series import Floats, Ints

Table = Mapping[str, tuple[Any, ...]]


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
    nested: bool = False


def make_plan(keys: tuple[str, ...]) -> Plan:
    """The plan for records with these keys."""
    step, epoch, mode = pick(keys, STEP_KEYS), pick(keys, EPOCH_KEYS), pick(keys, MODE_KEYS)
    named = (("max_steps", pick(keys, LAST_STEP_KEYS)), ("logging_steps", pick(keys, LOGGING_KEYS)))
    limits = tuple((key, attribute) for attribute, key in named if key is not None)
    taken = {step, epoch, mode, *(key for key, _ in limits)}
    columns = tuple(k for k in keys if k not in taken and wanted(k))
    counts = any(meaning(k).role in ("loss", "component", "grad_norm") for k in columns)
    return Plan(step, epoch, mode, limits, columns, counts)


def wanted(key: str) -> bool:
    """Whether a key can be a column; names that start with an underline are the tools' own affairs."""
    plain = key.strip().lower()
    return bool(plain) and plain not in IGNORED and (plain[0] != "_" or plain == "_timestamp") and len(plain) <= 200


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


def table(keys: tuple[str, ...], records: Sequence[dict[str, Any]]) -> Table | None:
    """The records column by column, or None if one of them has other keys."""
    if len(keys) < 2 or set(map(len, records)) != {len(keys)}:
        return None
    try:
        return dict(zip(keys, zip(*map(itemgetter(*keys), records), strict=True), strict=True))
    except KeyError:
        return None


def ints(values: tuple[Any, ...]) -> Ints | None:
    """An array, if all are integers of 64 bits."""
    try:
        return np.frombuffer(array("q", values), np.int64)
    except (TypeError, OverflowError):
        return None


def floats(values: tuple[Any, ...]) -> Floats | None:
    """An array, if all are numbers."""
    try:
        return np.frombuffer(array("d", values), np.float64)
    except (TypeError, OverflowError):
        return None

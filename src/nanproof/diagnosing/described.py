"""An incident as a person described it: the nine fields of ``--evidence``, and nothing else of the file.

>>> evidence, notes = read_description({"symptoms": "nan with padding", "flags": ["loss-nan"], "confirmed_cause": "x"})
>>> sorted({f.name for f in evidence}), notes
(['about', 'loss-nan'], ('ignored: confirmed_cause (not a field of evidence)',))
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import FormatError, UsageError
from ..files import file_text
from .bugs import find_bugs, read_versions
from .curves import MAX_ROWS, read_rows
from .evidence import Evidence, Fact
from .machines import read_hardware
from .precisions import find_format, read_precision
from .vocabulary import FLAGS, ONSETS
from .wording import read_text

FIELDS = ("framework", "model", "symptoms", "onset", "flags", "series", "precision", "training", "hardware")
MAX_BYTES = 4 << 20

_NAMES = {"warmup_iters": "warmup", "warmup_samples": "warmup", "lr_base": "lr-base", "lr_last": "lr-last"}


def load_description(path: str) -> tuple[Evidence, tuple[str, ...]]:
    """The evidence in a JSON file, and a word about each field that was left out."""
    file = Path(path)
    try:
        size = file.stat().st_size
        data = json.loads(file_text(file, encoding="utf-8-sig")) if size <= MAX_BYTES else None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="give a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}", hint="see docs/diagnose.md for the fields") from None
    if size > MAX_BYTES:
        raise UsageError(f"{path} is too large for a description", hint="give a JSON file of the nine fields")
    if not isinstance(data, dict):
        raise FormatError(f"{path} is not an object of fields", hint=f"fields are {', '.join(FIELDS)}")
    return read_description(data)


def read_description(data: Mapping[str, Any]) -> tuple[Evidence, tuple[str, ...]]:
    """The facts in a description. What cannot be understood is named in the notes, never guessed at."""
    notes = [f"ignored: {str(k)[:60]} (not a field of evidence)" for k in data if k not in FIELDS][:20]
    facts: list[Fact] = []
    for name in ("framework", "model", "symptoms", "hardware"):
        text = data.get(name)
        if isinstance(text, str):
            facts += [*read_text(text, where=name), *read_versions(text, where=name)]
        elif text is not None:
            notes.append(f"ignored: {name} is not a text")
    if isinstance(data.get("hardware"), str):
        facts += read_hardware(data["hardware"], where="hardware")
    for name in ("symptoms", "model"):  # machines are also named there: "multi-node", "MPS"
        if isinstance(data.get(name), str):
            facts += (f for f in read_hardware(data[name], where=name) if f.name in ("several-nodes", "several-gpus"))
            facts += (f for f in read_hardware(data[name], where=name) if f.value in ("apple", "amd", "npu"))
    facts += _onset(data.get("onset"), notes)
    facts += _flags(data.get("flags"), notes)
    facts += _series(data.get("series"), notes)
    facts += _precision(data.get("precision"), notes)
    facts += _training(data.get("training"), notes)
    evidence = Evidence.of(*facts)
    return evidence.plus(*find_bugs(evidence)), tuple(notes)


def _onset(value: Any, notes: list[str]) -> Iterator[Fact]:
    if isinstance(value, str) and value in ONSETS:
        yield Fact(name="onset", value=value, where="onset")
    elif value is not None:
        notes.append(f"ignored: onset {str(value)[:40]!r} is not in the vocabulary")


def _flags(value: Any, notes: list[str]) -> Iterator[Fact]:
    if value is not None and not isinstance(value, list):
        notes.append("ignored: flags is not a list")
        return
    for flag in (value or [])[:200]:
        if isinstance(flag, str) and flag in FLAGS:
            yield Fact(name=flag, where="flags")
        else:
            notes.append(f"ignored: flag {str(flag)[:40]!r} is not in the vocabulary")


def _series(value: Any, notes: list[str]) -> Iterator[Fact]:
    """Numbers as they are, "nan" as a number, other words as prose; a prefix such as "exp2:" starts another run."""
    if value is not None and not isinstance(value, list):
        notes.append("ignored: series is not a list")
        return
    runs: dict[str, list[dict[str, float]]] = {}
    for i, row in enumerate((value or [])[:MAX_ROWS]):
        if not isinstance(row, dict):
            notes.append(f"ignored: row {i} of series is not an object")
            continue
        label = str(row.get("step", ""))
        run = label.rpartition(":")[0]
        numbers = {str(k): n for k, v in row.items() if (n := as_number(v)) is not None and k != "step"}
        step = as_number(label.rpartition(":")[2])
        runs.setdefault(run, []).append(numbers | ({"step": step} if step is not None else {}))
        words = "; ".join(
            f"{k.replace('_', ' ')} {v}"
            for k, v in row.items()
            if isinstance(v, str) and k != "step" and k not in numbers
        )
        if words:
            yield from read_text(words, where=f"series row {i + 1}")
    for rows in runs.values():
        yield from read_rows(rows, where="series")


def as_number(value: object) -> float | None:
    """A JSON number, or the words nan, inf and 1e-4; nothing else.

    >>> as_number("nan"), as_number("-Infinity"), as_number("drops"), as_number(True)
    (nan, -inf, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and (len(value) > 40 or "_" in value):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.inf if isinstance(value, int) else None


def _precision(value: Any, notes: list[str]) -> Iterator[Fact]:
    if isinstance(value, str):
        yield from read_precision(value, where="precision")
        return
    if value is not None and not isinstance(value, dict):
        notes.append("ignored: precision is neither a text nor an object")
        return
    fields = {k: v for k, v in (value or {}).items() if isinstance(v, str)}
    yield from read_precision(fields.get("mode", ""), where="precision.mode")
    loaded = find_format(fields.get("model_load_dtype", ""))
    if loaded:
        yield Fact(name="weights", value=loaded, where="precision.model_load_dtype")
    guessed = find_format(fields.get("inferred", ""))
    if guessed and not find_format(fields.get("mode", "")):
        yield Fact(name="precision", value=guessed, where="precision.inferred")
    yield from read_text(fields.get("mode", ""), where="precision.mode")


def _training(value: Any, notes: list[str]) -> Iterator[Fact]:
    if value is not None and not isinstance(value, dict):
        notes.append("ignored: training is not an object")
        return
    for key, item in list((value or {}).items())[:100]:
        name = _NAMES.get(str(key), str(key)[:40])
        numeric = as_number(item)
        if numeric is None and isinstance(item, str):
            numeric = next((n for word in item.split() if (n := as_number(word)) is not None), None)
        yield Fact(name="tells", value=name, where=f"training.{key}"[:60], words=f"{name} {str(item)[:40]}")
        if numeric is not None and math.isfinite(numeric):
            yield Fact(name=name, value=float(numeric), where=f"training.{key}"[:60])
        if isinstance(item, str):
            if name == "optimizer":
                yield Fact(name="optimizer", value=item.lower()[:40], where="training.optimizer")
            yield from read_text(f"{key} {item}", where=f"training.{key}"[:60])

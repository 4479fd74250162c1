"""JSON files that hold a whole history: one list for each metric, as Keras keeps it, or one object for each epoch.

>>> is_history(b'{"loss": [2.5, NaN], "val_loss": [2.6, 2.7]}'), is_history(b'[{"epoch": 1, "loss": 2.5}, {')
(True, True)
>>> is_history(b'{"lr": 0.1, "betas": [0.9, 0.999]}'), is_history(b'{"step": 1, "loss": 2.5}')
(False, False)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..collect import Collector
from ..names import EPOCH_KEYS, STEP_KEYS, meaning, pick
from ..plan import flatten

LARGEST = 16 << 20
_LISTED = re.compile(rb'"([^"\n]{1,80})"\s*:\s*\[\s*(?:-?[\d.]|NaN|-?Infinity|null|"?-?nan)')
_ENTRY = re.compile(rb'\[\s*\{[^{}\[\]]{0,2000}"([^"\n]{0,40}loss[^"\n]{0,40})"\s*:', re.IGNORECASE)
_LINES = re.compile(rb"\{[^\n]*\}\s*\n\s*\{")
_TELLING = frozenset({"loss", "component", "eval", "grad_norm"})


def is_history(head: bytes) -> bool:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if _LINES.match(start):
        return False
    if start.startswith(b"["):
        return _ENTRY.match(start) is not None
    return start.startswith(b"{") and any(_tells(m[1].decode("utf-8", "replace")) for m in _LISTED.finditer(start))


def _tells(name: str) -> bool:
    return meaning(name).role in _TELLING


class HistoryStream:
    """Keeps the file until its end: nothing in it can be read before."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= LARGEST:
            self._parts.append(data)

    def settle(self) -> None:
        """A half of the file says nothing."""

    def close(self) -> None:
        try:
            found = json.loads(b"".join(self._parts)) if self._size <= LARGEST else None
        except (ValueError, RecursionError):
            found = None
        if found is None:
            self._collector.note("the file is cut off, damaged, or too large to be read")
        for row in _rows(found):
            self._collector.record(row)


def _rows(found: Any) -> Iterator[Mapping[str, object]]:
    if isinstance(found, list):
        yield from (row for row in found if isinstance(row, dict))
        return
    lists = {k: v for k, v in flatten(found).items() if isinstance(v, list)} if isinstance(found, dict) else {}
    length = max((len(v) for k, v in lists.items() if _tells(k)), default=0)
    counted = pick(lists, STEP_KEYS) or pick(lists, EPOCH_KEYS)
    for i in range(length):
        yield {**({} if counted else {"epoch": i + 1}), **{k: v[i] for k, v in lists.items() if i < len(v)}}

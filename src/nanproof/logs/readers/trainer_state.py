"""The HF Trainer's trainer_state.json: the best source there is, with steps, rates and limits.

It is read object by object as it streams past, not as one document: a state of a million entries takes little memory,
one that is cut off is read up to the cut, and the bare NaN that JSON does not know does no harm.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ..collect import Collector

_ENTRY = re.compile(rb"\{[^{}]*+\}")
_SETTING = re.compile(rb'"(max_steps|logging_steps|global_step)"\s*:\s*(\d{1,18})')
LARGEST = 4 << 20


def is_trainer_state(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and b'"log_history"' in head


class StateStream:
    """Decodes a trainer state; entries that were taken before, from an older state of the same run, are passed over."""

    def __init__(self, collector: Collector, *, after: int = 0) -> None:
        self._collector = collector
        self._tail = b""
        self._after = after
        self.taken = 0
        self._inside = False

    def feed(self, data: bytes) -> None:
        data = self._tail + data
        end = 0
        entries: list[dict[str, Any]] = []
        for match in _ENTRY.finditer(data):
            self._inside = self._inside or b'"log_history"' in data[end : match.start()]
            self._settings(data[end : match.start()])
            end = match.end()
            if self._inside:
                entries += self._entry(match[0])
        self._collector.records(entries)
        self._tail = data[max(end, len(data) - LARGEST) :]

    def settle(self) -> None:
        self._settings(self._tail)

    def close(self) -> None:
        self.settle()
        if not self._tail.rstrip().endswith(b"}"):
            self._collector.note("the file is cut off")

    def _entry(self, text: bytes) -> list[dict[str, Any]]:
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            self._collector.note("an entry that cannot be read is passed over")
            return []
        if not isinstance(entry, dict) or "step" not in entry:
            return []
        self.taken += 1
        return [entry] if self.taken > self._after else []

    def _settings(self, text: bytes) -> None:
        for name, value in _SETTING.findall(text):
            if name == b"max_steps":
                self._collector.max_steps = int(value)
            elif name == b"logging_steps":
                self._collector.logging_steps = int(value)

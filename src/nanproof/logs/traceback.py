"""Tracebacks: many lines, one event, with the innermost place."""

from __future__ import annotations

import re

from .collect import Collector
from .messages import find

_BEGIN = re.compile(rb"Traceback \(most recent call last\):")
_FRAME = re.compile(rb'^\s*File "(?P<file>[^"]{1,300})", line (?P<line>\d{1,9}), in (?P<name>.{1,100})')
_ERROR = re.compile(
    rb"^(?:[\w.]{1,80}\.)?(?P<kind>[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Exit|Fault)|Exception)(?::|$| )"
)
_ANY = re.compile(
    rb"^(?:[\w.]{1,80}\.)?(?P<kind>[A-Za-z_]\w{0,80})(?::|$)"
)  # the last line of a traceback, whatever its name
_LIMIT = 500
"""A traceback of more lines than this is not one."""


class Tracebacks:
    """Follows tracebacks through the lines of a log."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._open = 0
        self._place = ""

    def take(self, line: bytes, number: int) -> bool:
        """Whether the line belongs to a traceback or ends a program by itself."""
        if _BEGIN.search(line, 0, 200):
            self._open, self._place = 1, ""
            return True
        error = _ERROR.match(line.lstrip(), 0, 300) if not self._open else _ANY.match(line, 0, 300)
        if error is not None:
            found = find(line)
            details = {"error": error["kind"].decode(), **({"where": self._place} if self._place else {})}
            text = line.strip().decode("utf-8", "replace")
            step = found.details.get("step") if found else None
            self._collector.event(
                "exception", text, name=found.name if found else "", line=number, details=details | (found.details if found else {}),
                step=int(step) if step else None,
            )  # fmt: skip
            self._open = 0
            return True
        if not self._open:
            return False
        self._open += 1
        frame = _FRAME.match(line, 0, 600)
        if frame is not None:
            self._place = f"{frame['file'].decode('utf-8', 'replace')}:{frame['line'].decode()}"
        elif not line[:1].isspace() or self._open > _LIMIT:
            self._open = 0
            return False
        return True

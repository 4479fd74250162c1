"""Tracebacks: many lines, one event, with the innermost place."""

from __future__ import annotations

import re

from .collect import Collector
from .messages import find

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
        self.open = 0
        """How many lines the traceback has that is being read."""
        self._place = ""
        self._line = 0

    def close(self) -> None:
        """A traceback that the log ends in has no last line to tell the error by."""
        if self.open:
            details = {"error": "", **({"where": self._place} if self._place else {})}
            self._collector.event("exception", "a traceback that was cut off", line=self._line, details=details)

    def take(self, line: bytes, number: int) -> bool:
        """Whether the line belongs to a traceback or ends a program by itself."""
        if b"Traceback (most recent" in line[:200]:
            self.open, self._place, self._line = 1, "", number
            return True
        error = _ANY.match(line, 0, 300) if self.open else _ERROR.match(line.lstrip(), 0, 300)
        if error is not None:
            self.end(line, number, self._place)
            return True
        if not self.open:
            return False
        self.open += 1
        frame = _FRAME.match(line, 0, 600)
        if frame is not None:
            self._place = f"{frame['file'].decode('utf-8', 'replace')}:{frame['line'].decode()}"
        elif not line[:1].isspace() or self.open > _LIMIT:
            self.open = 0
            return False
        return True

    def end(self, line: bytes, number: int, place: str) -> None:
        """The last line of a traceback, which names the exception."""
        kind = _ANY.match(line.lstrip(), 0, 300) or _ERROR.match(line.lstrip(), 0, 300)
        error = kind["kind"].decode() if kind is not None else ""
        found = find(line)
        name, details = (found.name, found.details) if found is not None else ("", {})
        details = {"error": error, **({"where": place} if place else {}), **details}
        text, step = line.strip().decode("utf-8", "replace"), details.get("step", "")
        whole = int(step) if step.isdigit() and len(step) < 18 else None
        self._collector.event("exception", text, name=name, line=number, details=details, step=whole)
        self.open, self._place = 0, ""

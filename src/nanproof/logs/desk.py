"""The lines of a text log: each is given to whoever understands it, first come, first served.

>>> from nanproof.logs.collect import Collector
>>> log = Collector(source="train.log", format="text")
>>> desk = Desk(log)
>>> desk.feed(b"iter 1: loss 2.5, lr 1e-3\\n{'loss': nan, 'grad_norm': 1.0}\\nLoss is nan, stopping training\\n"); desk.close()
>>> series = log.series()
>>> series.loss.values.tolist(), [e.kind for e in series.events]
([2.5, nan], ['nan'])

JSON objects are taken many at a time. Anything else goes, piece by piece, to the bars, the dicts, the tables, the
grammars, the messages and last to the reader of plain pairs. What nobody understands is passed over.
"""

from __future__ import annotations

import calendar
import json
import re
from collections.abc import Sequence
from typing import Any

import orjson

from . import numbers
from .collect import Collector
from .grammar import LINE, Grammar, Reading, read_pairs
from .grammars import GRAMMARS
from .grammars.bar import Bars
from .grammars.braces import read_braces
from .grammars.table import Tables
from .lines import Lines, Numbered, clean
from .messages import Found, find
from .names import meaning
from .traceback import Tracebacks

_RANK = re.compile(rb"^(?:\[(?:default|rank)?\d{1,5}\]:? ?|\d{1,4}: |\([^)]{1,40}pid=\d+[^)]{0,40}\) ?)+")
_CLOCK = re.compile(rb"(20\d\d)[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)")
_BARE = re.compile(rb"(?<=[:,\[\s])(-?(?:NaN|nan|Infinity|inf))(?=[\s,}\]])")
_ONE_PAIR = re.compile(rb"\W{0,80}[A-Za-z_][\w ./()-]{0,80}\s{0,20}[:=]\s{0,20}" + numbers.NUMBER + rb"\W{0,40}")
_SETTINGS = re.compile(rb"Namespace\(|Arguments\(|Config\(|[Cc]onfig\b.{0,20}[:=]")
_WORDS = (b'"event"', b'"verdict"', b'"message"', b'"msg"')
_TELLING = frozenset({"loss", "component", "grad_norm", "eval"})


class Desk:
    """Takes the bytes of a text log and fills a collector; with ``words_only`` its numbers are left to others."""

    def __init__(self, collector: Collector, *, words_only: bool = False) -> None:
        self.collector = collector
        self._words_only = words_only
        self.epoch: float | None = None
        """The epoch of a heading such as ``Epoch 2/10``, for the lines below it."""
        self._lines = Lines()
        self._bars = Bars(self)
        self._tables = Tables(self)
        self._tracebacks = Tracebacks(collector)
        self._waiting: Reading | None = None
        self._last: Grammar | None = None
        self._block = False
        """Whether the line before was a record or its heading, so that lone pairs below belong to it."""

    def feed(self, data: bytes) -> None:
        self._take(self._lines.feed(data))

    def settle(self) -> None:
        """Nothing more has come for now: place what was waiting for the next line."""
        self.release(None)

    def close(self) -> None:
        """The file is at its end: its last line counts, even without a newline."""
        self._take(self._lines.rest())
        self.settle()
        self._tables.close()
        if self._lines.cut:
            self.collector.note("a line of more than 4 MB was cut", self._lines.cut)

    def emit(self, reading: Reading, clock: bytes = b"") -> None:
        """Place what a line says."""
        values = dict(reading.values)
        if reading.judged:
            values = {f"eval/{name}": value for name, value in values.items()}
        if (moment := _CLOCK.search(clock, 0, 120)) is not None:
            year, month, day, hour, minute, second = (int(g) for g in moment.groups())
            values["timestamp"] = float(calendar.timegm((year, month, day, hour, minute, second)))
        if reading.last is not None and reading.last > 0 and not reading.judged:
            self.collector.max_steps = reading.last
        counts = not reading.judged and any(meaning(name).role in ("loss", "component", "grad_norm") for name in values)
        epoch = reading.epoch if reading.epoch is not None else self.epoch
        self.collector.place(values, step=reading.step, epoch=epoch, counts=counts)
        self._block = True

    @property
    def waits(self) -> bool:
        """Whether a record waits for its step."""
        return self._waiting is not None

    def wait(self, reading: Reading) -> None:
        """Keep a record without a step until the next piece: the bar that is drawn after it knows the step."""
        self.release(None)
        self._waiting = reading

    def release(self, step: int | None) -> None:
        """Place the record that waits; without a step from a bar, by what is known."""
        if self._waiting is not None:
            reading, self._waiting = self._waiting, None
            self.emit(reading._replace(step=self._bars.known() if step is None else step))

    def row_of_table(self, text: bytes, inside: int, length: int) -> bool:
        """The text before a bar may be a row of a table, as ultralytics prints it."""
        return self._tables.take_row(text, inside, length)

    def _take(self, lines: Sequence[Numbered]) -> None:
        place, end = 0, len(lines)
        while place < end:
            stop = place
            while not self._words_only and stop < end and lines[stop][1].startswith((b'{"', b"{ ")):
                stop += 1
            if stop > place:
                self._take_json(lines[place:stop])
            else:
                number, line = lines[place]
                for piece in clean(line):
                    self._take_piece(piece[:LINE], number)
                stop += 1
            place = stop

    def _take_json(self, lines: Sequence[Numbered]) -> None:
        self.release(None)
        joined = b"[" + b",".join([line for _, line in lines]) + b"]"
        if b"NaN" in joined or b"nfinity" in joined or b"nan" in joined:
            joined = _BARE.sub(rb'"\1"', joined)  # orjson is strict; as strings they are understood as well
        try:
            rows = orjson.loads(joined)
        except orjson.JSONDecodeError:
            rows = []
        if len(rows) != len(lines) or not all(isinstance(row, dict) for row in rows):
            for number, line in lines:
                self._take_one_json(line, number)
        elif any(word in joined for word in _WORDS):
            for (number, _), row in zip(lines, rows, strict=True):
                self._take_row(row, number)
        else:
            self.collector.records(rows)

    def _take_one_json(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            self._take_row(row, number)
        else:
            for piece in clean(line):
                self._take_piece(piece[:LINE], number)

    def _take_row(self, row: dict[str, Any], number: int) -> None:
        """A JSON object that may say something in words."""
        words = next((row[k] for k in ("message", "msg") if isinstance(row.get(k), str)), None)
        if words is not None:
            self._take_piece(words.encode("utf-8", "replace")[:LINE], number)
            return
        event = row.get("event")
        if isinstance(event, str):
            text = ", ".join(f"{k} {v}" for k, v in row.items())
            kind = {"resume": "resume", "rollback": "rollback", "stop": "stop", "restore": "rollback"}.get(
                event, "warning"
            )
            self.collector.event(kind, text, name="", line=number)  # type: ignore[arg-type]
            return
        _, step = self.collector.record(row)
        verdict, action = row.get("verdict", "ok"), row.get("action")
        if verdict != "ok":
            kind = {"skip": "skip", "rollback": "rollback", "restore": "rollback", "stop": "stop"}.get(
                str(action), "warning"
            )
            self.collector.event(kind, f"{verdict}: {action}", name=str(verdict), step=step, line=number)  # type: ignore[arg-type]

    def _take_piece(self, piece: bytes, number: int) -> None:
        piece = _RANK.sub(b"", piece) if piece[:1] in b"[(0123456789" else piece
        if not piece.strip():
            return
        if self._tracebacks.take(piece, number):
            self.release(None)
            self._block = False
            return
        if self._words_only:
            if (found := find(piece)) is not None:
                self._take_message(found, piece, number)
            return
        rest = self._bars.take(piece)
        self.release(None) if rest.strip() or rest is piece else None
        if not rest.strip():
            return
        if b"{" in rest and self._take_braces(rest):
            return
        if self._tables.take(rest) or self._take_grammar(rest):
            return
        found = find(rest)
        if found is not None:
            self._take_message(found, rest, number)
        else:
            self._take_plain(rest)

    def _take_braces(self, piece: bytes) -> bool:
        readings = read_braces(piece)
        for reading in readings:
            self.wait(reading) if reading.step is None else self.emit(reading, piece)
            if "train_runtime" in reading.values:
                self.collector.event("finished", piece.decode("utf-8", "replace"))
        return bool(readings)

    def _take_grammar(self, piece: bytes) -> bool:
        for grammar in (self._last, *GRAMMARS) if self._last else GRAMMARS:
            if grammar.needle in piece and (reading := grammar.read(piece)) is not None:
                self.emit(reading, piece)
                self._last = grammar
                return True
        return False

    def _take_message(self, found: Found, piece: bytes, number: int) -> None:
        step = int(found.details["step"]) if "step" in found.details and len(found.details["step"]) < 18 else None
        text = piece.strip().decode("utf-8", "replace")
        self.collector.event(found.kind, text, name=found.name, step=step, line=number, details=found.details)
        scale = numbers.parse(found.details.get("scale", "").encode())
        if scale is not None:
            self.collector.place({"loss_scale": scale}, step=None, counts=False)
        self._block = False

    def _take_plain(self, piece: bytes) -> None:
        """Pairs without a layout that is known: a record if a loss or a gradient norm is among them."""
        reading = read_pairs(piece)
        if not reading.values:
            if reading.epoch is not None and reading.step is None and len(piece) < 120:
                self.epoch, self._block = reading.epoch, True
            elif reading.step is not None and len(piece) < 120:
                self.emit(reading, piece)
            else:
                self._block = False
            return
        telling = any(meaning(name).role in _TELLING for name in reading.values)
        total = any(meaning(name).role in ("loss", "grad_norm") for name in reading.values)
        placed = reading.step is not None or reading.epoch is not None
        lone = self._block and _ONE_PAIR.fullmatch(piece) is not None
        if lone or (telling and (placed or self._block or total) and not _SETTINGS.search(piece)):
            self.emit(reading, piece)
        elif not lone:
            self._block = False

"""W&B's offline files: LevelDB framing and a walk through the records; wandb itself is not needed."""

from __future__ import annotations

import struct
import zlib

from ...errors import FormatError
from .. import numbers
from ..collect import Collector
from ..desk import Desk
from .wire import fields, float64, signed

BLOCK = 32_768
_HEAD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_SEEDS = tuple(zlib.crc32(bytes([kind])) for kind in range(5))
# fields of wandb's Record, HistoryRecord, HistoryItem, OutputRawRecord, RunExitRecord, RunRecord
_HISTORY, _OUTPUT_RAW, _RUN, _EXIT = 2, 13, 17, 18


def is_wandb(head: bytes) -> bool:
    return head.startswith(b":W&B")


class WandbStream:
    """Decodes the bytes of one ``.wandb`` file."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._words = Desk(collector, words_only=True)
        self._tail = b""
        self._place = 0
        self._parts = bytearray()
        self._rows: list[dict[str, object]] = []

    def feed(self, data: bytes) -> None:
        data = self._tail + data if self._tail else data
        if not self._place and len(data) < 7:
            self._tail = data
            return
        place = 0 if self._place else 7  # ":W&B", a magic number, a version
        while place + 7 <= len(data):
            left = BLOCK - (self._place + place) % BLOCK
            if left < 7:
                place += left
                continue
            crc, size, kind = _HEAD.unpack_from(data, place)
            if kind == 0 or kind > _LAST or size > left - 7:
                if kind or size or crc:
                    self._collector.note("a damaged block is passed over")
                if place + left > len(data):
                    break
                place += left
                self._parts.clear()
                continue
            if place + 7 + size > len(data):
                break
            self._take(kind, crc, data[place + 7 : place + 7 + size])
            place += 7 + size
        self._place += min(place, len(data))
        self._tail = data[place:]
        self._flush()

    def settle(self) -> None:
        self._words.settle()

    def close(self) -> None:
        self._words.close()
        if len(self._tail) > 7:
            self._collector.note("the last record is cut off")

    def _take(self, kind: int, crc: int, data: bytes) -> None:
        if zlib.crc32(data, _SEEDS[kind]) != crc:
            self._collector.note("a record with a wrong checksum is passed over")
            self._parts.clear()
            return
        if kind in (_FULL, _FIRST):
            self._parts.clear()
        self._parts += data
        if kind in (_FULL, _LAST):
            try:
                self._take_record(bytes(self._parts))
            except FormatError:
                self._collector.note("a record that cannot be read is passed over")
            self._parts.clear()

    def _take_record(self, record: bytes) -> None:
        for number, value in fields(record):
            if not isinstance(value, bytes):
                continue
            if number == _HISTORY:
                self._rows.append(_row(value))
                if len(self._rows) >= 2_000:
                    self._flush()
            elif number == _OUTPUT_RAW:
                self._flush()
                self._words.feed(next((v for n, v in fields(value) if n == 3 and isinstance(v, bytes)), b""))
            elif number == _RUN:
                texts = {
                    n: v.decode("utf-8", "replace") for n, v in fields(value) if isinstance(v, bytes) and n in (1, 8)
                }
                self._collector.run = texts.get(8) or texts.get(1, "")
                if dict(fields(value)).get(18):
                    self._collector.event("resume", "W&B resumed this run")
            elif number == _EXIT:
                code = dict(fields(value)).get(1, 0)
                if isinstance(code, int) and code:
                    self._flush()
                    self._collector.event("stop", f"the run ended with exit code {signed(code)}", name="exit-code")

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        self._collector.records(rows)


def _row(history: bytes) -> dict[str, object]:
    """The numbers of one call of ``log``; keys are sorted, as the file holds them in any order."""
    row: dict[str, object] = {}
    for number, item in fields(history):
        if number != 1 or not isinstance(item, bytes):
            continue
        names, value = list[str](), None
        for field, content in fields(item):
            if field in (1, 2) and isinstance(content, bytes):
                names.append(content.decode("utf-8", "replace"))
            elif field in (8, 16) and isinstance(content, bytes):
                value = numbers.parse(content.strip(b'"')) if len(content) <= 64 else None
            elif field == 5 and isinstance(content, int):
                value = float(content >> 1 ^ -(content & 1))
            elif field == 6:
                value = float64(content)
        if value is not None:
            name = ".".join(names)
            row[name] = int(value) if name.endswith("step") and value == value and abs(value) < 2**53 else value
    return dict(sorted(row.items()))

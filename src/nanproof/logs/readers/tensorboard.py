"""TensorBoard event files: TFRecord framing and a walk through the message; tensorboard itself is not needed.

Almost all events of a run differ only in time, step and four bytes of value. What stands between is remembered with
the tag it means, so that a second event of the same shape is read with one look into a dictionary.
"""

from __future__ import annotations

import struct
from array import array
from functools import lru_cache

import numpy as np

from ...errors import FormatError
from ..collect import Collector
from .wire import fields, float64, signed, varint

_DOUBLE, _FLOAT, _LENGTH = struct.Struct("<d"), struct.Struct("<f"), struct.Struct("<QI")
LARGEST = 256 << 20
"""No event is larger; a length beyond it is damage."""
BATCH = 50_000


def is_events(head: bytes) -> bool:
    """Whether a file begins with a TFRecord that holds an event; an empty one does not tell."""
    if len(head) < 13 or _LENGTH.unpack_from(head)[1] != _masked_crc(head[:8]):
        return False
    return head[12] in (0x09, 0x10, 0x1A, 0x2A)


class EventStream:
    """Decodes the bytes of one event file."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._tail = b""
        self._place = 0
        self._broken = False
        self._names: dict[str, int] = {}
        self._shapes: dict[bytes, int] = {}
        self._which, self._steps = array("q"), array("q")
        self._values, self._times = array("d"), array("d")

    def feed(self, data: bytes) -> None:
        if self._broken:
            return
        data = self._tail + data if self._tail else data
        place, end = 0, len(data)
        while place + 12 <= end:
            length, crc = _LENGTH.unpack_from(data, place)
            if length > LARGEST or crc != _masked_crc(data[place : place + 8]):
                self._broken = True
                self._collector.note(f"damaged at byte {self._place + place:,}; what follows is not read")
                break
            if place + 16 + length > end:
                break
            self._take(data[place + 12 : place + 12 + length])
            place += 16 + length
        self._place += place
        self._tail = b"" if self._broken else data[place:]
        self._flush()

    def settle(self) -> None:
        """Every whole event is read already."""

    def close(self) -> None:
        if self._tail:
            self._collector.note("the last event is cut off")

    def _take(self, event: bytes) -> None:
        if event[:1] != b"\x09":
            return
        place, step = 9, 0
        try:
            if event[9:10] == b"\x10":  # a step of 0 is not written
                step, place = varint(event, 10)
            if event[place : place + 1] != b"\x2a":
                return
            size, place = varint(event, place + 1)
        except (IndexError, FormatError):
            return
        summary = event[place : place + size]
        index = self._shapes.get(summary[:-4])
        time = _DOUBLE.unpack_from(event, 1)[0]
        if index is not None:
            self._add(index, signed(step), _FLOAT.unpack(summary[-4:])[0], time)
        else:
            self._walk(summary, signed(step), time)

    def _walk(self, summary: bytes, step: int, time: float) -> None:
        try:
            found = [_value(v) for number, v in fields(summary) if number == 1 and isinstance(v, bytes)]
        except FormatError:
            self._collector.note("an event that cannot be read is passed over")
            return
        for tag, value, plain in found:
            if value is None:
                continue
            index = self._names.setdefault(tag, len(self._names))
            self._add(index, step, value, time)
            if plain and len(found) == 1 and len(self._shapes) < 10_000:
                self._shapes[summary[:-4]] = index

    def _add(self, index: int, step: int, value: float, time: float) -> None:
        self._which.append(index)
        self._steps.append(step)
        self._values.append(value)
        self._times.append(time)
        if len(self._which) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._which:
            arrays = [np.array(a) for a in (self._which, self._steps, self._values, self._times)]
            self._which, self._steps = array("q"), array("q")
            self._values, self._times = array("d"), array("d")
            self._collector.points(list(self._names), *arrays)


def _value(message: bytes) -> tuple[str, float | None, bool]:
    """The tag of a value, its number if it is one number, and whether that is the last four bytes."""
    tag, number, plain = "", None, False
    for field, content in fields(message):
        plain = False
        if field == 1 and isinstance(content, bytes):
            tag = content.decode("utf-8", "replace")
        elif field == 2:
            number, plain = float64(content), isinstance(content, bytes) and len(content) == 4
        elif field == 8 and isinstance(content, bytes):
            number = _scalar(content)
    return tag, number, plain


def _scalar(tensor: bytes) -> float | None:
    """The number in a tensor of one element, as TensorFlow 2 writes scalars."""
    kinds = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}
    kind, content, values = 0, b"", list[float]()
    for field, value in fields(tensor):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field == 4 and isinstance(value, bytes):
            content = value
        elif field in (5, 6) and isinstance(value, bytes) and len(value) in (4, 8):
            values.append(float64(value))
    form = kinds.get(kind)
    if form and len(content) == struct.calcsize(form):
        return float(struct.unpack(form, content)[0])
    return values[0] if len(values) == 1 else None


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC = _crc_table()


@lru_cache(maxsize=65536)
def _masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecord masks it; the lengths of events are few, so it is looked up."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

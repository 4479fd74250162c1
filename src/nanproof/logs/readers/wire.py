"""The wire format of protocol buffers: enough to walk through a message without knowing its description.

>>> list(fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69])))
[(1, 150), (2, b'hi')]
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ...errors import FormatError

Field = tuple[int, int | bytes]


def varint(data: bytes, place: int) -> tuple[int, int]:
    """An integer of variable length, and the place behind it."""
    result = shift = 0
    while True:
        byte = data[place]
        place += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & 0xFFFFFFFFFFFFFFFF, place
        shift += 7
        if shift > 63:
            raise FormatError("an integer of more than 64 bits")


def fields(data: bytes) -> Iterator[Field]:
    """The fields of a message: numbers as they are, everything else as bytes; raises when it is none."""
    place, end = 0, len(data)
    try:
        while place < end:
            key, place = varint(data, place)
            number, kind = key >> 3, key & 7
            if kind == 0:
                value, place = varint(data, place)
                yield number, value
                continue
            if kind == 2:
                size, place = varint(data, place)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise FormatError(f"a field of kind {kind}")
            if place + size > end or number == 0:
                raise FormatError("a field longer than its message")
            yield number, data[place : place + size]
            place += size
    except IndexError:
        raise FormatError("a message that is cut off") from None


def signed(value: int) -> int:
    """An int64 out of the wire's unsigned integer."""
    return value - (1 << 64) if value >= 1 << 63 else value


def float64(value: int | bytes) -> float:
    """The number in a fixed field of 8 or 4 bytes, or an integer."""
    if isinstance(value, int):
        return float(signed(value))
    return float(struct.unpack("<d" if len(value) == 8 else "<f", value)[0]) if len(value) in (4, 8) else float("nan")

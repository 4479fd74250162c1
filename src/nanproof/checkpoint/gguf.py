"""GGUF: typed key-value pairs, a table of tensors, then the data. Quantized blocks carry 16- or 32-bit scales."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from ..floats import format_of
from .contents import MAX_TENSORS, Columns, Contents, Stored
from .flaws import damaged, refused, unreadable
from .source import Source, read

MAX_HEAD = 64 << 20

_PLAIN = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16", 24: "int8", 25: "int16", 26: "int32", 27: "int64"}
_BITS = {"float32": 32, "float16": 16, "float64": 64, "bfloat16": 16, "int8": 8, "int16": 16, "int32": 32, "int64": 64}
# type number: name, elements in a block, bytes of a block, where its scales stand, their bytes and format
_BLOCKS = {
    2: ("q4_0", 32, 18, 0, 2, "float16"),
    3: ("q4_1", 32, 20, 0, 4, "float16"),
    6: ("q5_0", 32, 22, 0, 2, "float16"),
    7: ("q5_1", 32, 24, 0, 4, "float16"),
    8: ("q8_0", 32, 34, 0, 2, "float16"),
    9: ("q8_1", 32, 36, 0, 4, "float16"),
    10: ("q2_k", 256, 84, 80, 4, "float16"),
    11: ("q3_k", 256, 110, 108, 2, "float16"),
    12: ("q4_k", 256, 144, 0, 4, "float16"),
    13: ("q5_k", 256, 176, 0, 4, "float16"),
    14: ("q6_k", 256, 210, 208, 2, "float16"),
    15: ("q8_k", 256, 292, 0, 4, "float32"),
}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(slots=True)
class _Cursor:
    """Reads numbers and strings in order, fetching the file as it goes."""

    source: Source
    at: int
    base: int = 0
    data: bytes = b""

    def take(self, size: int) -> bytes:
        if self.at + size > self.source.size:
            raise damaged("its head is cut off")
        if self.at + size > MAX_HEAD:
            raise refused(f"its head has more than {MAX_HEAD >> 20} MB")
        if not (self.base <= self.at and self.at + size <= self.base + len(self.data)):
            self.base = self.at
            self.data = read(self.source, self.at, min(max(size, 1 << 18), self.source.size - self.at))
        start = self.at - self.base
        self.at += size
        return self.data[start : start + size]

    def skip(self, size: int) -> None:
        if self.at + size > self.source.size:
            raise damaged("its head is cut off")
        self.at += size

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self, limit: int = 1 << 16) -> str:
        size = self.number("<Q")
        if size > limit:
            raise refused(f"a string of {size:,} bytes in its head")
        return self.take(size).decode(errors="replace")


def read_gguf(source: Source) -> Contents:
    """The contents of a GGUF file."""
    cursor = _Cursor(source, 4)
    version = cursor.number("<I")
    if version not in (2, 3):
        raise unreadable(f"has GGUF version {version}; 2 and 3 are known")
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    if tensors > MAX_TENSORS or pairs > 1_000_000:
        raise refused(f"claims {tensors:,} tensors and {pairs:,} keys")
    alignment, odd = 32, []  # numbers of the head that are NaN or infinite
    for _ in range(pairs):
        key, value = cursor.text(), _value(cursor)
        if key == "general.alignment" and isinstance(value, int):
            alignment = value
            if alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
                raise damaged(f"its tensors are aligned to {alignment:,} bytes, which is no power of two")
        if isinstance(value, float) and not math.isfinite(value):
            odd.append(Stored(name=key, dtype="float64", shape=(), start=0, nbytes=8, inline=struct.pack("<d", value)))
    contents = Contents(format="GGUF", tensors=[])
    seen: set[str] = set()
    for _ in range(tensors):
        stored = _tensor(cursor, contents)
        if stored.name in seen:
            raise refused(f"{stored.name[:80]} is there twice")
        seen.add(stored.name)
        contents.tensors.append(stored)
    base = -(-cursor.at // alignment) * alignment
    for stored in contents.tensors:
        stored.start += base
        if stored.start + stored.nbytes > source.size:
            raise damaged(f"{stored.name}: ends beyond the file")
    _check_overlap(contents.tensors)
    contents.tensors += odd
    return contents


def _check_overlap(tensors: list[Stored]) -> None:
    last = 0
    for stored in sorted(tensors, key=lambda t: t.start):
        if stored.start < last and stored.nbytes:
            raise damaged(f"{stored.name}: shares its bytes with another tensor")
        last = stored.start + stored.nbytes


def _value(cursor: _Cursor, depth: int = 0) -> Any:
    kind = cursor.number("<I")
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text(1 << 24)
    if kind != _ARRAY:
        raise damaged(f"a key in its head has the type {kind}, which does not exist")
    inner, count = cursor.number("<I"), cursor.number("<Q")
    if inner in _SCALARS:
        cursor.skip(struct.calcsize(_SCALARS[inner]) * count)
    elif inner == _STRING:
        if count * 8 > cursor.source.size:
            raise damaged("a list in its head is longer than the file")
        for _ in range(count):
            cursor.skip(cursor.number("<Q"))
    else:
        raise refused("a list of lists in its head")
    return None


def _tensor(cursor: _Cursor, contents: Contents) -> Stored:
    name = cursor.text()
    rank = cursor.number("<I")
    if rank > 8:
        raise damaged(f"{name[:80]}: has {rank} dimensions")
    shape = tuple(reversed([cursor.number("<Q") for _ in range(rank)]))
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    count = 1
    for n in shape:
        count *= n
    if count >= 1 << 62 or offset >= 1 << 62:
        raise damaged(f"{name[:80]}: its size or place makes no sense")
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        return Stored(name=name, dtype=dtype, shape=shape, start=offset, nbytes=count * _BITS[dtype] // 8)
    if kind not in _BLOCKS:
        contents.unread.append(name)
        return Stored(name=name, dtype=f"ggml type {kind}", shape=shape, start=offset, nbytes=0)
    dtype, elements, size, at, width, form = _BLOCKS[kind]
    if count % elements:
        raise damaged(f"{name[:80]}: {count:,} elements do not fill blocks of {elements}")
    columns = Columns(size, at, width, format_of(form))
    return Stored(name=name, dtype=dtype, shape=shape, start=offset, nbytes=count // elements * size, columns=columns)

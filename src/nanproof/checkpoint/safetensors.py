"""safetensors: a JSON header, then the numbers. The header is read strictly and in little memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise

from .contents import MAX_TENSORS, Contents, Stored, dtype_name, element
from .flaws import Flaw, damaged, refused
from .source import Source, read

MAX_HEADER = 48 << 20
MAX_METADATA = 1 << 20
_NOT_JSON = "its header is not the JSON that safetensors writes"

# One tensor of the header. A regular expression, not a JSON parser: a hundred megabytes of brackets would
# become gigabytes of lists.
_STRING = rb'"((?:[^"\\\x00-\x1f]|\\.){0,2000})"'
_SPACE = rb"[ \t\r\n]*"
_NAME = re.compile(_SPACE + _STRING + _SPACE + rb":" + _SPACE)
_FIELD = re.compile(
    _SPACE
    + rb'"(dtype|shape|data_offsets)"'
    + _SPACE
    + rb":"
    + _SPACE
    + rb'(?:"([A-Za-z0-9_]{1,20})"|\[([0-9, \t\r\n]{0,1000})\])'
    + _SPACE
)
# The same as the library writes it, in one step.
_WRITTEN = re.compile(
    rb'\{"dtype":"([A-Za-z0-9_]{1,20})","shape":\[([0-9,]{0,1000})\],"data_offsets":\[([0-9,]{1,100})\]\}'
)
_BLANK = re.compile(_SPACE)
_ZERO_FIRST = re.compile(rb"(?<![0-9])0[0-9]")
_DTYPE = re.compile(rb"BOOL|BF16|[FIUC][0-9]+(_[A-Z0-9]+)?")


def read_safetensors(source: Source) -> Contents:
    """The contents of a safetensors file."""
    if source.size < 8:
        raise damaged("is too short for a safetensors file")
    length = int.from_bytes(read(source, 0, 8), "little")
    if length > source.size - 8:
        raise damaged(f"its header should have {length:,} bytes, the file has {source.size:,}")
    if length > MAX_HEADER:
        raise refused(f"its header has {length >> 20} MB; more than {MAX_HEADER >> 20} MB are not taken apart")
    header = read(source, 8, length)
    contents = Contents(format="safetensors", tensors=[])
    room = source.size - 8 - length
    for stored in _parse(header, contents):
        if stored.start + stored.nbytes > room:
            raise damaged(f"{stored.name}: ends {stored.start + stored.nbytes - room:,} bytes beyond the file")
        stored.start += 8 + length
        contents.tensors.append(stored)
        if len(contents.tensors) > MAX_TENSORS:
            raise refused(f"holds more than {MAX_TENSORS:,} tensors")
    del header
    _check_layout(contents.tensors, 8 + length, source.size)
    return contents


def _check_layout(tensors: list[Stored], start: int, end: int) -> None:
    """The format demands that tensors cover the data exactly: no gap, no overlap, nothing behind them."""
    ordered = sorted(tensors, key=lambda t: (t.start, t.nbytes))
    if ordered and ordered[0].start != start:
        raise damaged(f"{ordered[0].start - start:,} bytes before its first tensor belong to none")
    for a, b in pairwise(ordered):
        if a.start + a.nbytes != b.start:
            word = "overlap" if a.start + a.nbytes > b.start else "leave a gap"
            raise damaged(f"{a.name} and {b.name} {word}")
    last = ordered[-1].start + ordered[-1].nbytes if ordered else start
    if last != end:
        raise damaged(f"{end - last:,} bytes after its last tensor belong to none")


def _parse(header: bytes, contents: Contents) -> Iterator[Stored]:
    """The tensors of a header, with offsets from the start of the data."""
    at = 1
    if header[:1] != b"{":
        raise damaged(_NOT_JSON)
    seen: set[str] = set()
    blank = _BLANK.match(header, at)
    assert blank is not None
    if header[blank.end() : blank.end() + 1] == b"}":
        at = blank.end() + 1
    else:
        while True:
            head = _NAME.match(header, at)
            if head is None:
                raise damaged(_NOT_JSON)
            name = _text(head[1])
            if name in seen:
                raise refused(f"{name[:80]} is in the header twice")
            seen.add(name)
            if name == "__metadata__":
                at = _skip_metadata(header, head.end())
            else:
                stored, at = _tensor(header, head.end(), name)
                yield stored
            blank = _BLANK.match(header, at)
            assert blank is not None
            at = blank.end() + 1
            mark = header[at - 1 : at]
            if mark == b"}":
                break
            if mark != b",":
                raise damaged(_NOT_JSON)
    if header[at:].strip(b" \t\r\n"):
        raise damaged(_NOT_JSON)


def _tensor(header: bytes, at: int, name: str) -> tuple[Stored, int]:
    line = _WRITTEN.match(header, at)
    if line is not None:
        raw, sizes, ends, at = line[1], line[2], line[3], line.end()
    else:
        raw, sizes, ends, at = _fields(header, at, name)
    try:
        shape = tuple(map(int, sizes.split(b","))) if sizes.strip() else ()
        start, end = map(int, ends.split(b","))
    except ValueError:
        raise _nonsense(name) from None
    dtype = dtype_name(raw.decode())
    kind = element(dtype)
    if _ZERO_FIRST.search(sizes) or _ZERO_FIRST.search(ends):  # no number in JSON
        raise _nonsense(name)
    if kind is None or not _DTYPE.fullmatch(raw):
        raise damaged(f"{name[:80]}: the dtype {raw.decode()} is not known")
    count = math.prod(shape)
    if math.prod(max(n, 1) for n in shape) >= 1 << 62 or end < start or -(-count * kind.bits // 8) != end - start:
        raise damaged(f"{name[:80]}: {dtype} {list(shape)[:8]} does not take {end - start:,} bytes")
    return Stored(name=name, dtype=dtype, shape=shape, start=start, nbytes=end - start), at


def _fields(header: bytes, at: int, name: str) -> tuple[bytes, bytes, bytes, int]:
    """The dtype, shape and offsets of a tensor in any order, with any blanks, and where its line ends."""
    if header[at : at + 1] != b"{":
        raise _nonsense(name)
    found: dict[bytes, bytes] = {}
    while True:
        field = _FIELD.match(header, at + 1)
        if field is None or field[1] in found:
            raise _nonsense(name)
        found[field[1]] = field[2] if field[2] is not None else field[3]
        if (field[1] == b"dtype") != (field[2] is not None):
            raise _nonsense(name)
        at = field.end()
        mark = header[at : at + 1]
        if mark == b"}":
            break
        if mark != b",":
            raise _nonsense(name)
    if len(found) != 3:
        raise _nonsense(name)
    return found[b"dtype"], found[b"shape"], found[b"data_offsets"], at + 1


def _nonsense(name: str) -> Flaw:
    return damaged(f"{name[:80]}: its line in the header makes no sense")


def _skip_metadata(header: bytes, at: int) -> int:
    """Behind the flat dictionary of strings at ``at``."""
    end = header.find(b"}", at, at + MAX_METADATA)
    while end >= 0:
        try:
            found = json.loads(header[at : end + 1], object_pairs_hook=list)
            if isinstance(found, list) and all(type(v) is str and f"{k}{v}".encode() for k, v in found):
                return end + 1
            break
        except (ValueError, RecursionError):
            if header.count(b"}", at, end) > 50:
                break
        end = header.find(b"}", end + 1, at + MAX_METADATA)
    raise damaged("its __metadata__ is no dictionary of strings")


def _text(raw: bytes) -> str:
    try:
        text = json.loads(b'"' + raw + b'"') if b"\\" in raw else raw.decode()
        text.encode()  # halves of a character are no text
    except (ValueError, UnicodeDecodeError):
        raise damaged("its header has a name that is no text") from None
    return str(text)

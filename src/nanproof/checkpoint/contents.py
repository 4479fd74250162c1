"""What a reader finds in one file: tensors by place and type, what else it holds, and checksums to verify."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..floats import Format, find_format
from .flaws import damaged

MAX_TENSORS = 300_000


class Element(NamedTuple):
    """How one dtype is stored: ``parts`` floats of ``format`` per element, or no floats at all."""

    bits: int
    format: Format | None
    parts: int = 1


_INTEGERS = {
    "bool": 8,
    "uint8": 8,
    "int8": 8,
    "int16": 16,
    "uint16": 16,
    "int32": 32,
    "uint32": 32,
    "int64": 64,
    "uint64": 64,
    "quint8": 8,
    "qint8": 8,
    "qint32": 32,
    "quint4x2": 8,
    "quint2x4": 8,
    "bits8": 8,
    "bits16": 16,
    "float6_e2m3": 6,
    "float6_e3m2": 6,  # six-bit floats have no code for NaN or Inf
    **{f"{sign}int{n}": 8 for sign in ("", "u") for n in range(1, 8)},
}
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_SHORT = {
    "bool": "bool",
    "u8": "uint8",
    "i8": "int8",
    "i16": "int16",
    "u16": "uint16",
    "i32": "int32",
    "u32": "uint32",
    "i64": "int64",
    "u64": "uint64",
    "c64": "complex64",
    "f6_e2m3": "float6_e2m3",
    "f6_e3m2": "float6_e3m2",
    "byte": "uint8",
    "char": "int8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "untyped": "uint8",
}


@cache
def element(dtype: str) -> Element | None:
    """The storage of a dtype by its torch name; None when the name is unknown."""
    if dtype in _COMPLEX:
        part = find_format(_COMPLEX[dtype])
        assert part is not None
        return Element(2 * part.bits, part, 2)
    if dtype in _INTEGERS:
        return Element(_INTEGERS[dtype], None)
    found = find_format(dtype)
    return None if found is None else Element(found.bits, found)


@cache
def dtype_name(spelling: str) -> str:
    """One name for a dtype however it is spelled: ``F32``, ``FloatStorage``, ``torch.float``; "" if unknown.

    >>> dtype_name("BF16"), dtype_name("HalfStorage"), dtype_name("F8_E4M3"), dtype_name("what")
    ('bfloat16', 'float16', 'float8_e4m3fn', '')
    """
    low = spelling.removesuffix("Storage").removeprefix("torch.").lower()
    if low in _INTEGERS or low in _COMPLEX:
        return low
    if low in _SHORT:
        return _SHORT[low]
    found = find_format(low)
    return found.name if found else ""


class Columns(NamedTuple):
    """Where the scales of a block-quantised tensor stand: in each block of ``block`` bytes, at ``at``."""

    block: int
    at: int
    size: int
    format: Format


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Stored:
    """One tensor in a file. Offsets are in bytes from the start of the file, strides in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    stride: tuple[int, ...] | None = None
    columns: Columns | None = None
    inline: bytes | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Checksums:
    """Stretches of a file and the CRC-32 that each must have; arrays, for there can be a hundred thousand."""

    __slots__ = ("_crc", "_size", "_start")

    def __init__(self) -> None:
        self._start, self._size, self._crc = array("Q"), array("Q"), array("I")

    def __len__(self) -> int:
        return len(self._start)

    def add(self, start: int, size: int, crc: int) -> None:
        self._start.append(start)
        self._size.append(size)
        self._crc.append(crc)

    def take(self, other: Checksums, base: int) -> None:
        """All of another's, of a file that begins at ``base`` within this one."""
        for start, size, crc in other.in_order():
            self.add(start + base, size, crc)

    def in_order(self) -> Iterator[tuple[int, int, int]]:
        """Start, size and CRC, from the front of the file to its end."""
        for i in np.argsort(np.frombuffer(self._start, np.uint64), kind="stable") if len(self) else ():
            yield self._start[i], self._size[i], self._crc[i]


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Contents:
    """Everything one file holds."""

    format: str
    tensors: list[Stored]
    tree: Any = None
    """The inert object of a pickle, for what is not a tensor: learning rates, steps, scales."""
    checksums: Checksums = field(default_factory=Checksums)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Tensors that are there but cannot be read; a file that has any is not healthy."""
    patchable: Mapping[str, int] = field(default_factory=dict)
    """For repair: where things stand that a patched copy must also change."""
    confirm: Callable[[], bool] | None = None
    """Whether everything stands where it was thought to, asked once its bytes were read; None where that is known."""


def byte_size(dtype: str, numel: int) -> int:
    """The bytes that ``numel`` packed elements take."""
    found = element(dtype)
    if found is None:
        raise damaged(f"the dtype {dtype[:40]!r} is not known")
    return -(-numel * found.bits // 8)

"""The first pass over a pickle: is every instruction allowed, how long is it, which memo entries are used?

Nothing is built here. A pickle that asks for an instruction outside the allow-list, claims more bytes than it
has or nests marks too deep is turned away before a single object exists.
"""

from __future__ import annotations

import pickletools
from typing import NamedTuple

from .flaws import damaged, refused

MAX_MARKS = 1_000
MAX_LONG = 256
MAX_TEXT = 4 << 20

# What protocols 2 to 5 write, and nothing else. Missing on purpose: INST and OBJ (old ways to call), EXT*
# (names by number), PERSID and the text forms of protocol 0 (nothing in use writes them), out-of-band buffers.
_NAMED = """
PROTO STOP FRAME MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE
SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_TUPLE TUPLE
TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET GLOBAL
STACK_GLOBAL REDUCE BUILD NEWOBJ NEWOBJ_EX BINPERSID BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET
"""
ALLOWED = {op.code for op in pickletools.opcodes if op.name in _NAMED.split()}
NAMES = {ord(op.code): op.name for op in pickletools.opcodes}

_FIXED, _COUNTED, _LINES = 0, 1, 2


def _shape(op: pickletools.OpcodeInfo) -> tuple[int, int]:
    """How to find the end of an instruction: a fixed size, a length in front, or two lines of text."""
    if op.name == "GLOBAL":
        return _LINES, 2
    if op.arg is None:
        return _FIXED, 0
    if op.arg.n >= 0:
        return _FIXED, op.arg.n
    return _COUNTED, {-2: 1, -3: 4, -4: 4, -5: 8}[op.arg.n]  # pickletools' TAKEN_FROM_ARGUMENT* codes


SHAPES: list[tuple[int, int] | None] = [None] * 256
for _op in pickletools.opcodes:
    if _op.code in ALLOWED:
        SHAPES[ord(_op.code)] = _shape(_op)

_MARK, _STOP, _BINGET, _LONG_BINGET = b"(.hj"
_LIMITS = {  # what is turned into an object several times its size: whole numbers and text
    **dict.fromkeys(b"\x8a\x8b", (MAX_LONG, "whole number")),
    **dict.fromkeys(b"X\x8c\x8dTU", (MAX_TEXT, "text")),
}
_POPPERS = frozenset(b"tldue\x90\x911")  # instructions that take everything down to a mark


class NeedMore(Exception):
    """The pickle goes on beyond the bytes at hand."""


class Survey(NamedTuple):
    """What the first pass learned."""

    end: int
    fetched: frozenset[int]
    """The memo entries that are ever read back; all others need not be kept."""


def survey(data: bytes, start: int = 0) -> Survey:
    """Check one pickle in ``data`` without building anything.

    >>> survey(b"\\x80\\x02}q\\x00.")
    Survey(end=6, fetched=frozenset())
    """
    at, size, marks = start, len(data), 0
    fetched: set[int] = set()
    shapes = SHAPES
    while at < size:
        code = data[at]
        shape = shapes[code]
        if shape is None:
            if code in NAMES:
                raise refused(f"pickle instruction {NAMES[code]} at byte {at:,} is not on the allow-list")
            raise damaged(f"byte {at:,} of the pickle ({code:#04x}) is no instruction")
        kind, width = shape
        at += 1
        if kind == _FIXED:
            if code in (_BINGET, _LONG_BINGET):
                fetched.add(int.from_bytes(data[at : at + width], "little"))
            elif code == _MARK:
                marks += 1
                if marks > MAX_MARKS:
                    raise refused(f"the pickle nests more than {MAX_MARKS:,} marks")
            elif code == _STOP:
                return Survey(at, frozenset(fetched))
            elif code in _POPPERS:
                marks -= 1
            at += width
        elif kind == _COUNTED:
            length = int.from_bytes(data[at : at + width], "little")
            limit = _LIMITS.get(code)
            if limit is not None and length > limit[0]:
                raise refused(f"a {limit[1]} of {length:,} bytes at byte {at:,} of the pickle")
            at += width + length
        else:
            for _ in range(width):
                newline = data.find(b"\n", at, at + 1_000)
                if newline < 0:
                    if at + 1_000 > size:
                        raise NeedMore
                    raise damaged(f"an endless name at byte {at:,} of the pickle")
                at = newline + 1
    raise NeedMore

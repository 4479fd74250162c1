"""The first pass over a pickle: is every instruction allowed, how long is it, which memo entries are used?

Nothing is built here. Where a pickle asks for something that is no instruction, claims more bytes than it has or nests
marks too deep, the second pass ends: what it would have called before that is known then, and the flaw is raised.
"""

from __future__ import annotations

import pickletools
from typing import NamedTuple

from .flaws import Flaw, damaged, refused

MAX_MARKS = 1_000
MAX_LONG = 256
MAX_TEXT = 4 << 20
MAX_LINE = 1_000

NAMES = {ord(op.code): op.name for op in pickletools.opcodes}

_FIXED, _COUNTED, _LINES, _FRAMED = 0, 1, 2, 3


def _shape(op: pickletools.OpcodeInfo) -> tuple[int, int]:
    """How to find the end of an instruction: a fixed size, a length in front, lines of text; frames stand apart."""
    if op.arg is None:
        return _FIXED, 0
    if op.name == "FRAME":
        return _FRAMED, op.arg.n
    if op.arg.n >= 0:
        return _FIXED, op.arg.n
    if op.arg.n == -1:  # pickletools' UP_TO_NEWLINE
        return _LINES, 2 if op.name in ("GLOBAL", "INST") else 1
    return _COUNTED, {-2: 1, -3: 4, -4: 4, -5: 8}[op.arg.n]  # pickletools' TAKEN_FROM_ARGUMENT* codes


SHAPES: list[tuple[int, int] | None] = [None] * 256
for _op in pickletools.opcodes:
    SHAPES[ord(_op.code)] = _shape(_op)

_MARK, _STOP, _BINGET, _LONG_BINGET, _GET = b"(.hjg"
_LIMITS = {  # what is turned into an object several times its size: whole numbers and text
    **dict.fromkeys(b"\x8a\x8b", (MAX_LONG, "whole number")),
    **dict.fromkeys(b"X\x8c\x8dTU", (MAX_TEXT, "text")),
}
_TEXTS = frozenset(b"SV")
_POPPERS = frozenset(b"tldueoi\x90\x911")  # instructions that take everything down to a mark


class NeedMore(Exception):
    """The pickle continues beyond the bytes read so far."""


class Survey(NamedTuple):
    """What the first pass learned."""

    end: int
    fetched: frozenset[int]
    """The memo entries that are ever read back; all others need not be kept."""
    flaw: Flaw | None = None
    """Why the pickle cannot be followed beyond ``end``."""


def survey(data: bytes, start: int = 0) -> Survey:
    """Check one pickle in ``data`` without building anything; raises `NeedMore` when the bytes end before it does.

    >>> survey(b"\\x80\\x02}q\\x00.").end
    6
    """
    fetched: set[int] = set()
    at = [start]
    try:
        return Survey(_follow(data, start, fetched, at), frozenset(fetched))
    except Flaw as flaw:
        return Survey(at[0], frozenset(fetched), flaw)


def survey_cut(data: bytes, start: int = 0) -> Survey:
    """Like `survey` for a pickle of which the end is missing."""
    fetched: set[int] = set()
    at = [start]
    cut = damaged("the pickle ends before its last instruction")
    try:
        _follow(data, start, fetched, at)
    except Flaw as flaw:
        cut = flaw
    except NeedMore:
        pass
    return Survey(at[0], frozenset(fetched), cut)


def _follow(data: bytes, at: int, fetched: set[int], place: list[int]) -> int:
    size, marks, frame = len(data), 0, 0
    until = size  # the end of the frame that is open, if it ends in these bytes
    shapes = SHAPES
    while at < until or at < (until := _behind_frame(at, until, size, place)):
        place[0] = at
        code = data[at]
        shape = shapes[code]
        if shape is None:
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
                return at
            elif code in _POPPERS:
                marks -= 1
            at += width
        elif kind == _COUNTED:
            length = int.from_bytes(data[at : at + width], "little")
            limit = _LIMITS.get(code)
            if limit is not None and length > limit[0]:
                raise refused(f"a {limit[1]} of {length:,} bytes at byte {at:,} of the pickle")
            at += width + length
        elif kind == _FRAMED:
            if at <= frame:
                raise refused(f"a frame at byte {at - 1:,} of the pickle begins inside another")
            frame = at + width + int.from_bytes(data[at : at + width], "little")
            until = min(frame, size)
            at += width
        else:
            for _ in range(width):
                longest = MAX_TEXT if code in _TEXTS else MAX_LINE
                newline = data.find(b"\n", at, at + longest)
                if newline < 0:
                    if at + longest > size:
                        raise NeedMore
                    raise damaged(f"an endless line at byte {at:,} of the pickle")
                if code == _GET:
                    fetched.add(_index(data[at:newline]))
                at = newline + 1
            if code in _POPPERS:
                marks -= 1
    raise NeedMore


def _behind_frame(at: int, frame: int, size: int, place: list[int]) -> int:
    """How far to go on at the end of a frame.

    Python's machine in C goes on there whatever an instruction across it would have taken as its argument, so calls
    can hide in what others take for a text (python/cpython#154848).
    """
    if frame < at and frame < size:
        raise refused(f"an instruction at byte {place[0]:,} of the pickle crosses the end of its frame")
    return size


def _index(line: bytes) -> int:
    if len(line) < 20 and line.strip().isdigit():
        return int(line)
    raise damaged("the pickle fetches something by a number that is none")

"""Bytes into lines: whole ones only, whatever the pieces they arrive in.

>>> lines = Lines()
>>> lines.feed(b"a\\nb\\r\\nc"), lines.feed(b"d\\re\\n"), lines.rest()
([(1, b'a'), (2, b'b')], [(3, b'cd'), (3, b'e')], [])

A line ends with a newline or a carriage return; progress bars write thousands of the latter. Only newlines are counted
in line numbers. A line of more than 4 MB is cut; what follows in it is passed over, not kept.
"""

from __future__ import annotations

import codecs
import re

LONGEST = 4 << 20
Numbered = tuple[int, bytes]

# \b: what Keras wrote before it learned \r. Form feeds and vertical tabs end a line as well.
_ENDS = bytes.maketrans(b"\r\b\x0b\x0c", b"\n\n\n\n")
_COLOUR = re.compile(rb"\x1b(?:\[[0-9;:?]{0,60}m|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|\([A-Z0-9])")
_MOVE = re.compile(rb"\x1b(?:\[[0-9;:?<>=]{0,60}[ -/]{0,4}[@-~]|[@-Z\\-_])")


class Lines:
    """Splits a stream."""

    def __init__(self) -> None:
        self.number = 1
        self.cut = 0
        """How many lines were too long."""
        self._tail = b""
        self._skipping = False
        self._decoder: codecs.IncrementalDecoder | None = None
        self._begun = False

    def feed(self, data: bytes) -> list[Numbered]:
        """The lines that are whole now, with their numbers; empty ones are left out."""
        return self.split(self.take(data))

    def take(self, data: bytes) -> bytes:
        """The bytes up to the end of the last line that is whole; `split` them, or count them with `passed`."""
        if not self._begun:
            data = self._begin(self._tail + data)
        if self._decoder is not None:
            data = self._decoder.decode(data).encode("utf-8", "replace")
        if self._skipping:
            data = self._skip(data)
        data = self._tail + data if self._tail else data
        end = max(data.rfind(b"\n"), data.rfind(b"\r"), data.rfind(b"\b"))
        block, self._tail = data[: end + 1], data[end + 1 :]
        if len(self._tail) > LONGEST:
            self.cut += 1
            self._skipping = True
            block, self._tail = block + self._tail[:LONGEST] + b"\r", b""
        return block

    def passed(self, count: int) -> None:
        """Lines that were read without being split."""
        self.number += count

    def rest(self) -> list[Numbered]:
        """The last line, if the file ends without a newline."""
        tail, self._tail = self._tail, b""
        return self.split(tail)

    def split(self, block: bytes) -> list[Numbered]:
        """The lines of a block."""
        number = self.number
        if b"\r" not in block and b"\b" not in block:
            pieces = block.split(b"\n")
            self.number += len(pieces) - 1
            return [(number + i, line) for i, line in enumerate(pieces) if line]
        found = []
        for line in block.split(b"\n"):
            found += [(number, piece) for piece in line.translate(_ENDS).split(b"\n") if piece]
            number += 1
        self.number = number - 1
        return found

    def _begin(self, data: bytes) -> bytes:
        """The byte order mark, if there is one; PowerShell redirects into UTF-16."""
        if len(data) < 3 and data in (b"\xff", b"\xfe", b"\xef", b"\xef\xbb"):
            self._tail = data
            return b""
        self._begun, self._tail = True, b""
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            name = "utf-16-le" if data.startswith(codecs.BOM_UTF16_LE) else "utf-16-be"
            self._decoder = codecs.getincrementaldecoder(name)("replace")
            return data[2:]
        return data.removeprefix(codecs.BOM_UTF8)

    def _skip(self, data: bytes) -> bytes:
        end = data.translate(_ENDS).find(b"\n")
        if end < 0:
            return b""
        self._skipping = False
        return data[end:]


def clean(piece: bytes) -> list[bytes]:
    """A line without terminal codes; where the cursor was moved, another line begins.

    >>> clean(b"\\x1b[31mloss\\x1b[0m: nan\\x1b[A{}")
    [b'loss: nan', b'{}']
    """
    if b"\x1b" not in piece:
        return [piece]
    return [p for p in _MOVE.sub(b"\n", _COLOUR.sub(b"", piece)).split(b"\n") if p]

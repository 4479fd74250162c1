"""A config file as text: bounded in size, with the line and the byte of every character."""

from __future__ import annotations

import bisect
import itertools
import re
from functools import cached_property
from pathlib import Path

from ..errors import FormatError, UsageError
from ..files import file_bytes

MAX_BYTES = 4 << 20
MAX_NODES = 100_000
MAX_DEPTH = 100


class Source:
    """The text of one file.

    >>> source = Source("c.yaml", "a: 1\\né: 2\\n")
    >>> source.line(8), source.column(8), source.bytes(8, 9)
    (2, 4, (9, 10))
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.bom = text.startswith("\ufeff")
        self.text = text.removeprefix("\ufeff")

    @property
    def whole(self) -> str:
        """The text with the byte-order mark that it came with."""
        return f"\ufeff{self.text}" if self.bom else self.text

    @classmethod
    def read(cls, path: str | Path) -> Source:
        """Read a file; what is too large, not text or not there gets a sentence."""
        file = Path(path)
        try:
            if not file.is_file():
                there = "it is no regular file" if file.exists() else "there is no such file"
                what = "is a folder" if file.is_dir() else f"cannot be read: {there}"
                raise UsageError(f"{path} {what}", hint="give a config file")
            if file.stat().st_size > MAX_BYTES:
                raise UsageError(f"{path} is too large for a config", hint="give the config file of the run")
            data = file_bytes(file)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}", hint="give a readable config file") from None
        try:
            return cls(str(path), data.decode("utf-8"))
        except UnicodeDecodeError:
            raise FormatError(f"{path} is not UTF-8 text", hint="give a YAML, JSON, TOML or Python config") from None

    @cached_property
    def _breaks(self) -> list[int]:
        return [m.end() for m in re.finditer(r"\r\n|\r|\n", self.text)]

    @cached_property
    def _bytes(self) -> list[int] | None:
        if self.text.isascii():
            return None
        return [0, *itertools.accumulate(len(c.encode(errors="replace")) for c in self.text)]

    def line(self, index: int) -> int:
        """The line of a character, from 1."""
        return bisect.bisect_right(self._breaks, index) + 1

    def column(self, index: int) -> int:
        """The place of a character in its line, from 1."""
        line = bisect.bisect_right(self._breaks, index)
        return index - (self._breaks[line - 1] if line else 0) + 1

    def bytes(self, start: int, end: int) -> tuple[int, int]:
        """The bytes of a range of characters, as they count in the file."""
        shift = 3 if self.bom else 0
        if self._bytes is None:
            return start + shift, end + shift
        return self._bytes[start] + shift, self._bytes[end] + shift

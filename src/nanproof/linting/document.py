"""A file as the linter reads it: its bytes, the Python text in them, and the way back from the text to the bytes."""

from __future__ import annotations

import ast
import codecs
import io
import tokenize
import warnings
from bisect import bisect_right
from pathlib import Path
from typing import Protocol

from ..files import file_bytes
from ..records import Edit
from .tree import line_starts

LIMIT = 10 * 10**6
"""Larger files are data, not code."""

_SIMPLE = ("utf-8", "ascii", "iso-8859-1")


class Unreadable(Exception):
    """A file cannot be linted; carries the words for the user and, for syntax errors, the place."""

    def __init__(self, message: str, line: int = 1, column: int = 1) -> None:
        super().__init__(message)
        self.message, self.line, self.column = message, line, column


class Shown(Protocol):
    """What all files have in common that findings are shown in."""

    path: str
    data: bytes
    text: str
    encoding: str
    """How the text of an edit is to be written into ``data``."""

    def locate(self, offset: int) -> tuple[str, int, int]:
        """Path (with the cell, for a notebook), line and column, from 1, of a place in the text."""

    def compiles(self) -> bool:
        """Whether Python would compile it, or, of a config, its reader read it."""


class Document(Shown, Protocol):
    """What a Python file and a notebook have in common."""

    def parse(self) -> ast.Module:
        """The syntax tree of the text, or `Unreadable`."""

    def failures(self) -> list[tuple[int, Unreadable]]:
        """Parts left out of the text because they do not parse, each with its offset."""

    def edit(self, start: int, end: int, text: str) -> Edit | None:
        """The replacement of bytes that amounts to this replacement in the text, if there is one."""


def parse(text: str) -> ast.Module:
    """The syntax tree of a text, or `Unreadable` with the reason in a sentence; top-level ``await`` is fine."""
    try:
        tree = _compile(text, ast.PyCF_ONLY_AST)
    except SyntaxError as error:
        raise Unreadable(_syntax_words(error), error.lineno or 1, max(1, error.offset or 1)) from None
    except (RecursionError, MemoryError):
        raise Unreadable("nested too deeply for Python's parser") from None
    except (ValueError, OverflowError) as error:
        raise Unreadable(f"Python cannot read it: {error}") from None
    assert isinstance(tree, ast.Module)
    return tree


def compiles(text: str) -> bool:
    """Whether Python compiles the text to the end; more than parsing: `return` must stand in a function, and so on."""
    try:
        _compile(text)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return False
    return True


def _compile(text: str, flags: int = 0) -> object:
    # Not under its own name: for a syntax error Python would take the line from the file, which a cell is not.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings are not our business
        return compile(text, "<linted>", "exec", flags=flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _syntax_words(error: SyntaxError) -> str:
    words = error.msg or "invalid syntax"
    if words.startswith(("Missing parentheses in call to", "multiple exception types", "leading zeros in decimal")):
        return f"Python 2 code: {words}"
    return f"syntax error: {words}"


class PythonFile:
    """A .py file in any encoding that Python takes."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.data = path, data
        if b"\0" in data:
            line = data.count(b"\n", 0, data.index(b"\0")) + 1
            raise Unreadable("the file has null bytes; it is not Python, or damaged", line)
        coding, self.text = _decode(data)
        self._bom = 3 if coding == "utf-8-sig" else 0
        self.encoding = coding.removesuffix("-sig")
        self._ascii = self.text.isascii() and self.encoding in _SIMPLE
        self._starts: list[int] | None = None

    def parse(self) -> ast.Module:
        return parse(self.text)

    def failures(self) -> list[tuple[int, Unreadable]]:
        return []

    def compiles(self) -> bool:
        return compiles(self.text)

    def locate(self, offset: int) -> tuple[str, int, int]:
        if self._starts is None:
            self._starts = line_starts(self.text)
        line = bisect_right(self._starts, offset)
        return self.path, line, offset - self._starts[line - 1] + 1

    def edit(self, start: int, end: int, text: str) -> Edit | None:
        coding = self.encoding
        try:
            first = self._bom + (start if self._ascii else len(self.text[:start].encode(coding)))
            last = first + (end - start if self._ascii else len(self.text[start:end].encode(coding)))
            whole = self.data[:first] + text.encode(coding) + self.data[last:]
            if (
                coding not in _SIMPLE
                and whole[self._bom :].decode(coding) != self.text[:start] + text + self.text[end:]
            ):
                return None  # with shift states or two spellings of one character, ranges of bytes mean nothing
        except UnicodeError:
            return None
        return Edit(path=self.path, start=first, end=last, text=text)


def _decode(data: bytes) -> tuple[str, str]:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return encoding, data.decode(encoding)
    except (SyntaxError, LookupError) as error:
        raise Unreadable(f"its encoding is not known: {error}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"it is not {error.encoding} text as it says: byte {error.start}", line) from None


def read_bytes(path: Path) -> bytes:
    """The bytes of a source file, or `Unreadable`."""
    try:
        status = path.stat()
        if not path.is_file():
            raise Unreadable("it is not a regular file")
        if status.st_size > LIMIT:
            raise Unreadable(f"it has {status.st_size / 1e6:.0f} MB; files over {LIMIT // 10**6} MB are not linted")
        return file_bytes(path)
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror or error}") from None


def refuse_wide(data: bytes) -> None:
    """Raise `Unreadable` for UTF-16 and UTF-32, which Python refuses, and in which no word would be found."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE))
    if wide or (b"\0" in data[:4] and data[:4].count(b"\0") in (2, 3)):
        raise Unreadable("it is UTF-16 or UTF-32 text, which Python does not read; save it as UTF-8")


def open_document(path: str, data: bytes) -> Document:
    """The document in these bytes: a notebook or Python."""
    if path.endswith(".ipynb"):
        from .notebook import Notebook

        return Notebook(path, data)
    return PythonFile(path, data)

"""Jupyter notebooks: the code cells as one text, and every place in it as a place in the JSON.

The file is never written as a whole: an edit becomes a replacement inside the JSON strings of a cell, so that
everything else, outputs, metadata, order and indentation, keeps its bytes.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from ..files import file_bytes
from ..records import Edit, Finding
from .document import Unreadable, compiles, parse
from .tree import line_starts

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_SCALAR = re.compile(r"[^,\]}\s]+")
_PIECE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|[^\\]")

# Cell magics whose body is still Python; the body of any other is another language.
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%memit", "%%mprun", "%%debug", "%%python3")
_MAGIC = re.compile(
    r"[ \t]*[%!?]|[ \t]*[\w.]+\?{1,2}[ \t]*$|(?:pip|conda|cd|ls|cat|mkdir|cp|mv|rm|pwd|wget|git|unzip)[ \t]"
)
_ASSIGNED_MAGIC = re.compile(r"([ \t]*[\w.,\[\] \t]+=[ \t]*)[!%][\w \t]")


@dataclass(frozen=True, slots=True)
class Literal:
    """A JSON string in the file: where its contents begin, how they are written, and what they say."""

    start: int
    raw: str
    value: str

    @property
    def end(self) -> int:
        return self.start + len(self.raw)

    def find(self, count: int) -> int:
        """The place in the file of the ``count``-th character."""
        if len(self.raw) == len(self.value):
            return self.start + count
        at = self.start
        for i, piece in enumerate(_PIECE.finditer(self.raw)):
            if i == count:
                break
            at = self.start + piece.end()
        return at


@dataclass(frozen=True, slots=True)
class Cell:
    """A code cell: its place among all cells, its text, and where that text begins in the text of the notebook."""

    number: int
    text: str
    offset: int
    literals: tuple[Literal, ...]
    between: str
    """What separates two strings of the source list, for inserted lines."""


class Notebook:
    """A .ipynb file."""

    encoding = "utf-8"

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.data = path, data
        try:
            self._raw = data.decode("utf-8")
            json.loads(self._raw)
        except (UnicodeDecodeError, ValueError) as error:
            raise Unreadable(f"it is not a notebook: {error}") from None
        except RecursionError:
            raise Unreadable("it is not a notebook: nested too deeply") from None
        self.cells = _cells(self._raw)
        self._failures: list[tuple[int, Unreadable]] = []
        self.text = "".join(self._readable(cell) + "\n" for cell in self.cells)

    def _readable(self, cell: Cell) -> str:
        """The text of a cell with its magics, or all of it if it does not parse, blanked out at the same length."""
        text = mask(cell.text)
        try:
            parse(text)
        except Unreadable as error:
            self._failures.append((cell.offset, error))
            return re.sub(r"[^\r\n]", " ", cell.text)
        return text

    def parse(self) -> ast.Module:
        return parse(self.text)

    def failures(self) -> list[tuple[int, Unreadable]]:
        return self._failures

    def compiles(self) -> bool:
        return not self._failures and compiles(self.text)

    def locate(self, offset: int) -> tuple[str, int, int]:
        cell = self._cell(offset)
        starts = line_starts(cell.text)
        line = bisect_right(starts, offset - cell.offset)
        return f"{self.path}:cell {cell.number}", line, offset - cell.offset - starts[line - 1] + 1

    def edit(self, start: int, end: int, text: str) -> Edit | None:
        cell = self._cell(start)
        if end > cell.offset + len(cell.text):
            return None  # from one cell into the next
        first, last = _find(cell, start - cell.offset), _find(cell, end - cell.offset)
        before = first if self._raw.isascii() else len(self._raw[:first].encode())
        after = before + len(self._raw[first:last].encode())
        return Edit(path=self.path, start=before, end=after, text=_escape(text, cell.between, self._raw.isascii()))

    def _cell(self, offset: int) -> Cell:
        return self.cells[max(0, bisect_right([c.offset for c in self.cells], offset) - 1)]


def file_place(finding: Finding) -> tuple[str, int, int]:
    """Path, line and column in the file itself; of a finding in a cell, where the JSON of the notebook has it."""
    path, mark, number = finding.path.partition(":cell ")
    if not mark:
        return finding.path, finding.line, finding.column
    try:
        raw = file_bytes(path)
        book = Notebook(path, raw)
        cell = next(c for c in book.cells if c.number == int(number))
        starts = line_starts(cell.text)
        at = _find(cell, starts[finding.line - 1] + finding.column - 1)
    except (OSError, Unreadable, StopIteration, ValueError, IndexError):
        return path, 1, 1  # it has changed since
    text = raw.decode("utf-8")
    lines = line_starts(text)
    line = bisect_right(lines, at)
    return path, line, at - lines[line - 1] + 1


def mask(text: str) -> str:
    """A cell with IPython's own lines replaced by plain Python of the same length.

    >>> mask("%matplotlib inline\\nx = !ls -l\\nimport torch")
    '0                 \\nx = 0     \\nimport torch'
    """
    head = text.lstrip()
    if head.startswith("%%") and not head.startswith(_PYTHON_MAGICS):
        return re.sub(r"[^\r\n]", " ", text)
    lines = text.splitlines(keepends=True)
    for _ in lines:
        try:
            parse("".join(lines))
            break
        except Unreadable as error:  # only a line that Python refuses is a magic: `% b` may end an expression
            if not _blank_magic(lines, error.line - 1):
                break
    return "".join(lines)


def _blank_magic(lines: list[str], at: int) -> bool:
    """Blank out the magic on this line, and the lines that continue it; false when there is none."""
    while 0 < at < len(lines) and lines[at - 1].rstrip("\r\n").endswith("\\"):
        at -= 1  # `!python train.py \\` continues here, and Python's tokenizer already stumbles over a file name
    body = lines[at].rstrip("\r\n") if at < len(lines) else ""
    assigned = _ASSIGNED_MAGIC.match(body)
    if not assigned and not _MAGIC.match(body):
        return False
    keep = assigned.end(1) if assigned else len(body) - len(body.lstrip())
    lines[at] = body[:keep] + "0".ljust(len(body) - keep) + lines[at][len(body) :]
    while body.endswith("\\") and at + 1 < len(lines):
        at += 1
        body = lines[at].rstrip("\r\n")
        lines[at] = " " * len(body) + lines[at][len(body) :]
    return True


def _find(cell: Cell, offset: int) -> int:
    """The place in the JSON of a place in the cell; between two strings, the beginning of the second."""
    begins = 0
    for literal in cell.literals:
        if offset < begins + len(literal.value):
            return literal.find(offset - begins)
        begins += len(literal.value)
    return cell.literals[-1].end


def _escape(text: str, between: str, ascii_only: bool) -> str:
    """A text as the inside of JSON strings; in a list of lines, each line is a string of its own."""
    lines = [json.dumps(line, ensure_ascii=ascii_only)[1:-1] for line in text.split("\n")]
    return (rf'\n"{between}"' if between else r"\n").join(lines)


def _cells(raw: str) -> tuple[Cell, ...]:
    """The code cells of a notebook, also of the old format 3."""
    root, _ = _scan(raw, _skip(raw, 0))
    sheets = [root] if isinstance(root, dict) else []
    if sheets and isinstance(sheets[0].get("worksheets"), list):
        sheets = [s for s in sheets[0]["worksheets"] if isinstance(s, dict)]
    everything = [c for s in sheets if isinstance(s.get("cells"), list) for c in s["cells"]]
    if not any(isinstance(s.get("cells"), list) for s in sheets):
        raise Unreadable("it is not a notebook: it has no cells")
    found, offset = [], 0
    for number, cell in enumerate(everything, 1):
        if not isinstance(cell, dict) or _value(cell.get("cell_type")) != "code":
            continue
        source = cell.get("source", cell.get("input"))
        literals = tuple(s for s in (source if isinstance(source, list) else [source]) if isinstance(s, Literal))
        if not literals:
            continue
        text = "".join(s.value for s in literals)
        between = raw[literals[0].end + 1 : literals[1].start - 1] if len(literals) > 1 else ""
        if isinstance(source, list) and len(literals) == 1:
            between = ", "
        found.append(Cell(number, text, offset, literals, between))
        offset += len(text) + 1
    return tuple(found)


def _value(item: object) -> str | None:
    return item.value if isinstance(item, Literal) else None


def _skip(raw: str, at: int) -> int:
    match = _SPACE.match(raw, at)
    assert match is not None
    return match.end()


def _scan(raw: str, at: int) -> tuple[Any, int]:
    """A JSON value with its strings as `Literal`, and where it ends; ``raw`` is known to be valid."""
    opening = raw[at]
    if opening == '"':
        match = _STRING.match(raw, at)
        assert match is not None
        return Literal(at + 1, match.group()[1:-1], json.loads(match.group(), strict=False)), match.end()
    if opening not in "[{":
        match = _SCALAR.match(raw, at)
        assert match is not None
        return None, match.end()
    items: list[Any] = []
    fields: dict[str, Any] = {}
    at = _skip(raw, at + 1)
    while raw[at] not in "]}":
        value, at = _scan(raw, at)
        at = _skip(raw, at)
        if opening == "{":
            key = value.value
            fields[key], at = _scan(raw, _skip(raw, at + 1))
            at = _skip(raw, at)
        else:
            items.append(value)
        if raw[at] == ",":
            at = _skip(raw, at + 1)
    return (fields if opening == "{" else items), at + 1

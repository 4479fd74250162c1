"""Findings as text: the code around them, the patch that would repair them, annotations for GitHub."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence

from ..records import Finding
from .document import Shown, Unreadable, open_document
from .notebook import file_place
from .tree import line_starts

CONTEXT = 2


def frame(document: Shown, span: tuple[int, int]) -> list[str]:
    """The lines around a place, numbered, with the place underlined.

    >>> from .document import PythonFile
    >>> for line in frame(PythonFile("a.py", b"import torch\\ny = torch.log(x)\\n"), (17, 29)):
    ...     print(line.rstrip())
      |
    1 | import torch
    2 | y = torch.log(x)
      |     ^^^^^^^^^^^^
    """
    _, first, column = document.locate(span[0])
    text = _part(document, span[0])
    starts = line_starts(text)
    width = len(str(first + CONTEXT))
    bar = " " * width + " |"
    lines = [bar]
    for number in range(max(1, first - CONTEXT), min(len(starts), first + CONTEXT) + 1):
        line = _line(text, starts, number)
        if not line.strip() and number < first and len(lines) == 1:
            continue
        if not line.strip() and number > first:
            break
        lines.append(f"{number:>{width}} | {_plain(line)}")
        if number == first:
            before, rest = line[: column - 1], line[column - 1 :]
            here = rest[: max(1, span[1] - span[0])]
            lines.append(f"{bar} {' ' * len(_plain(before))}{'^' * max(1, len(_plain(here.rstrip())))}")
    return lines


def _part(document: Shown, offset: int) -> str:
    """The file, or the cell of a notebook, that holds a place."""
    for cell in getattr(document, "cells", ()):
        if cell.offset <= offset <= cell.offset + len(cell.text):
            return str(cell.text)
    return document.text


def _line(text: str, starts: Sequence[int], number: int) -> str:
    end = starts[number] if number < len(starts) else len(text)
    return text[starts[number - 1] : end].rstrip("\r\n")


def _plain(line: str) -> str:
    """Tabs at a fixed width, and no control character on a terminal."""
    return "".join("    " if c == "\t" else c if c.isprintable() else "?" for c in line)


def fix_words(finding: Finding) -> str:
    """What can be done about a finding automatically."""
    if not finding.edits:
        return ""
    return "safe, applied by --fix" if finding.safe else "unsafe, applied by --unsafe-fixes"


def patch(path: str, old: bytes, new: bytes) -> Iterator[str]:
    """A unified diff; of a notebook, the diff of its code."""
    before, after = _text(path, old), _text(path, new)
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}", n=3)
    for line in lines:
        yield line.removesuffix("\n")
        if not line.endswith("\n"):
            yield "\\ No newline at end of file"


def _text(path: str, data: bytes) -> str:
    try:
        document = open_document(path, data)
    except Unreadable:
        return data.decode(errors="replace")
    cells = getattr(document, "cells", ())
    return "".join(f"# cell {c.number}\n{c.text}\n" for c in cells) if cells else document.text


def _lines(text: str) -> list[str]:
    starts = [*line_starts(text), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(starts) if a < b]


def annotation(finding: Finding) -> str:
    """A line that GitHub Actions shows beside the code."""
    path, line, column = file_place(finding)
    where = f"file={_escape(path, value=True)},line={line},col={column}"
    words = finding.message + (f". {finding.help}" if finding.help else "")
    return (
        f"::{'notice' if finding.info else 'error'} {where},title={_escape(finding.code, value=True)}::{_escape(words)}"
    )


def _escape(text: str, *, value: bool = False) -> str:
    plain = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return plain.replace(":", "%3A").replace(",", "%2C") if value else plain

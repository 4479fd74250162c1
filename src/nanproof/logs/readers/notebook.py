"""Jupyter notebooks: what their cells printed is a log, what they hold is code and commands.

>>> cells = [{"cell_type": "code", "source": ["!python train.py --lr 1\\n", "x = 1"], "outputs": [
...     {"output_type": "stream", "text": ["step 1 loss 2.5\\n", "step 2 loss nan\\n"]}]}]
>>> book = read_notebook(json.dumps({"cells": cells}).encode())
>>> book.printed.splitlines(), book.code, book.commands
(['step 1 loss 2.5', 'step 2 loss nan'], 'pass\\nx = 1\\n', 'python train.py --lr 1\\n')
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..collect import Collector
from ..desk import Desk

LARGEST = 64 << 20
_ROW = re.compile(r"<tr[^>]*>(.*?)</tr>", re.DOTALL | re.IGNORECASE)
_CELL = re.compile(r"<t([hd])[^>]*>(.*?)</t[hd]>", re.DOTALL | re.IGNORECASE)


def is_notebook(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and b'"cell_type"' in head


@dataclass(frozen=True, slots=True, kw_only=True)
class Notebook:
    """The three things that a notebook holds."""

    printed: str = ""
    code: str = ""
    """The code cells one after the other; lines that are no Python are ``pass``."""
    commands: str = ""
    """What its cells gave to a shell."""


def read_notebook(data: bytes) -> Notebook:
    """Read a notebook; one that is cut off or no notebook gives nothing."""
    try:
        cells = json.loads(data[:LARGEST]).get("cells", [])
    except (ValueError, AttributeError, RecursionError):
        return Notebook()
    found = [c for c in cells if isinstance(c, dict) and c.get("cell_type") == "code"]
    lines = [line for cell in found for line in _text(cell.get("source")).splitlines()]
    magic = [line.lstrip() for line in lines]
    commands = [m[1:].strip() for m in magic if m.startswith("!")]
    code = [
        line[: len(line) - len(m)] + "pass" if m.startswith(("!", "%", "?")) else line
        for line, m in zip(lines, magic, strict=True)
    ]
    printed = [text for cell in found for output in cell.get("outputs", ()) for text in _printed(output)]
    return Notebook(printed="".join(printed), code=_joined(code), commands=_joined(commands))


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _text(value: Any) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _printed(output: Any) -> Iterator[str]:
    """What an output shows, ending in a newline; the Trainer's table of losses as one object for each row."""
    if not isinstance(output, dict):
        return
    if output.get("output_type") == "error":
        yield f"Traceback (most recent call last):\n{output.get('ename')}: {output.get('evalue')}\n"
        return
    data = output.get("data")
    shown = data if isinstance(data, dict) else {}
    rows = list(_table(_text(shown.get("text/html"))))
    yield from (f"{json.dumps(row)}\n" for row in rows)
    text = _text(output.get("text") or ("" if rows else shown.get("text/plain")))
    if text:
        yield text if text.endswith("\n") else f"{text}\n"


def _table(page: str) -> Iterator[dict[str, float]]:
    names: list[str] = []
    for row in _ROW.findall(page):
        cells = [(kind, html.unescape(re.sub(r"<[^>]*>", "", text)).strip()) for kind, text in _CELL.findall(row)]
        if cells and all(kind in "hH" for kind, _ in cells):
            names = [text.lower().replace(" ", "_") for _, text in cells]
        elif names and len(cells) == len(names):
            yield {
                name: number
                for name, (_, text) in zip(names, cells, strict=True)
                if (number := _number(text)) is not None
            }


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


class NotebookStream:
    """Decodes a notebook, which is one document: it is read when it is whole."""

    def __init__(self, collector: Collector) -> None:
        self._desk = Desk(collector)
        self._data = b""

    def feed(self, data: bytes) -> None:
        if len(self._data) < LARGEST:
            self._data += data

    def settle(self) -> None:
        """A notebook is saved as a whole."""

    def close(self) -> None:
        self._desk.feed(read_notebook(self._data).printed.encode())
        self._desk.close()

"""CSV files: Lightning's sparse metrics.csv, ultralytics' results.csv with its padded header, timm's summary.csv."""

from __future__ import annotations

import csv
import re

from .. import numbers
from ..collect import Collector
from ..lines import Lines, Numbered
from ..names import STEP_KEYS, meaning, pick

# the columns of a summary.csv of timm that lost its header
_BARE = ("epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr")
_ROLES = frozenset({"loss", "component", "eval", "grad_norm", "lr"})
_NAME = re.compile(r"[A-Za-z_#%][\w #%/@()\[\]|+-]*(?:\.\w[\w #%/@()-]*)*")
_DELIMITERS = (",", ";", "\t")


_VALUED = re.compile(r"(?i)[a-z]\s+[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)$")


def read_header(line: bytes, below: bytes = b"") -> tuple[str, list[str]] | None:
    """The delimiter and the names, if a line is the header of a sheet of training; ``below`` is the line under it.

    >>> read_header(b"      epoch,  train/box_loss,   lr/pg0")
    (',', ['epoch', 'train/box_loss', 'lr/pg0'])
    >>> read_header(b"209,nan,4.1607,7.72,24.01")
    (',', ['epoch', 'train_loss', 'eval_loss', 'eval_top1', 'eval_top5'])
    >>> read_header(b"hello, world, loss: 3") is None
    True
    """
    text = line.decode("utf-8", "replace").strip("\ufeff \r")
    for delimiter in _DELIMITERS:
        cells = _cells(text, delimiter)
        under = _cells(below.decode("utf-8", "replace"), delimiter) if below else []
        if len(cells) < 2 or (under and len(under) != len(cells)):
            continue
        if any(_VALUED.search(c) for c in cells):  # "Epoch 0, loss 1.08" is a line of a text log
            continue
        if any(meaning(c).role in _ROLES for c in cells) and all(_is_name(c) for c in cells):
            return delimiter, cells
        if (
            len(cells) in (5, 6)
            and all(numbers.of(c) is not None for c in cells)
            and numbers.whole(cells[0]) is not None
        ):
            return delimiter, list(_BARE[: len(cells)])
    return None


class SheetStream:
    """Decodes a CSV file; a header in the middle of it, from a run that was started again, is a header again."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._lines = Lines()
        self._names: list[str] = []
        self._delimiter = ","

    def feed(self, data: bytes) -> None:
        self._take(self._lines.feed(data))

    def settle(self) -> None:
        """Every whole line is read already."""

    def close(self) -> None:
        self._take(self._lines.rest())

    def _take(self, lines: list[Numbered]) -> None:
        rows = [row for _, line in lines if (row := self._row(line))]
        self._collector.records(rows)

    def _row(self, line: bytes) -> dict[str, object]:
        begins_with_number = line.lstrip()[:1].isdigit()
        if not self._names or not begins_with_number:
            header = read_header(line)
            if header is not None:
                self._delimiter, self._names = header
                if not begins_with_number:
                    return {}
        cells = _cells(line.decode("utf-8", "replace"), self._delimiter)
        if len(cells) > len(self._names):
            self._collector.note("a row with more cells than the header is passed over")
            return {}
        row: dict[str, object] = {}
        for name, cell in zip(self._names, cells, strict=False):
            if not name or name.endswith(("__MIN", "__MAX")):
                continue
            if (number := numbers.of(cell)) is not None:
                row[name] = number
            elif cell and meaning(name).role in _ROLES:  # "n/a", "#NUM!": no number, and not nothing either
                row[name] = cell
        step = pick(row, STEP_KEYS)
        whole = numbers.whole(row[step]) if step else None
        return row if step is None or whole is None else row | {step: whole}


def _cells(text: str, delimiter: str) -> list[str]:
    if '"' not in text:
        return [c.strip() for c in text.split(delimiter)]
    try:
        return [c.strip() for c in next(csv.reader([text], delimiter=delimiter), [])]
    except csv.Error:
        return []


def _is_name(cell: str) -> bool:
    """Whether a cell can stand in a header: a name of a few words, or nothing."""
    if re.search(r"(?i)(?<![a-z_])nan(?![a-z_])", cell):
        return False
    return not cell or (_NAME.fullmatch(cell) is not None and cell.count(" ") <= 5 and numbers.of(cell) is None)

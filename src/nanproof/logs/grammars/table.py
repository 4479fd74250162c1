"""Tables: with a heading above the columns, or with a name and a number on every line.

      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size
      1/100      2.31G        nan        nan        nan         37        640: 100%|██████████| 8/8

| Step | Training Loss | Validation Loss |        | train/                  |             |
| 500  | 2.311000      | No Log          |        |    approx_kl            | 0.0123      |
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .. import numbers
from ..grammar import Reading
from ..names import EPOCH_KEYS, STEP_KEYS, meaning, pick
from ..plan import read_step, wanted

if TYPE_CHECKING:
    from ..desk import Desk

_GAPS = re.compile(rb"\s*\|\s*|\t+\s*|\s{2,}")
_SPACES = re.compile(rb"\s+")
_RULE = re.compile(rb"(?:[\s|+:=-]|\xe2[\x94\x95][\x80-\xbf]){3,}")  # also lines drawn with box characters
_HEADING = re.compile(rb"(?i)loss|mem")  # no heading that matters is without
_NAME = re.compile(rb"(?!.* \d)[A-Za-z#_][\w #%./@()-]{0,39}")
_HEADS = frozenset({"loss", "component", "eval"})
_SHORT = ("box", "obj", "cls", "dfl", "seg", "pose", "kobj")
_SIZE = re.compile(rb"\d[\d.]*[kKMGT]i?B?")


class Tables:
    """Remembers the heading, and the rows of a table that goes downwards."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.heads: list[str] = []
        self._gaps = _GAPS
        self.below: dict[str, float] = {}
        self._section = ""

    @property
    def open(self) -> bool:
        """Whether rows of a table that goes downwards wait for its end."""
        return bool(self.below or self._section)

    def take(self, piece: bytes) -> bool:
        """Whether a line belongs to a table."""
        text = piece.strip()
        first = text[:1]
        if first in b"|+-=\xe2" and _RULE.fullmatch(text):
            self._end()
            return True
        cells = _GAPS.split(text.strip(b"| \t")) if first == b"|" else []
        if len(cells) in (1, 2):
            return self._take_down(cells)
        self._end()
        if self.heads and (first.isdigit() or first == b"|") and self.take_row(text):
            return True
        if b":" in text or b"=" in text or _HEADING.search(text) is None:
            return False
        return self._take_heading(cells or _GAPS.split(text)) or self._take_narrow(text)

    def take_row(self, piece: bytes, inside: int | None = None, length: int | None = None) -> bool:
        """Whether a line is a row below the heading; a bar behind it tells how far within the epoch it stands."""
        if not self.heads:
            return False
        cells = self._gaps.split(piece.strip(b" |\t:"))
        if len(cells) == len(self.heads) + 1 and cells[0].isdigit():  # the index of a pandas frame
            cells = cells[1:]
        labeled = self.heads[0].lower() == "name"  # DI-engine labels its rows
        if len(cells) != len(self.heads) or not all(_is_cell(c) for c in cells[labeled:]):
            return False
        row = dict(zip(self.heads, cells, strict=True))
        step_key, epoch_key = pick(row, (*STEP_KEYS, "#")), pick(row, (*EPOCH_KEYS, "e"))
        step, last = read_step(row[step_key].decode()) if step_key else (None, None)
        epoch = read_step(row[epoch_key].decode())[0] if epoch_key else None
        if step is None and epoch is None:
            return False
        if step is None and epoch is not None and inside is not None and length is not None:
            step = max(0, epoch - 1) * length + inside
        values = {
            name: number
            for name, cell in row.items()
            if name not in (step_key, epoch_key) and wanted(name) and (number := numbers.parse(cell)) is not None
        }
        self._desk.emit(Reading(values, step, last, None if epoch is None else float(epoch)))
        return True

    def close(self) -> None:
        self._end()

    def _take_heading(self, cells: list[bytes]) -> bool:
        if len(cells) < 2 or not all(_NAME.fullmatch(c) for c in cells):
            return False
        names = [c.decode() for c in cells]
        counted = pick(names, (*STEP_KEYS, *EPOCH_KEYS, "#", "e")) is not None
        yolo = any("gpu_mem" in n.lower() for n in names)
        if not counted or not (yolo or any(meaning(n).role in _HEADS for n in names)):
            return False
        # the short names of YOLOv5 mean losses in its own table only
        self._gaps = _GAPS
        self.heads = [f"{n}_loss" if yolo and n.lower() in _SHORT else n for n in names]
        return True

    def _take_narrow(self, text: bytes) -> bool:
        """A heading with one space between its names, as fastai prints it."""
        cells = text.split()
        named = len(cells) > 2 and cells[0].decode("ascii", "replace").lower() in (*STEP_KEYS, *EPOCH_KEYS)
        self._gaps = _SPACES if named and self._take_heading(cells) else _GAPS
        return self._gaps is _SPACES

    def _take_down(self, cells: list[bytes]) -> bool:
        """``| loss | nan |``, below a heading of its section; the rows together are one record."""
        name, value = cells[0], cells[1] if len(cells) > 1 else b""
        if not _NAME.fullmatch(name):
            return False
        if not value:
            self._section = name.decode().strip("/") + "/" if name.endswith(b"/") else ""
            return name.endswith(b"/")
        number = numbers.parse(value)
        if number is None:
            return False
        if len(self.below) < 500:
            self.below[self._section + name.decode()] = number
        return True

    def _end(self) -> None:
        below, self.below, self._section = self.below, {}, ""
        if below:
            key = pick(below, STEP_KEYS) or next((k for k in below if k.endswith("total_timesteps")), None)
            step = numbers.whole(below.pop(key)) if key else None
            self._desk.emit(Reading({k: v for k, v in below.items() if wanted(k)}, step))


def _is_cell(cell: bytes) -> bool:
    if numbers.parse(cell) is not None or _SIZE.fullmatch(cell) or cell in (b"No Log", b"-", b"", b"nan%"):
        return True
    done, _, last = cell.partition(b"/")
    return (done.strip().isdigit() and last.strip().isdigit()) or re.fullmatch(rb"\d+:\d\d(?::\d\d)?", cell) is not None

"""Boxes of object detection: Pascal VOC XML, COCO JSON, and the label files of YOLO.

>>> import pathlib, tempfile
>>> path = pathlib.Path(tempfile.mkdtemp(), "0001.txt")
>>> _ = path.write_text("0 0.5 0.5 0.2 0.0\\n")
>>> [dict(p.columns) for p in read_yolo(path, lambda n: None)]
[{'class': array([0]), 'bbox_width': array([0.2]), 'bbox_height': array([0.])}]

A box without area is the usual NaN of a detector: its width goes through a logarithm, its area below a fraction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...files import file_bytes, file_text, open_file
from .piece import ROWS, Piece, Progress, Unreadable, columns_of

LARGEST = 256 << 20
_YOLO = re.compile(rb"\s*\d{1,5}(?:[ \t]+[-+.\deEnaNinfI]{1,24}){4}(?:[ \t]+[-+.\deE]{1,24}){0,200}\s*")
_NUMBER = r"\s*([-+.\deE]{1,24}|nan)\s*"
_OBJECT = re.compile(r"<object\b[^>]{0,200}>(.{0,20000}?)</object>", re.DOTALL)


def is_yolo(path: Path) -> bool:
    """Whether a text file holds a class and four numbers in its first line, in a folder of labels."""
    if "label" not in path.parent.name.lower() and "label" not in path.parent.parent.name.lower():
        return False
    with open_file(path) as stream:
        return _YOLO.fullmatch(stream.readline(8192)) is not None


def is_coco(path: Path) -> bool:
    """Whether a JSON file begins like a list of annotations; a config does not."""
    with open_file(path) as stream:
        head = stream.read(1 << 16)
    whole = b'"annotations"' in head and b'"images"' in head
    return whole or (b'"bbox"' in head and b'"image_id"' in head)


def read_voc(path: Path, progress: Progress) -> Iterator[Piece]:
    """One row for each object. No XML parser: nothing of a hostile file is expanded."""
    text = file_text(path, errors="replace")
    progress(len(text))
    if "<annotation" not in text[:4000]:
        return
    rows = [dict(_sides(found[1])) for found in _OBJECT.finditer(text)]
    if rows:
        yield Piece(0, columns_of(rows))


def _sides(text: str) -> Iterator[tuple[str, float]]:
    corners = {}
    for name in ("xmin", "ymin", "xmax", "ymax"):
        found = re.search(rf"<{name}>{_NUMBER}</{name}>", text)
        try:
            corners[name] = float(found[1]) if found else None
        except ValueError:
            corners[name] = None
    for side, low, high in (("bbox_width", "xmin", "xmax"), ("bbox_height", "ymin", "ymax")):
        first, last = corners[low], corners[high]
        if first is not None and last is not None:
            yield side, last - first


def read_coco(path: Path, progress: Progress) -> Iterator[Piece]:
    size = path.stat().st_size
    if size > LARGEST:
        raise Unreadable(f"{size >> 20:,} MB of JSON are more than is read at once")
    progress(size)
    try:
        whole = json.loads(file_bytes(path))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON ({error})") from None
    found = whole.get("annotations", []) if isinstance(whole, Mapping) else whole
    images = whole.get("images", []) if isinstance(whole, Mapping) else []
    pictures = {str(i.get("id")): i for i in images if isinstance(i, Mapping)} if isinstance(images, list) else {}
    found = [a for a in found if isinstance(a, Mapping)] if isinstance(found, list) else []
    rows = [_sizes(a, pictures.get(str(a.get("image_id")), {})) for a in found]
    for first in range(0, len(rows), ROWS):
        yield Piece(first, columns_of(rows[first : first + ROWS]))


def _sizes(annotation: Mapping[str, Any], picture: Mapping[str, Any]) -> dict[str, Any]:
    """The class, and the sides of the box as far as it lies in its picture: what is outside has no area."""
    box = annotation.get("bbox")
    row: dict[str, Any] = {"category_id": annotation.get("category_id", 0)}
    if isinstance(box, list) and len(box) == 4 and all(isinstance(v, int | float) for v in box):
        for side, (place, size) in (("width", box[::2]), ("height", box[1::2])):
            limit = picture.get(side)
            inside = min(place + size, limit) - max(place, 0) if isinstance(limit, int | float) else size
            row[f"bbox_{side}"] = float(min(size, inside))
    return row


def read_yolo(path: Path, progress: Progress) -> Iterator[Piece]:
    """A class and four numbers a line; an image without objects has an empty file, which is fine."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(file_bytes(path).splitlines(), start=1):
        progress(len(line))
        if not line.strip():
            continue
        words = line.split()
        try:
            numbers = [float(w) for w in words]
        except ValueError:
            raise Unreadable(f"line {number}: {line[:60].decode('utf-8', 'replace')!r} is no row of numbers") from None
        if len(numbers) == 5:  # longer ones are outlines
            sides = [
                min(s, min(c + s / 2, 1.0) - max(c - s / 2, 0.0))
                for c, s in zip(numbers[1:3], numbers[3:], strict=True)
            ]
            rows.append({"class": int(numbers[0]), "bbox_width": sides[0], "bbox_height": sides[1]})
    if rows:
        yield Piece(0, columns_of(rows))

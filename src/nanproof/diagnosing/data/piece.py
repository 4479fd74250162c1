"""What every reader of data gives: pieces of a table, small enough for memory whatever the size of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTES = 8 << 20  # of one piece
ROWS = 8192  # of one piece of a table

Values = NDArray[Any] | list[Any]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one file: by column an array whose first axis is the rows, or a list of one value per row."""

    first: int
    columns: Mapping[str, Values]


class Unreadable(Exception):
    """A file is not what it claims to be; the words say what is wrong with it."""


Reader = Callable[[Path, Progress], Iterator[Piece]]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    """Rows of a table turned on their side; columns of plain numbers become arrays.

    >>> columns_of([{"x": 1.5, "y": [1]}, {"x": None, "y": []}])
    {'x': [1.5, None], 'y': [[1], []]}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _array([row.get(name) for row in rows]) for name in names}


def _array(values: list[Any]) -> Values:
    if all(type(v) in (int, float) for v in values):
        try:
            return np.asarray(values, np.float64 if any(type(v) is float for v in values) else np.int64)
        except OverflowError:
            return np.asarray(values, np.float64)
    return values

"""numpy files: .npy and .npz, streamed; nothing in them is unpickled."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from ...files import open_file
from .piece import BYTES, Piece, Progress, Unreadable


def read_npy(path: Path, progress: Progress) -> Iterator[Piece]:
    with open_file(path) as stream:
        yield from _stream(stream, "", progress)


def read_npz(path: Path, progress: Progress) -> Iterator[Piece]:
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.filename.endswith(".npy"):
                    raise Unreadable(f"{info.filename} in it is no array")
                with archive.open(info) as stream:
                    yield from _stream(stream, info.filename.removesuffix(".npy"), progress)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise Unreadable(f"not a readable npz archive ({error})") from None


def _stream(stream: IO[bytes], name: str, progress: Progress) -> Iterator[Piece]:
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except (ValueError, EOFError, SyntaxError) as error:
        raise Unreadable(f"not a numpy array ({error})") from None
    if dtype.hasobject:
        raise Unreadable("it holds pickled Python objects, which are not opened")
    # a Fortran array lies column by column: its last axis plays the rows
    shape = tuple(reversed(shape)) if fortran else shape
    rows = shape[0] if shape else 1
    width = math.prod(shape[1:]) * dtype.itemsize
    if not rows or not width:
        yield Piece(0, {name: np.zeros(shape, dtype)})
        return
    per = max(1, BYTES // width)
    for first in range(0, rows, per):
        count = min(per, rows - first)
        data = stream.read(count * width)
        if len(data) < count * width:
            raise Unreadable(f"it ends after row {first + len(data) // width:,} of {rows:,}")
        progress(len(data))
        yield Piece(first, {name: np.frombuffer(data, dtype).reshape(count, *shape[1:])})

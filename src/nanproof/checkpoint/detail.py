"""The slow look at a tensor that is known to be bad: how many NaN and Inf, where the first, what range is left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..floats import Format
from .contents import Stored, element
from .finite import Bytes
from .source import Source

if TYPE_CHECKING:
    from ..records import TensorFacts

_CHUNK = 1 << 20


def chunks(source: Source, stored: Stored, size: int = _CHUNK) -> Iterator[tuple[int, Bytes]]:
    """The bytes that a tensor reaches over, piece by piece, each with its offset from the tensor's start."""
    if stored.inline is not None:
        yield 0, np.frombuffer(stored.inline, np.uint8)[stored.start : stored.start + stored.nbytes]
        return
    unit = stored.columns.block if stored.columns else 16
    size = size // unit * unit
    buffer = np.empty(min(size, stored.nbytes), np.uint8)
    for at in range(0, stored.nbytes, size):
        piece = buffer[: min(size, stored.nbytes - at)]
        source.read_into(piece.data, stored.start + at)
        yield at, piece


@cache
def _table(format: Format) -> NDArray[np.float64]:
    """The value of every code of a small format."""
    return format.decode(np.arange(1 << max(format.bits, 8), dtype=format.storage))


def values(data: Bytes, format: Format) -> NDArray[Any]:
    """The numbers in some bytes, in a type that numpy can compute with."""
    if format.name in ("float64", "float32"):
        return data.view(np.dtype(f"<f{format.bits // 8}"))
    if format.name == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if format.name == "float16":
        return data.view(np.float16).astype(np.float32)
    decoded: NDArray[Any] = _table(format)[data.view(format.storage)]
    return decoded


def members(stored: Stored, first: int, count: int) -> tuple[NDArray[np.bool_], list[NDArray[np.int64]]] | None:
    """Which elements of a stretch belong to a view with strides, and their indices; None when all do.

    A slice leaves elements out, and what stands between its rows is not its own.
    """
    if stored.stride is None:
        return None
    dims = [(s, n, i) for i, (n, s) in enumerate(zip(stored.shape, stored.stride, strict=True)) if n > 1 and s > 0]
    dims.sort(reverse=True)
    left = np.arange(first, first + count, dtype=np.int64)
    inside = np.ones(count, np.bool_)
    index: list[NDArray[np.int64]] = [np.zeros(count, np.int64) for _ in stored.shape]
    reach = 1
    for step, size, _ in reversed(dims):
        if step < reach:
            return None  # windows that overlap: everything they reach over is theirs
        reach = step * (size - 1) + reach
    for step, size, axis in dims:
        position = left // step
        inside &= position < size
        index[axis] = position
        left = left - position * step
    return inside & (left == 0), index


def look(source: Source, stored: Stored, name: str) -> TensorFacts:
    """Counts, range and first bad index of one tensor."""
    from ..records import TensorFacts

    kind = element(stored.dtype)
    format = stored.columns.format if stored.columns else kind.format if kind else None
    assert format is not None
    parts = kind.parts if kind and not stored.columns else 1
    nan = posinf = neginf = 0
    low, high = math.inf, -math.inf
    first: tuple[int, ...] | None = None
    with np.errstate(all="ignore"):
        for at, piece in chunks(source, stored):
            data = piece
            if stored.columns:
                rows = piece.reshape(-1, stored.columns.block)
                data = np.ascontiguousarray(rows[:, stored.columns.at :][:, : stored.columns.size]).reshape(-1)
            numbers = values(data, format)
            begin = at // (format.storage.itemsize * parts)
            view = members(stored, begin, len(numbers) // parts)
            if view is not None:
                numbers = numbers[np.repeat(view[0], parts)]
            finite = np.isfinite(numbers)
            good = numbers[finite]
            if len(good):
                low, high = min(low, float(good.min())), max(high, float(good.max()))
            if len(good) == len(numbers):
                continue
            nan += int(np.isnan(numbers).sum())
            posinf += int((numbers == np.inf).sum())
            neginf += int((numbers == -np.inf).sum())
            if first is None and not stored.columns:
                first = _index(stored, view, begin, int(np.argmin(finite)) // parts)
    times = math.prod(n for n, s in zip(stored.shape, stored.stride or (), strict=False) if s == 0)  # expanded
    return TensorFacts(
        name=name,
        shape=stored.shape,
        dtype=stored.dtype,
        first_bad=first,
        nan=nan * times,
        posinf=posinf * times,
        neginf=neginf * times,
        finite_min=low if low <= high else None,
        finite_max=high if low <= high else None,
    )


def _index(stored: Stored, view: Any, begin: int, position: int) -> tuple[int, ...]:
    if view is not None:
        inside, index = view
        flat = int(np.flatnonzero(inside)[position])
        return tuple(int(axis[flat]) for axis in index)
    if stored.stride is not None:
        return (begin + position,)
    return tuple(int(i) for i in np.unravel_index(begin + position, stored.shape)) if stored.shape else ()

"""A few elements of large tensors, evenly spaced: views, so that to take a sample is no operation of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..tensors import parts_of

SAMPLE = 256
"""Elements of each tensor; one that has no more is taken whole."""


def place_of(tensor: Tensor) -> int:
    """The address of a tensor's values; 0 when they are not in one piece of memory that can be read."""
    values = _values(tensor)
    if values is None or values.is_meta or not values.numel():
        return 0
    return values.data_ptr() if values.is_contiguous() or _span(values) == values.numel() else 0


def view_of(tensor: Tensor, size: int = SAMPLE) -> Tensor:
    """Every so many of its elements, in the order in which they are in memory.

    >>> view_of(torch.arange(6.0).reshape(2, 3), size=3).tolist()
    [0.0, 2.0, 4.0]
    """
    values = _values(tensor)
    assert values is not None
    every = -(-values.numel() // size)
    return values.detach().as_strided((-(-values.numel() // every),), (every,))


class Views:
    """Samples of the same tensors again and again: their views are made again only when memory has moved."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._views: list[Tensor] = []

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        places = [place_of(t) for t in tensors]
        if places != self._places:
            self._views = [view_of(t) for t, place in zip(tensors, places, strict=True) if place]
            self._places = places
        return self._views


def _values(tensor: Tensor) -> Tensor | None:
    if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided:
        return tensor  # without an operation
    parts = parts_of(tensor)
    return parts[0] if len(parts) == 1 else None


def _span(values: Tensor) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(values.shape, values.stride(), strict=True))

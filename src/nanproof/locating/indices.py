"""Indices out of range: the one mistake that an accelerator cannot recover from, and that ends the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

_ALONG = ("index_select", "gather", "scatter", "index_add", "index_copy", "index_fill")


def check_indices(op: str, args: Any) -> None:
    """Raise an IndexError where an operation would address what is not there.

    >>> import torch
    >>> check_indices("embedding", (torch.zeros(3, 2), torch.tensor([0, 2])))
    >>> check_indices("embedding", (torch.zeros(3, 2), torch.tensor([0, 3])))
    Traceback (most recent call last):
    IndexError: index 3 of embedding is out of range: there are 3

    A replay with a repaired value, or in float64, may compute an index that the step itself never had. The CPU raises
    then; an accelerator aborts the kernel, and every later call fails.
    """
    for index, size, lowest in _indices(op.strip("_"), args):
        if index.dtype.is_floating_point or not index.numel():
            continue
        low, high = (int(v) for v in index.aminmax())  # host sync: replay only
        if low < lowest or high >= size:
            wrong = high if high >= size else low
            raise IndexError(f"index {wrong} of {op} is out of range: there are {size}")


def _indices(op: str, args: Any) -> Iterator[tuple[Tensor, int, int]]:
    """The index tensors of a call, each with the size of what it addresses and the lowest index allowed."""
    if len(args) < 2 or not isinstance(args[0], Tensor):
        return
    values = args[0]
    if op == "embedding" and isinstance(args[1], Tensor):
        yield args[1], values.shape[0], 0
    elif op.startswith(_ALONG) and len(args) > 2 and isinstance(args[2], Tensor) and values.ndim:
        yield args[2], values.shape[args[1]], -values.shape[args[1]] if op == "index_fill" else 0
    elif op in ("index", "index_put", "index_put_impl", "unsafe_index"):
        dim = 0
        for index in args[1]:
            if index is None or index.dtype.itemsize == 1:
                dim += 1 if index is None else index.ndim  # a mask addresses as many dimensions as it has
                continue
            yield index, values.shape[dim], -values.shape[dim]
            dim += 1
    elif op == "take" and isinstance(args[1], Tensor):
        yield args[1], values.numel(), -values.numel()
    elif op.startswith("nll_loss") and op.endswith("forward") and len(args) > 4:
        kept = args[1][args[1] != args[4]]
        yield kept, values.shape[min(1, values.ndim - 1)], 0

"""What a pickle is turned into: plain containers, tensors described but not loaded, and inert stand-ins.

No class and no function named by a pickle is ever imported or called. The few names that matter for finding
tensors (how torch rebuilds a tensor, an ordered dict, a numpy array) are recognized by their text.
"""

from __future__ import annotations

import math
from typing import Any

from .flaws import damaged
from .names import ORDINARY


class Global:
    """A name in a pickle: ``torch._utils._rebuild_tensor_v2``. It stays a name."""

    __slots__ = ("full", "name", "ordinary")

    def __init__(self, module: str, name: str) -> None:
        self.full, self.name = f"{module}.{name}", name
        self.ordinary = self.full in ORDINARY


class Inert:
    """Stands where an object of some class would stand, holding what it would have been built from."""

    __slots__ = ("args", "items", "kind", "pairs", "state")

    def __init__(self, kind: Global | None, args: Any) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None
        self.items: list[Any] | None = None
        self.pairs: dict[Any, Any] | None = None

    @property
    def fields(self) -> dict[Any, Any]:
        """The attributes that the object would have."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:  # (dict, slots)
            state = state[1] if isinstance(state[1], dict) else state[0]
        return state if isinstance(state, dict) else {}


class Ordered(dict[Any, Any]):
    """A dictionary whose attributes can be set: torch keeps the versions of modules there."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None


class Storage:
    """A run of numbers somewhere in the file, by its key."""

    __slots__ = ("key", "kind", "numel")

    def __init__(self, kind: str, key: str, numel: int) -> None:
        self.kind, self.key, self.numel = kind, key, numel


class TensorRef:
    """A tensor as a pickle describes it: a view into a storage. ``stride`` is None when it is contiguous."""

    __slots__ = ("dtype", "offset", "quantizer", "shape", "storage", "stride")

    def __init__(self, storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...] | None) -> None:
        self.storage, self.offset, self.shape, self.stride = storage, offset, shape, stride
        self.dtype = ""
        self.quantizer: Any = None


class ArrayRef:
    """A numpy array whose bytes stand in the pickle itself."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        self.dtype, self.shape, self.data = dtype, shape, data


class Located(float):
    """A float that remembers where in the pickle its eight bytes stand, so that a repair can change them."""

    __slots__ = ("at",)
    at: int


_shapes: dict[tuple[int, ...], tuple[int, ...]] = {}


def sizes(value: Any) -> tuple[int, ...]:
    """A shape, checked; equal shapes share one tuple, for a hundred thousand tensors have few shapes."""
    if not isinstance(value, tuple | list) or len(value) > 64:
        raise damaged("a tensor has a shape that is no list of sizes")
    for n in value:
        if type(n) is not int or not 0 <= n < 1 << 62:
            raise damaged(f"a tensor has the size {n!r:.40}")
    shape = tuple(value)
    known = _shapes.get(shape)
    if known is not None:
        return known
    if math.prod(max(n, 1) for n in shape) >= 1 << 63:
        raise damaged("a tensor claims more elements than a number of 64 bits can count")
    if len(_shapes) > 10_000:
        _shapes.clear()
    _shapes[shape] = shape
    return shape


def _strides(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > 64:
        raise damaged("a tensor has strides that are no list of numbers")
    for n in value:
        if type(n) is not int or not 0 <= n < 1 << 62:
            raise damaged(f"a tensor has the stride {n!r:.40}")
    return tuple(value)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    stride, step = [0] * len(shape), 1
    for i in range(len(shape) - 1, -1, -1):
        stride[i] = step
        step *= max(shape[i], 1)
    return tuple(stride)


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return all(n <= 1 or a == b for n, a, b in zip(shape, stride, contiguous(shape), strict=True))


def tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> TensorRef:
    """A tensor reference, checked for sense; whether it fits its storage is checked by the reader."""
    shape, stride = sizes(shape), _strides(stride)
    if type(offset) is not int or offset < 0 or len(shape) != len(stride):
        raise damaged("a tensor has an offset or strides that make no sense")
    return TensorRef(storage, offset, shape, None if _is_contiguous(shape, stride) else stride)

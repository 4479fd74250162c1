"""What a pickle is turned into: plain containers, tensors described but not loaded, and inert stand-ins.

No class and no function named by a pickle is ever imported or called. The few names that matter for finding
tensors (how torch rebuilds a tensor, an ordered dict, a numpy array) are recognized by their text.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .flaws import damaged
from .names import ORDINARY

if TYPE_CHECKING:
    from .calls import Calls


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


def reduce(function: Any, args: Any, seen: Calls) -> Any:
    """What ``function(*args)`` stands for; a call that no checkpoint needs is told to ``seen``."""
    if not isinstance(function, Global):
        seen.call(function, args)
        return Inert(function.kind if isinstance(function, Inert) else None, (function, args))
    name = function.full
    if not function.ordinary or not isinstance(args, tuple):
        seen.call(function, args)
        return Inert(function, args)
    try:
        match name:
            case "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor":
                return tensor(*args[:4])
            case "collections.OrderedDict" | "builtins.dict" | "__builtin__.dict" if not args:
                return {}
            case "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state":
                return args[0]
            case "torch._utils._rebuild_tensor_v3":
                found = tensor(*args[:4])
                found.dtype = _dtype(args[6])
                return found
            case "torch._utils._rebuild_qtensor":
                found = tensor(*args[:4])
                found.quantizer = args[4]
                return found
            case "torch._tensor._rebuild_from_type_v2":
                seen.passed(name, args[1:2])
                made = reduce(args[0], args[2], seen)
                if isinstance(made, TensorRef) and not args[3]:
                    return made
                kept = Inert(args[1] if isinstance(args[1], Global) else function, (made,))
                kept.state = args[3]
                return kept
            case "torch.Size":
                return tuple(args[0])
            case "_codecs.encode":
                return seen.hold(args[0].encode(args[1])) if args[1:] == ("latin1",) else Inert(function, args)
            case "builtins.bytearray" | "builtins.bytes" | "__builtin__.bytearray" if args and type(args[0]) is bytes:
                return args[0]
            case "builtins.set" | "builtins.frozenset" | "__builtin__.set" if isinstance(args[0], list):
                return args[0]
            case "collections.defaultdict":
                seen.passed(name, args)
                return {}
            case "torch.storage._load_from_bytes":
                if not isinstance(args[0], bytes):
                    raise ValueError
                seen.nested.append(args[0])
            case "numpy.core.numeric._frombuffer" | "numpy._core.numeric._frombuffer" if isinstance(args[0], bytes):
                return ArrayRef(_numpy_dtype(args[1]), sizes(args[2]), args[0])  # arrays since protocol 5
            case "numpy.core.multiarray.scalar" | "numpy._core.multiarray.scalar":
                return ArrayRef(_numpy_dtype(args[0]), (), args[1] if isinstance(args[1], bytes) else b"")
    except (IndexError, TypeError, ValueError, AttributeError, UnicodeError):
        raise damaged(f"{name} is called with arguments that do not fit it") from None
    seen.passed(name, args)
    return Inert(function, args)


def build(target: Any, state: Any, seen: Calls) -> None:
    """What ``target.__setstate__(state)`` stands for. That of an OrderedDict has versions of modules, no numbers."""
    if isinstance(target, Inert):
        if target.state is not None:
            seen.hooked(target, ("__setstate__",), state)
        target.state = state
        if isinstance(state, tuple):  # attributes set one by one, so that a class can be exchanged
            seen.hooked(target, ("__class__", "__setstate__", "__dict__"), state)
    elif isinstance(target, Global):
        seen.call(target, ("__setstate__", state))  # the attributes of a class or function of the program change


def is_nested(value: Any) -> bool:
    """Whether this is the call by which plain pickle keeps a storage as a torch file within the pickle."""
    return isinstance(value, Inert) and value.kind is not None and value.kind.full == "torch.storage._load_from_bytes"


def array_of(value: Inert) -> ArrayRef | None:
    """The numpy array that an inert ``_reconstruct`` call with its state describes, if it does."""
    if value.kind is None or not value.kind.full.endswith("multiarray._reconstruct"):
        return None
    state = value.state
    if isinstance(state, tuple) and len(state) == 5 and isinstance(state[4], bytes):
        return ArrayRef(_numpy_dtype(state[2]), sizes(state[1]), state[4])
    return None


def _dtype(value: Any) -> str:
    return value.name if isinstance(value, Global) and value.full.startswith("torch.") else ""


def _numpy_dtype(value: Any) -> str:
    """``<f4`` for the inert form of ``numpy.dtype('f4')`` and its state; an empty string for all others."""
    if not isinstance(value, Inert) or not isinstance(value.args, tuple) or not value.args:
        return ""
    code, state = value.args[0], value.state
    order = state[1] if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str) else "|"
    return f"{order}{code}" if isinstance(code, str) and len(code) < 5 else ""

"""What the calls in a pickle do under ``torch.load(weights_only=True)``, by torch 2.13: succeed or raise.

>>> storage = Storage("float32", 16)
>>> call(REBUILD_TENSOR, (storage, 0, (2, 2), (2, 1), False, None)).shape
(2, 2)
>>> call(REBUILD_TENSOR, (storage, 0, (2, 3), (3, 1), False, None))
Traceback (most recent call last):
ValueError: a tensor reaches beyond its storage

Containers and numbers are Python's own, for those are harmless to build. What belongs to torch is a model of it that
knows as much as decides whether the next call succeeds. Where that is not enough, `Unsure` is raised.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from .contents import dtype_name, element
from .names import WEIGHTS_ONLY

MAX_MADE = 1 << 24  # elements that calls may build: one on a text in the memo is a few bytes long
_INT64, _UINT64 = 1 << 63, 1 << 64
# Attributes of a tensor that setting does more to than to remember.
_SPECIAL = """
H T __class__ __cuda_array_interface__ __dict__ __weakref__ _backward_hooks _base _cdata _grad _grad_fn
_has_grad_dtype_override _has_symbolic_sizes_strides _post_accumulate_grad_hooks _python_dispatch _version data device
dtype grad grad_dtype grad_fn imag is_cpu is_cuda is_ipu is_leaf is_maia is_meta is_mkldnn is_mps is_mtia is_nested
is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout mH mT name names nbytes ndim output_nr
real requires_grad retains_grad shape volatile
"""
DESCRIPTORS = frozenset(_SPECIAL.split())
_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
_DEVICES = re.compile(
    "(cpu|cuda|ipu|xpu|mkldnn|opengl|opencl|ideep|hip|ve|fpga|maia|xla|lazy|vulkan|mps|meta|hpu|mtia|privateuseone)"
    "(:(0|[1-9][0-9]?))?"
)
_TYPED = re.compile(r"torch\.(?:cuda\.)?(?:sparse\.)?(\w+)(?:Storage|Tensor)")


class Unsure(Exception):
    """torch may accept it or not: no checkpoint does this, and it is not modeled."""


class Name:
    """A name that torch allows: it is called, or stands for itself."""

    __slots__ = ("full",)

    def __init__(self, full: str) -> None:
        self.full = full


NAMES = {full: Name(full) for full in WEIGHTS_ONLY}
REBUILD_TENSOR = NAMES["torch._utils._rebuild_tensor_v2"]
PARAMETER, TENSOR = NAMES["torch.nn.parameter.Parameter"], NAMES["torch.Tensor"]
_LAYOUT_NAMES = {f"torch.{name}": Name(f"torch.{name}") for name in _LAYOUTS}


class Opaque:
    """An object of torch; what Python would ask it depends on more than is known."""

    __slots__ = ()

    def _unsure(self, *_: object) -> Any:
        raise Unsure(f"it uses a {type(self).__name__.lower()} as something else")

    __iter__ = __len__ = __bool__ = __index__ = __int__ = __float__ = __complex__ = __getitem__ = __mul__ = _unsure
    __rmul__ = __contains__ = _unsure


class Storage(Opaque):
    """A TypedStorage; those of legacy files grow when a tensor reaches beyond them."""

    __slots__ = ("dtype", "grows", "nbytes")

    def __init__(self, dtype: str, nbytes: int, *, grows: bool = False) -> None:
        self.dtype, self.nbytes, self.grows = dtype, nbytes, grows


class Tensor(Opaque):
    """A tensor or a parameter."""

    __slots__ = ("dtype", "kind", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], kind: Name = TENSOR) -> None:
        self.dtype, self.shape, self.kind = dtype, shape, kind


class Device(Opaque):
    """A device; only its name was checked."""


class Size(tuple[int, ...]):
    """Like torch.Size: a tuple, but of another type."""


def call(function: Any, args: Any) -> Any:
    """``function(*args)``; raises what Python raises where torch would raise anything."""
    given = list(args)
    if not isinstance(function, Name):
        raise TypeError(f"it calls a {type(function).__name__}")
    known = _CALLS.get(function.full)
    if known is not None:
        return known(*given)
    if re.fullmatch(r"torch\.\w*Tensor", function.full) and not given:
        return Tensor("float32" if function is TENSOR else dtype_of(function), (0,))
    if re.search(r"Tensor$|torch\.storage\.", function.full):
        raise Unsure(f"it calls {function.full}")
    raise TypeError(f"it calls {function.full}, which is no function")


def create(kind: Any, args: Any) -> Any:
    """``kind.__new__(kind, *args)``."""
    given = list(args)
    plain = _PLAIN.get(kind.full) if isinstance(kind, Name) else None
    if plain is not None:
        return plain.__new__(plain, *given)
    if not isinstance(kind, Name) or kind.full.startswith(("torch._utils", "torch._tensor", "torch.serial", "_codecs")):
        raise TypeError("it creates an object of what is no class")
    return call(kind, given)


def build(target: Any, state: Any) -> None:
    """The instruction BUILD."""
    if isinstance(target, Tensor):
        if target.kind is TENSOR or len(state) in (4, 5):
            list(state)
            raise Unsure("it sets the state of a tensor")
        flag, _, _ = state
        _require(flag, target.dtype)
    elif type(target) is OrderedDict:
        _update(state)
    elif type(target) in _BUILT:
        slots = None
        if isinstance(state, tuple) and len(state) == 2:
            state, slots = state
        if state:
            if type(target) is not Counter:
                raise AttributeError(f"it sets the state of a {type(target).__name__}")
            _update(state)
        if slots:
            raise Unsure("it sets attributes of an object")
    elif isinstance(target, Storage | Device):
        raise Unsure("it sets the state of a storage or a device")
    else:
        raise TypeError(f"it sets the state of a {type(target).__name__}")


def check_key(value: Any) -> Any:
    """A value that will be hashed: Python would follow tuples in tuples until its stack or our patience ends."""
    if type(value) in (tuple, list, Size):
        waiting, left = [value], 100
        while waiting:
            for inner in waiting.pop():
                left -= 1
                if left < 0:
                    raise Unsure("it uses a large tuple as a key")
                if isinstance(inner, tuple | list):
                    waiting.append(inner)
    return value


def dtype_of(value: Any) -> str:
    """The attribute ``dtype``, of whatever has one."""
    if isinstance(value, Storage | Tensor):
        return value.dtype
    if isinstance(value, Name) and (found := _TYPED.fullmatch(value.full)):
        return dtype_name(f"{found[1]}Storage")
    raise AttributeError("a storage has a type that is none")


def element_size(dtype: str) -> int:
    found = element(dtype)
    if found is None:
        raise Unsure(f"it uses the dtype {dtype}")
    return max(found.bits, 8) // 8


def _update(state: Any) -> None:
    for pair in state.items() if isinstance(state, dict) else state:
        check_key(pair)
    dict[Any, Any]().update(state)


def _container(kind: type) -> Callable[..., Any]:
    """One of Python's own, from at most what is in the pickle."""

    def make(*args: Any) -> Any:
        if kind is bytearray and args and isinstance(args[0], int) and args[0] > MAX_MADE:
            raise Unsure("it fills more memory than is followed here")
        for value in args[0] if args and isinstance(args[0], list | tuple) else ():
            check_key(value)
        return kind(*args)

    return make


def _encode(text: Any, encoding: Any = "utf-8", errors: Any = "strict") -> bytes:
    if not isinstance(encoding, str) or not isinstance(errors, str):
        raise TypeError("it encodes a text by what is no name")
    if encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii") or errors != "strict":
        raise Unsure(f"it encodes a text as {encoding[:40]!r}")
    if not isinstance(text, str):
        raise TypeError("it encodes what is no text")
    return text.encode(encoding)


def _size(*args: Any) -> Size:
    found = Size(*args)
    for n in found:
        if isinstance(n, Opaque):
            raise Unsure("it uses a tensor as a size")
        if not isinstance(n, int):
            raise TypeError("it makes a torch.Size of what are no sizes")
    return found


def _device(name: Any, index: Any = None) -> Device:
    if not isinstance(name, str) or isinstance(index, bool) or not isinstance(index, int | None):
        raise Unsure("it names a device by a number")
    if not _DEVICES.fullmatch(name) or (index is not None and ":" in name):
        raise ValueError(f"it names the device {name[:40]!r}")
    if index is not None and not 0 <= index < 100:
        raise Unsure("it names a device by a large number")
    return Device()


def _layout(name: Any) -> Name:
    return _LAYOUT_NAMES[check_key(name)]


def _require(flag: Any, dtype: str) -> None:
    """``requires_grad``: a bool, and true for floats only."""
    if type(flag) is not bool:
        raise TypeError("requires_grad is no bool")
    if flag and not dtype.startswith(("float", "bfloat", "complex")):
        raise ValueError(f"a tensor of {dtype} requires a gradient")


def _integers(value: Any) -> tuple[int, ...]:
    """Sizes or strides as torch takes them; it lets a bool pass from the second place on."""
    if not isinstance(value, tuple | list):
        raise TypeError("a tensor has a shape that is none")
    for i, n in enumerate(value):
        if isinstance(n, Opaque):
            raise Unsure("it uses a tensor as a size")
        if not isinstance(n, int) or (i == 0 and type(n) is bool):
            raise TypeError("a tensor has a size that is no whole number")
        if not -_INT64 <= n < _INT64:
            raise OverflowError("a tensor has a size beyond 64 bits")
    return tuple(value)


def _set(storage: Any, offset: Any, size: Any, stride: Any, dtype: str = "") -> Tensor:
    """``tensor.set_(storage, offset, size, stride)`` with the arithmetic that torch does in unsigned 64 bits."""
    if not isinstance(storage, Storage):
        raise AttributeError("a tensor has no storage")
    if isinstance(offset, Opaque):
        raise Unsure("it uses a tensor as an offset")
    if not isinstance(offset, int) or type(offset) is bool:
        raise TypeError("a tensor has an offset that is no whole number")
    shape, strides = _integers(size), _integers(stride) if stride is not None else ()
    if not 0 <= offset < _INT64:
        raise ValueError("a tensor has a negative offset")
    dtype = dtype or storage.dtype
    numel = 1
    for n in shape:
        numel *= n % _UINT64
        if numel >= _UINT64:
            raise OverflowError("a tensor has more elements than can be counted")
    if numel >= _INT64:
        raise OverflowError("a tensor has more elements than can be counted")
    if strides and len(shape) != len(strides):
        raise ValueError("a tensor has more sizes than strides, or fewer")
    if 0 in shape:
        return Tensor(dtype, shape)
    span = numel + offset if not strides else offset + 1
    for n, step in zip(shape, strides, strict=False):
        part = (step % _UINT64) * ((n - 1) % _UINT64)
        span += part
        if part >= _UINT64 or span >= _UINT64:
            raise OverflowError("a tensor reaches beyond its storage")
    nbytes = span * element_size(dtype)
    if nbytes > storage.nbytes:
        if not storage.grows or nbytes >= _INT64:
            raise ValueError("a tensor reaches beyond its storage")
        if nbytes > MAX_MADE:
            raise Unsure("a tensor reaches far beyond its storage")
        storage.nbytes = nbytes
    return Tensor(dtype, shape)


def _metadata(tensor: Tensor, metadata: Any) -> None:
    if metadata:
        if not isinstance(metadata, dict) or any(type(k) is not str for k in metadata):
            raise TypeError("a tensor has metadata that are none")
        if any(type(v) is not bool for v in metadata.values()):
            raise Unsure("a tensor has metadata that are not known")
        if metadata.get("conj") and not tensor.dtype.startswith("complex"):
            raise ValueError(f"a tensor of {tensor.dtype} is conjugate")


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
    return _set(storage, offset, size, stride)


def _rebuild_tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> Tensor:
    made = _set(storage, offset, size, stride)
    _require(requires_grad, made.dtype)
    _metadata(made, metadata)
    return made


def _rebuild_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Tensor:
    if not isinstance(storage, Storage):
        raise AttributeError("a tensor has no storage")
    kind = _dtype(dtype)
    _require(requires_grad, kind)
    made = _set(storage, offset, size, stride, kind)
    if requires_grad:
        raise Unsure("a tensor of a new dtype requires a gradient")
    _metadata(made, metadata)
    return made


def _dtype(value: Any) -> str:
    if value is None:
        return "float32"
    if not isinstance(value, Name) or not re.fullmatch(r"torch\.[a-z][a-z0-9_]*", value.full) or ".per_" in value.full:
        raise TypeError("a tensor has a dtype that is none")
    return value.full.removeprefix("torch.")


def _parameter(data: Any = None, requires_grad: Any = True) -> Tensor:
    if data is not None and not isinstance(data, Tensor):
        raise AttributeError("a parameter holds what is no tensor")
    found: Tensor = Tensor("float32", (0,)) if data is None else data
    _require(requires_grad, found.dtype)
    return Tensor(found.dtype, found.shape, PARAMETER)


def _rebuild_parameter(data: Any, requires_grad: Any, hooks: Any) -> Tensor:
    return _parameter(data, requires_grad)


def _rebuild_parameter_with_state(data: Any, requires_grad: Any, hooks: Any, state: Any) -> Tensor:
    return _with_state(_parameter(data, requires_grad), state)


def _with_state(made: Tensor, state: Any) -> Tensor:
    parts: tuple[Any, ...] = (state,)
    if isinstance(state, tuple):
        if len(state) != 2:
            raise ValueError("a tensor has a state that is none")
        parts = state
    for part in parts:
        if part:
            for key in part.keys() if isinstance(part, dict) else part.items():
                if type(key) is not str:
                    raise TypeError("a tensor has an attribute without a name")
                if key in DESCRIPTORS:
                    raise Unsure(f"it sets {key} of a tensor")
    return made


def _rebuild_from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    made = call(function, args)
    if not isinstance(made, Tensor):
        if isinstance(kind, Name) and _PLAIN.get(kind.full) is type(made):
            raise Unsure("it rebuilds what is no tensor as one")
        raise AttributeError("it rebuilds a tensor from what is none")
    if kind is not TENSOR and kind is not PARAMETER:
        raise TypeError("it rebuilds a tensor of a class that is none")
    return _with_state(Tensor(made.dtype, made.shape, kind), state)


def _rebuild_qtensor(
    storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, requires_grad: Any, hooks: Any
) -> Tensor:
    scheme = quantizer[0]
    if not isinstance(storage, Storage) or not isinstance(scheme, Name):
        raise AttributeError("a quantized tensor lacks its storage or its scheme")
    if scheme.full == "torch.per_tensor_affine":
        _, scale, zero = quantizer
        if isinstance(scale, Opaque) or isinstance(zero, Opaque):
            raise Unsure("a tensor is the scale of another")
        if type(scale) not in (int, float) or type(zero) is not int:
            raise TypeError("a quantized tensor has a scale or a zero point that is no number")
        if type(scale) is int or not -_INT64 <= zero < _INT64:
            raise Unsure("a quantized tensor has an odd scale or zero point")
    elif scheme.full in ("torch.per_channel_affine", "torch.per_channel_affine_float_qparams"):
        _, scales, zeros, axis = quantizer
        if not all(isinstance(t, Tensor) and len(t.shape) == 1 for t in (scales, zeros)) or type(axis) is not int:
            raise Unsure("a quantized tensor has odd scales")
        if not 0 <= axis < len(size) or scales.shape != zeros.shape or scales.shape != (size[axis],):
            raise ValueError("a quantized tensor has too few scales, or too many")
    else:
        raise TypeError("a quantized tensor has a scheme that is none")
    if not storage.dtype.startswith(("qint", "quint")):
        raise TypeError("a quantized tensor has a storage of another kind")
    if any(n < 0 for n in _integers(size)):
        raise ValueError("a quantized tensor has a negative size")
    grows, storage.grows = storage.grows, False  # a quantized tensor does not make it larger, as others do
    made = _set(storage, offset, size, stride)
    storage.grows = grows
    _require(requires_grad, made.dtype)
    return made


def _rebuild_sparse(layout: Any, data: Any) -> Tensor:
    if not isinstance(layout, Name) or not layout.full.startswith("torch.sparse_"):
        raise NotImplementedError("a sparse tensor has a layout that is none")
    if layout.full == "torch.sparse_coo":
        indices, values, size, *coalesced = data
        if len(coalesced) > 1:
            raise ValueError("a sparse tensor has too many parts")
        fits = (
            isinstance(indices, Tensor)
            and isinstance(values, Tensor)
            and indices.dtype == "int64"
            and len(indices.shape) == 2
            and indices.shape[1:] == values.shape[:1]
            and isinstance(size, tuple | list)
            and len(size) == indices.shape[0] + len(values.shape) - 1
            and all(flag is None or type(flag) is bool for flag in coalesced)
        )
    else:
        compressed, plain, values, size = data
        fits = (
            all(isinstance(t, Tensor) for t in (compressed, plain, values))
            and isinstance(size, tuple | list)
            and compressed.dtype == plain.dtype == "int64"
            and len(compressed.shape) == len(plain.shape) == 1
            and plain.shape == values.shape[:1]
            and len(size) == 2
            and layout.full[-3:] in ("csr", "csc")
            and compressed.shape == (size["csc" in layout.full] + 1,)
        )
    if not fits or not all(type(n) is int and 0 <= n < 1 << 31 for n in size):
        raise Unsure("a sparse tensor has odd parts")
    return Tensor(values.dtype, tuple(size))


def _rebuild_meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> Tensor:
    kind, shape, strides = _dtype(dtype), _integers(size), _integers(stride)
    _require(requires_grad, kind)
    if len(shape) != len(strides):
        raise ValueError("a tensor has more sizes than strides, or fewer")
    if any(not 0 <= n < 1 << 31 for n in (*shape, *strides)) or len(shape) > 2:
        raise Unsure("a tensor without storage has odd sizes")
    return Tensor(kind, shape)


def _rebuild_nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Tensor:
    if not all(isinstance(t, Tensor) for t in (buffer, sizes, strides, offsets)):
        raise TypeError("a nested tensor consists of what are no tensors")
    if len(buffer.shape) != 1 or sizes.shape != strides.shape or sizes.shape[:1] != offsets.shape:
        raise Unsure("a nested tensor has odd parts")
    return Tensor(buffer.dtype, ())


def _not_modeled(name: str, count: int) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        if len(args) != count or not isinstance(args[0], Opaque | Name):
            raise TypeError(f"it calls {name} with what does not fit it")
        raise Unsure(f"it calls {name}")

    return make


_PLAIN: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "builtins.set": set,
    "builtins.bytearray": bytearray,
    "builtins.complex": complex,
}
_BUILT = (Counter, set, bytearray, complex, Size)
_CALLS: dict[str, Callable[..., Any]] = {
    **{name: _container(kind) for name, kind in _PLAIN.items()},
    "_codecs.encode": _encode,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch.nn.parameter.Parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter_with_state,
    "torch._utils._rebuild_qtensor": _rebuild_qtensor,
    "torch._utils._rebuild_sparse_tensor": _rebuild_sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_meta,
    "torch._utils._rebuild_nested_tensor": _rebuild_nested,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _not_modeled("_rebuild_device_tensor_from_cpu_tensor", 4),
    "torch._utils._rebuild_device_tensor_from_numpy": _not_modeled("_rebuild_device_tensor_from_numpy", 4),
    "torch._utils._rebuild_wrapper_subclass": _not_modeled("_rebuild_wrapper_subclass", 8),
}

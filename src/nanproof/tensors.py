"""Looking closely at one tensor: how many NaN, +Inf, −Inf, where the first is, what the finite rest spans.

>>> import torch
>>> print(facts_of("x", torch.tensor([1.0, float("nan"), 3.0])))
x [3] float32: 1 NaN of 3, finite 1 … 3
>>> nonfinite("x", torch.ones(2)) is None
True

Reads the host, so it belongs on the path of an incident or a test, never on that of a healthy step. Right for
8-bit floats too, where torch's own ``isfinite`` raises or is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import UsageError
from .floats import Format, find_format
from .records import TensorFacts


@cache
def device_kinds() -> tuple[str, ...]:
    """Device types that this process can use: ``cpu``, and the accelerator if there is one.

    A CUDA build on a machine without a GPU names an accelerator all the same, or raises: torch 2.6 does.
    """
    if not torch.accelerator.is_available():
        return ("cpu",)
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def facts_of(name: str, tensor: Tensor, extra: Mapping[str, float] | None = None) -> TensorFacts:
    """The statistics of a tensor of any dtype and layout."""
    values = local_values(tensor)
    nan, posinf, neginf = _masks(name, values)
    bad = nan | posinf | neginf
    finite = values[~bad].double() if values.is_floating_point() and values.element_size() > 1 else values[:0]
    first = torch.nonzero(bad)[0].tolist() if bool(bad.any()) else None  # host sync: incident path only
    return TensorFacts(
        name=name,
        shape=tuple(tensor.shape if all(type(n) is int for n in tensor.shape) else values.shape),  # jagged: symbolic
        dtype=str(tensor.dtype).removeprefix("torch."),
        nan=int(nan.sum()),
        posinf=int(posinf.sum()),
        neginf=int(neginf.sum()),
        zero=int((finite == 0).sum()),
        finite_min=float(finite.min()) if finite.numel() else None,
        finite_max=float(finite.max()) if finite.numel() else None,
        first_bad=tuple(first[: tensor.ndim]) if first is not None else None,
        extra=dict(extra or {}),
    )


def nonfinite(name: str, tensor: Tensor) -> TensorFacts | None:
    """The statistics of a tensor that is not finite; None when every value is."""
    return None if is_finite(tensor, name) else facts_of(name, tensor)


def is_finite(tensor: Tensor, name: str = "tensor") -> bool:
    """Whether every element that this process holds is finite."""
    nan, posinf, neginf = _masks(name, local_values(tensor, name))
    return not bool((nan | posinf | neginf).any())  # host sync: incident path only


def local_values(tensor: Tensor, name: str = "tensor") -> Tensor:
    """The values that this process holds, strided, real and detached: of a shard, of a sparse or complex tensor."""
    sparse = tensor.layout in _SPARSE and not hasattr(tensor, "_local_tensor")
    parts = parts_of(tensor.detach().to_dense() if sparse else tensor)
    if not parts and tensor.is_meta:
        raise UsageError(f"{name} is on the meta device and has no values", hint="load or initialize it first")
    if not parts:
        if tensor.numel():
            raise UsageError(f"{name} has no memory that can be read ({type(tensor).__name__})", hint="leave it out")
        return tensor.detach().as_subclass(Tensor)
    return parts[0] if len(parts) == 1 else torch.cat([p.reshape(-1) for p in parts])


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain strided tensors that hold a tensor's values here; none when it has no memory to read.

    >>> [p.shape[0] for p in parts_of(torch.eye(3).to_sparse())]
    [3]
    >>> parts_of(torch.empty(2, device="meta"))
    []

    Reading a tensor without memory (meta, fake, the zero tensors of forward-mode AD) can end the process.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if hasattr(tensor, "_local_tensor"):  # a DTensor's shard
            return parts_of(tensor._local_tensor)
        if hasattr(type(tensor), "__tensor_flatten__"):  # jagged and quantized tensors are made of plain ones
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
            parts = [p for t in inner if isinstance(t, Tensor) and t is not tensor for p in parts_of(t)]
            return [p for p in parts if p.is_floating_point()] or parts  # not the offsets beside the values
        if tensor.is_meta or tensor._is_zerotensor() or type(tensor).__name__ in _WITHOUT_VALUES:
            return []
        if tensor.is_quantized:
            return [tensor.int_repr()]
        tensor = tensor.detach()
        if tensor.layout in _SPARSE:
            return parts_of(tensor._values() if tensor.layout == torch.sparse_coo else tensor.values())
        if tensor.is_nested:
            return [p for t in tensor.unbind() for p in parts_of(t)]
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        if tensor.numel() and not has_memory(tensor):
            return []
        return [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor]


def bytes_of(tensor: Tensor) -> int:
    """The memory of a tensor's values; torch's own nbytes raises for sparse ones.

    >>> bytes_of(torch.eye(3)), bytes_of(torch.eye(3).to_sparse())
    (36, 12)
    """
    return tensor.nbytes if tensor.layout is torch.strided else sum(part.nbytes for part in parts_of(tensor))


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_WITHOUT_VALUES = ("FakeTensor", "FunctionalTensor")


def has_memory(tensor: Tensor) -> bool:
    """Whether there is anything at its address: not when FSDP has freed the weights that it gathered."""
    try:
        return bool(tensor.data_ptr())
    except RuntimeError:
        return tensor.device.type not in ("cpu", "cuda")  # other devices need not have addresses


def _masks(name: str, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the NaN, the +Inf and the −Inf are."""
    if values.is_quantized or not values.is_floating_point():
        none = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
        return none, none, none
    form = find_format(values.dtype)
    if form is None:
        raise UsageError(f"{name} is {values.dtype}, a format unknown here", hint="convert it to float32 first")
    return _masks_by_code(values, form) if form.bits <= 8 else (values.isnan(), values.isposinf(), values.isneginf())


def _masks_by_code(values: Tensor, form: Format) -> tuple[Tensor, Tensor, Tensor]:
    codes = values.contiguous().view(torch.uint8).cpu().numpy()
    nan, inf, negative = form.is_nan(codes), form.is_inf(codes), (codes & form.sign_bit) != 0
    found = [torch.from_numpy(np.asarray(m)).to(values.device) for m in (nan, inf & ~negative, inf & negative)]
    return found[0], found[1], found[2]


def tensors_in(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, however it is nested, with their paths."""
    if isinstance(value, Tensor):
        yield name or "tensor", value
    elif depth < 6:
        for key, item in children(value):
            yield from tensors_in(item, f"{name}.{key}".lstrip("."), depth + 1)


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """The named parts of a container, one by one: mapping, sequence, dataclass, or an object with attributes."""
    if isinstance(value, Mapping):
        for i, (key, item) in enumerate(value.items()):
            yield str(key) if _has_short_name(key) else f"{type(key).__name__}{i}", item
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield str(i), item
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield field.name, getattr(value, field.name)
    elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):  # one that is named leads to all
        for name, item in list(vars(value).items()):
            if not name.startswith("_"):
                yield name, item


def _has_short_name(key: object) -> bool:
    """Whether a key may be printed: an optimizer's state has parameters for keys, read back from the device for it."""
    if isinstance(key, tuple):
        return all(map(_has_short_name, key))
    return isinstance(key, str | int | float | bytes | Enum)

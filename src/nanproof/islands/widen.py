"""A torch-function mode that lets everything inside a block compute in a wider dtype."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}
_LEFT_ALONE = frozenset(
    {
        "__get__",
        "__set__",
        "__delete__",
        "size",
        "dim",
        "stride",
        "numel",
        "is_floating_point",
        "register_hook",
        "item",
        "data_ptr",
        "untyped_storage",
        "requires_grad_",
        "backward",
        "detach_",
        "_is_view",
    }
)
_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120
_RUNNING_STATISTICS = ("batch_norm", "instance_norm")
# in-place operations that refuse a source of another dtype; the others cast by themselves
_SAME_DTYPE = frozenset(
    {"index_copy_", "index_add_", "index_put_", "scatter_", "scatter_add_", "masked_scatter_", "addmm_", "baddbmm_"}
)


def is_narrower(dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a dtype has a smaller range; an island is about overflow, not about digits.

    >>> is_narrower(torch.float16, torch.float32), is_narrower(torch.float32, torch.float32)
    (True, False)
    """
    return dtype.is_floating_point and torch.finfo(dtype).max < torch.finfo(wide).max


def widened(value: Any, dtype: torch.dtype) -> Any:
    """A narrow tensor or dtype made wide; anything else as it is. Autograd records the cast."""
    if isinstance(value, Tensor) and is_narrower(value.dtype, dtype):
        return value.to(dtype)
    if isinstance(value, torch.dtype) and is_narrower(value, dtype):
        return dtype
    return value


class Widen(TorchFunctionMode):
    """Inside it every torch function gets narrow arguments, weights too, in the wide dtype.

    The cast of a weight is recorded by autograd, so its gradient arrives at the narrow parameter itself. Casts to a
    narrow dtype and autocast regions inside the block have no effect.
    """

    def __init__(self, dtype: torch.dtype, device: str, *, sharded: bool = False) -> None:
        """``sharded``: FSDP2 gathers weights inside of the block, into memory of their own dtype."""
        super().__init__()
        self.dtype, self._device, self._sharded = dtype, device, sharded

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._sharded and _gathers():
            return function(*args, **kwargs)
        if not torch.is_autocast_enabled(self._device):
            return self._call(function, args, kwargs)
        torch.set_autocast_enabled(self._device, False)
        try:
            return self._call(function, args, kwargs)
        finally:
            torch.set_autocast_enabled(self._device, True)

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        if name in _LEFT_ALONE or "out" in kwargs:
            return function(*args, **kwargs)
        if name in _CASTS and is_narrower(_CASTS[name], self.dtype):
            return args[0].to(self.dtype) if args[0].dtype != self.dtype else args[0]
        if name.endswith("_") and not name.endswith("__"):
            return self._in_place(function, name, args, kwargs)
        if name in _RUNNING_STATISTICS:
            return self._with_statistics(function, args, kwargs)

        def widen(value: Any) -> Any:
            return widened(value, self.dtype)

        return function(*tree_map(widen, args), **tree_map(widen, kwargs))

    def _in_place(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Memory that exists keeps its dtype; what is written into it is cast to that where torch would refuse."""
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if name not in _SAME_DTYPE or target is None or not target.is_floating_point():
            return function(*args, **kwargs)

        def fit(value: Any) -> Any:
            return value.to(target.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return function(target, *tree_map(fit, args[1:]), **tree_map(fit, kwargs))

    def _with_statistics(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Running statistics are written in place: a wide copy is copied back."""
        given = [(a, widened(a, self.dtype)) for a in args]
        named = {k: (v, widened(v, self.dtype)) for k, v in kwargs.items()}
        out = function(*(w for _, w in given), **{k: w for k, (_, w) in named.items()})
        for old, new in (*given, *named.values()):
            if isinstance(old, Tensor) and old is not new and not new.requires_grad:
                old.copy_(new)
        return out


def _gathers() -> bool:
    """Whether the current call is FSDP2's own work, other than its cast of a module's inputs."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if "_fully_shard" in frame.f_code.co_filename:
            return bool(frame.f_code.co_name != "_cast_fp_tensor")
        frame = frame.f_back
    return False

"""Islands of one source line: for operations that lie in no module, such as a loss written in the training loop."""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from .widen import _LEFT_ALONE, Widen

Place = tuple[str, int]
_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120


class Lines(TorchFunctionMode):
    """Widens what is computed on some lines of code, wherever in the process they run.

    Every torch call pays for a look at the line that it comes from, so a module's island is preferred where there is
    one. The result stays wide.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[Place, torch.dtype] = {}
        self._lines: frozenset[int] = frozenset()
        self._files: dict[CodeType, str] = {}

    def add(self, place: Place, dtype: torch.dtype) -> None:
        if not self.places:
            _insert(self)
        self.places[place] = dtype
        self._lines = frozenset(line for _, line in self.places)

    def remove(self, place: Place) -> None:
        if self.places.pop(place, None) is not None and not self.places:
            _remove(self)
        self._lines = frozenset(line for _, line in self.places)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if frame is None or frame.f_lineno not in self._lines:
            return function(*args, **kwargs)
        file = self._files.get(frame.f_code)
        if file is None:
            file = self._files[frame.f_code] = os.path.abspath(frame.f_code.co_filename)  # noqa: PTH100
        dtype = self.places.get((file, frame.f_lineno))
        if dtype is None or getattr(function, "__name__", "") in _LEFT_ALONE:
            return function(*args, **kwargs)
        given = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
        device = given.device.type if given is not None else "cpu"
        with torch.autocast(device, enabled=False):
            return Widen(dtype, device).__torch_function__(function, types, args, kwargs)

    __torch_function__._torchdynamo_disable = True  # type: ignore[attr-defined]


def _insert(mode: TorchFunctionMode) -> None:
    """Put a mode below all others, so that blocks which are open now close in their own order.

    Only the default device stays below: torch expects it at the bottom.
    """
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    bottom = int(bool(stack) and stack[0] is default)
    _replace([*stack[:bottom], mode, *stack[bottom:]])


def _remove(mode: TorchFunctionMode) -> None:
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    _replace([m for m in stack if m is not mode])


def _replace(stack: list[Any]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in stack:
        _push_mode(mode)  # type: ignore[no-untyped-call]


LINES = Lines()

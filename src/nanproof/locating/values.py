"""Quick questions about tensors during a replay: are they finite, whose memory is it, which frames led here."""

from __future__ import annotations

import inspect
import linecache
import math
import os
import sys
import sysconfig
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..tensors import parts_of

FINITE, INF, NAN = 0, 1, 2

Frame = tuple[str, int, str]
"""File, line, function."""
Stack = list[tuple[CodeType, int]]
"""Code and line of each frame that is not torch's, innermost first."""

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120
_CASES = os.path.join(_PACKAGE, "cases") + os.sep  # noqa: PTH118
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_SKIPPED, _LIBRARY, _GENERATED, _USER, _BORDER, _CALL = range(6)
_ENOUGH = 4
"""How many of the user's own frames are kept."""
_roles: dict[CodeType, int] = {}


def kind_of(tensor: Tensor) -> int:
    """Finite, with infinities, or with NaN; a tensor without memory that can be read is taken as finite."""
    if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_complex() and _plain(tensor):
        return _kind(tensor.detach() if tensor.requires_grad else tensor)
    return max((_kind(values) for values in parts_of(tensor)), default=FINITE)


def _plain(tensor: Tensor) -> bool:
    return tensor.device.type in ("cpu", "cuda") and not tensor._is_zerotensor() and bool(tensor.data_ptr())


def _kind(values: Tensor) -> int:
    if not values.is_floating_point() or not values.numel():
        return FINITE
    if values.element_size() == 1:
        values = values.float()
    # a sum is non-finite whenever an element is, and many times as fast as isfinite().all()
    dtype = torch.float32 if values.element_size() == 2 else None
    if math.isfinite(values.sum(dtype=dtype).item()):  # host sync: replay only
        return FINITE
    low, high = (float(v) for v in (values.float() if dtype else values).aminmax())
    if low != low or high != high:
        return NAN
    return INF if math.inf in (high, -low) else FINITE


def key_of(tensor: Tensor) -> int:
    """What identifies the memory behind a tensor and all its views; 0 when it has none."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        return int(tensor.untyped_storage()._cdata)
    parts = parts_of(tensor)
    return int(parts[0].untyped_storage()._cdata) if parts else 0


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a call."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def floats_in(value: Any) -> list[Tensor]:
    """The floating and complex tensors of a call, empty ones left out."""
    return [
        t
        for t in tree_leaves(value)
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and (t.is_nested or t.numel())
    ]


def current_stack(*, beyond: bool = False) -> Stack:
    """The frames behind the current operation, up to the border of the autograd engine, or ``beyond`` it."""
    return stack_and_module(beyond=beyond, module=False)[0]


def stack_and_module(*, beyond: bool = False, module: bool = True) -> tuple[Stack, nn.Module | None]:
    """The frames behind the current operation, and the innermost module that is being called."""
    frame: Any = sys._getframe(1)
    found: Stack = []
    inside: nn.Module | None = None
    own = 0
    while frame is not None and (own < _ENOUGH or (module and inside is None)):
        code = frame.f_code
        role = _roles.get(code)
        if role is None:
            role = _roles[code] = _role(code)
        if role == _BORDER and not beyond:
            break
        if role == _CALL and inside is None and module:
            inside = frame.f_locals.get("self")
        if role in (_LIBRARY, _GENERATED, _USER) and own < _ENOUGH:
            found.append((code, frame.f_lineno))
            own += role == _USER
        frame = frame.f_back
    return found, inside


def _role(code: CodeType) -> int:
    file = code.co_filename
    if file.startswith(_TORCH):
        return {"_engine_run_backward": _BORDER, "_call_impl": _CALL}.get(code.co_name, _SKIPPED)
    if file.startswith(_CASES):
        return _USER
    if file.startswith(_PACKAGE):
        return _SKIPPED  # also where nanproof itself is an installed package
    if any(part in file for part in _INSTALLED):
        return _LIBRARY
    if file.startswith(("<frozen ", *_STDLIB)):
        return _SKIPPED
    return _USER if _is_written(file) else _GENERATED


def _is_written(file: str) -> bool:
    """Whether someone wrote code in a file or a notebook; not what runs through exec, or is made by torch.fx."""
    return file.startswith("<ipython-input") or (not file.startswith("<") and bool(linecache.getlines(file)))


def is_own(code: CodeType) -> bool:
    """Whether code is torch's or nanproof's own."""
    return code.co_filename.startswith((_TORCH, _PACKAGE)) and not code.co_filename.startswith(_CASES)


def is_users(code: CodeType) -> bool:
    """Whether code is the user's own: no package's, and not Python's."""
    return _role(code) == _USER


def frames_of(stack: Stack) -> list[Frame]:
    return [(code.co_filename, line, code.co_name) for code, line in stack]


def own_frame(stack: Stack) -> int:
    """Which frame is the innermost that the user wrote; the innermost of all when none is.

    Code without a file (``python -c``) is shown only where there is none with one.
    """
    roles = [_roles.get(code) for code, _ in stack]
    return next((roles.index(role) for role in (_USER, _GENERATED) if role in roles), 0)


def library_frames(stack: Stack) -> tuple[str, ...]:
    """The way from the user's line down to the library line, without wrappers; paths as one would import them."""
    below = [
        (code, line) for code, line in stack[: own_frame(stack)] if code.co_name not in ("wrapper", "inner", "__call__")
    ]
    return tuple(f"{_short(code.co_filename)}:{line} in {code.co_name}" for code, line in below[::-1])


def _short(file: str) -> str:
    for part in _INSTALLED:
        if part in file:
            return file.rsplit(part, 1)[1]
    return file


def source_of(module: nn.Module) -> tuple[str, int]:
    """Where a module's forward is written."""
    try:
        return inspect.getsourcefile(type(module)) or "", inspect.getsourcelines(type(module).forward)[1]
    except (OSError, TypeError):
        return "", 0

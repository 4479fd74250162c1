"""An exception that ended a step: what was not finite where it was raised, and where that was."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..locating import Location
from ..tensors import facts_of, is_finite

LOOKED_AT, LARGEST = 400, 1 << 26
_OURS = str(Path(__file__).parents[1])
_LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "<frozen")


def nonfinite_locals(error: BaseException) -> list[tuple[str, Tensor]]:
    """The variables that were not finite in the functions that an exception came through, innermost first.

    >>> def check():
    ...     loss = torch.tensor(float("nan"))
    ...     raise ValueError("loss is nan")
    >>> try: check()
    ... except ValueError as error: [name for name, _ in nonfinite_locals(error)]
    ['loss']
    """
    frames = [f for f, _ in _frames(error)]
    own = [f for f in frames if not f.f_code.co_filename.startswith(_LIBRARIES)]
    found: dict[int, tuple[str, Tensor]] = {}
    left = LOOKED_AT
    for frame in [*own, *(f for f in frames if f not in own)]:
        for name, value in list(frame.f_locals.items()):
            left -= 1
            tensor = _suspect(value)
            if tensor is not None and left > 0:
                found.setdefault(id(value), (name, tensor))
    return sorted(found.values(), key=lambda one: one[1].ndim > 0)  # a loss says more than a data set


def _suspect(value: Any) -> Tensor | None:
    """A value whose NaN or Inf can be behind an exception; infinities of a mask are there on purpose."""
    if isinstance(value, float):
        return torch.tensor(value) if math.isnan(value) else None
    if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided or value.numel() > LARGEST:
        return None
    try:
        if is_finite(value):
            return None
        computed = value.ndim == 0 or (value.grad_fn is not None and bool((value == math.inf).any()))
        return value.detach() if computed or bool(value.isnan().any()) else None
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def where_raised(error: BaseException, bad: list[tuple[str, Tensor]]) -> Location | None:
    """The line of the user's that an exception came from, with the traceback; not proved, for nothing was replayed."""
    frames = list(_frames(error))
    on_the_way = [*frames, *_callers(error)]
    own = [f for f in on_the_way if not f[0].f_code.co_filename.startswith(_LIBRARIES)] or on_the_way
    if not own:
        return None
    frame, line = own[0]
    names = f"; {facts_of(*bad[0])}" if bad else ""
    return Location(
        reproduced=False,
        phase="forward",
        op=type(error).__name__,
        file=frame.f_code.co_filename,
        line=line,
        function=frame.f_code.co_name,
        why=f"{str(error)[:300] or 'raised here'}{names}",
        stack=tuple(f"{f.f_code.co_filename}:{n} {f.f_code.co_name}" for f, n in reversed(on_the_way)),
    )


def at_exception(found: Location | None, raised: Location | None) -> Location | None:
    """What a replay has found; bad data has no line of its own there, so that of the exception stands for it."""
    if found is None or raised is None:
        return found or raised
    found = dataclasses.replace(found, notes=(*found.notes, f"{raised.op}: {raised.why}", *raised.stack))
    if found.op and found.file and not found.file.startswith(_LIBRARIES):
        return found
    return dataclasses.replace(found, file=raised.file, line=raised.line, function=raised.function, op=raised.op)


def _callers(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The calls that an exception has not come through yet: up to the program, where it is still being handled."""
    frame = error.__traceback__.tb_frame.f_back if error.__traceback__ is not None else None
    reached = False
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS) and file != contextlib.__file__:  # else the guard's, around the loop's own call
            reached = reached or not file.startswith(_LIBRARIES)
            yield frame, frame.f_lineno
        elif reached:  # nanproof run, which has started the program
            return
        frame = frame.f_back


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames of a traceback with their lines, innermost first, without ours."""
    found, traceback = [], error.__traceback__
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_OURS):
            found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return reversed(found)

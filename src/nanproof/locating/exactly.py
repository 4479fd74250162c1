"""Replaying a step with the operations before one of them computed in float64: is rounding to blame, and where?"""

from __future__ import annotations

import math
from collections.abc import Container
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..location import call_name
from .mode import ReplayMode, run_carefully
from .trace import Event, Operation, operation_of
from .values import current_stack, floats_in, kind_of, own_frame

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_STATISTICS = ((3, "running_mean"), (4, "running_var"))
"""What a batch norm writes without saying so."""


class Reached(BaseException):
    """Ends a replay at the operation in question; no user code should catch it."""


class Exactly(ReplayMode):  # type: ignore[no-untyped-call]
    """Replays up to one operation; those before it are computed in float64 and rounded to the format they had.

    So nothing changes but rounding: every value has the dtype that the code expects. Run as they are: views, what draws
    random numbers, and operations of other packages, whose kernels may take the memory for what it is not.
    """

    def __init__(
        self,
        origin: Event,
        formats: dict[int, tuple[torch.dtype, ...]],
        treated: Container[int],
        watched: int = 0,
        *,
        most: float = math.inf,
    ) -> None:
        super().__init__(most)
        self._origin, self._formats, self._treated, self._watched = origin, formats, treated, watched
        self.seen = ""
        """The operation that is watched for, and the line where it stands."""
        self.fails: bool | None = None
        """Whether the operation gives a bad value as before; None when the step took another way to it."""
        self.left: set[str] = set()
        """Operations that may round, and were run as they are."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._next() == self._origin.call:
            if function is self._origin.function:
                self.fails = _fails(self._origin, operation_of(function), args, kwargs, function)
            raise Reached
        if self.count == self._watched:
            stack = current_stack()
            place = f" at {stack[own_frame(stack)][0].co_filename}:{stack[own_frame(stack)][1]}" if stack else ""
            self.seen = f"{call_name(operation_of(function).name)}{place}"
        formats = self._formats.get(self.count)
        if formats and self.count in self._treated and _rounds(function, args, kwargs):
            if _can_be_wide(function, args, kwargs):
                with suppress(RuntimeError, TypeError, ValueError):  # no float64 kernel: it stays as it is
                    return _in_float64(function, args, kwargs, formats)
            self.left.add(operation_of(function).name)
        return run_carefully(function, args, kwargs)


def _fails(origin: Event, op: Operation, args: Any, kwargs: Any, function: Any) -> bool:
    """Whether an operation, on what it is given now, fails as it did."""
    out = floats_in(run_carefully(function, args, kwargs))
    if op.mutates:
        out += floats_in([args[i] if i < len(args) else kwargs.get(n) for i, n in op.written])
    if not origin.parents or origin.output is None:
        return any(map(kind_of, out))
    # beside a mask an infinity says nothing: as many bad values as there were
    return any(t.numel() == origin.numel and _bad(t) >= origin.output.bad for t in out)


def _bad(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor)).sum())


def _rounds(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation computes with narrow numbers: no view, and nothing that is drawn at random."""
    return (
        not {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(function.tags)
        and not any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        and any(t.dtype in _WIDE for t in floats_in((args, kwargs)))
    )


def _can_be_wide(function: Any, args: Any, kwargs: Any) -> bool:
    return function.namespace == "aten" and all(map(_plain, floats_in((args, kwargs))))


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def _in_float64(function: Any, args: Any, kwargs: Any, formats: tuple[torch.dtype, ...]) -> Any:
    op = operation_of(function)
    wide: dict[int, Tensor] = {}

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _WIDE:
            return wide.setdefault(id(value), value.detach().to(_WIDE[value.dtype]))
        return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value

    with torch.no_grad():
        out = run_carefully(function, tree_map(widen, args), tree_map(widen, kwargs))
        written = op.written if op.mutates else _STATISTICS if op.changes else ()
        back: dict[int, Tensor] = {}
        for place, name in written:
            given = args[place] if place < len(args) else kwargs.get(name)
            for tensor in floats_in(given):
                if id(tensor) in wide:
                    tensor.copy_(wide[id(tensor)])
                    back[id(wide[id(tensor)])] = tensor
        left = iter(formats)

        def narrow(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = next(left)
            return back[id(value)] if id(value) in back else value.to(dtype)

        return tree_map(narrow, out)

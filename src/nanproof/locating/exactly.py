"""Replays up to an operation that failed, with the operations before it rounded otherwise than they were."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..location import call_name
from .mode import ReplayMode, run_carefully
from .precision import has_slope
from .trace import Event, Operation, operation_of, versions_of
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
_EXACT = {"_unsafe_view", "cat", "clone", "copy_", "embedding", "index", "masked_fill", "relu", "stack", "where"}
"""They choose or move numbers: float64 would give the same, and cost memory."""
_FURTHER = (-1.0, 4.0, -4.0)
"""Multiples of a change of its operands that the operation itself is tried with."""
_ROUNDINGS = 8
"""By so many units in the last place they are made smaller then."""


class Reached(BaseException):
    """Ends a replay at the operation in question; no user code should catch it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed operation, as a replay meets it again."""

    origin: Event
    slope: bool
    """Whether a derivative fails that is infinite whatever the gradient: then its forward call is asked."""

    @property
    def call(self) -> int:
        """The number of the operation at which a replay has its answer."""
        return self.origin.site.call if self.slope else self.origin.call

    def is_met(self, function: Any) -> bool:
        """Whether the operation that a replay has come to is the one in question."""
        return operation_of(function).name == self.origin.site.op if self.slope else function is self.origin.function

    def repeats(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Whether the operation fails as it did, on what it is given now."""
        return not has_slope(function, args, kwargs) if self.slope else _fails(self.origin, function, args, kwargs)

    def repeats_further(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Whether it also fails when its operands change by more than they have, and the other way."""
        was = self.origin.args
        if self.slope or was is None or self.origin.versions != versions_of(was):
            return True
        return all(_fails(self.origin, function, given, kwargs) for given in _extended(was, args))


class Exactly(ReplayMode):  # type: ignore[no-untyped-call]
    """Replays up to one operation and corrects the rounding errors of those before it.

    Of the error of each operation the share is taken away that ``share`` says for its number: 1 is its result in
    float64, rounded to the format it had, so that every value has the dtype that the code expects. Run as they are:
    views, what draws random numbers, and operations of other packages, whose kernels may take the memory for what it
    is not.
    """

    def __init__(
        self,
        failure: Failure | None,
        formats: dict[int, tuple[torch.dtype, ...]],
        share: Callable[[int], float],
        watched: int = 0,
        *,
        most: float = math.inf,
    ) -> None:
        """``failure`` is where the replay ends; without one it runs on."""
        super().__init__(most)
        self._failure, self._formats, self._share, self._watched = failure, formats, share, watched
        self.seen = ""
        """The operation that is watched for, and the line where it stands."""
        self.met: tuple[Any, Any, Any] | None = None
        """The call of the operation; None when the replay did not come to it."""
        self.left: set[str] = set()
        """Operations that may round, and were run as they are."""

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self._next() and self._failure is not None and self.count == self._failure.call:
            if self._failure.is_met(function):
                self.met = function, tree_map(_detached, args), tree_map(_detached, kwargs)
            raise Reached
        if self.count == self._watched:
            stack = current_stack()
            place = f" at {stack[own_frame(stack)][0].co_filename}:{stack[own_frame(stack)][1]}" if stack else ""
            self.seen = f"{call_name(operation_of(function).name)}{place}"
        formats, share = self._formats.get(self.count), self._share(self.count)
        if formats and share and rounds(function, args, kwargs):
            if can_be_wide(function, args, kwargs):
                with suppress(RuntimeError, TypeError, ValueError):  # no float64 kernel: it stays as it is
                    return _corrected(function, args, kwargs, formats, share)
            self.left.add(operation_of(function).name)
        return run_carefully(function, args, kwargs)

    @property
    def fails(self) -> bool | None:
        """Whether the operation gives a bad value as before; None when the step took another way to it."""
        return self._failure.repeats(*self.met) if self._failure is not None and self.met is not None else None

    @property
    def fails_further(self) -> bool:
        """Whether it does, and also with operands that differ by more."""
        met = self.met if self._failure is not None and self.fails else None
        return met is not None and self._failure is not None and self._failure.repeats_further(*met)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _fails(origin: Event, function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation, on what it is given now, fails as it did."""
    op = operation_of(function)
    out = floats_in(run_carefully(function, args, kwargs))
    if op.mutates:
        out += floats_in(_written(op, args, kwargs))
    if not origin.parents or origin.output is None:
        return any(map(kind_of, out))
    # beside a mask an infinity says nothing: as many bad values as there were
    return any(t.numel() == origin.numel and _bad(t) >= origin.output.bad for t in out)


def _bad(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor)).sum())


def _written(op: Operation, args: Any, kwargs: Any) -> list[Any]:
    places = op.written if op.mutates else _STATISTICS if op.changes else ()
    return [args[i] if i < len(args) else kwargs.get(n) for i, n in places]


def _extended(was: Any, now: Any) -> Iterator[Any]:
    """The arguments as they were, changed by multiples of what they differ by now."""
    pairs = {id(a): b for a, b in zip(floats_in(was), floats_in(now), strict=False) if a.shape == b.shape}

    def move(times: float, value: Any) -> Any:
        if id(value) not in pairs:
            return value.clone() if isinstance(value, Tensor) else value
        before = value.double()
        change = times * (pairs[id(value)].double() - before) - _ROUNDINGS * torch.finfo(value.dtype).eps * before
        return torch.where(change.isfinite(), before + change, before).to(value.dtype)

    if not all(map(is_plain, [*pairs.values(), *floats_in(was)])) or any(t.is_complex() for t in floats_in(was)):
        return
    for times in _FURTHER:
        yield tree_map(functools.partial(move, times), was)


def rounds(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation computes with narrow numbers: no view, and nothing that is drawn at random."""
    return (
        function._opname not in _EXACT
        and not {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(function.tags)
        and not any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        and any(t.dtype in _WIDE for t in floats_in((args, kwargs)))
    )


def can_be_wide(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation may be given float64: it is torch's own, on plain tensors."""
    return function.namespace == "aten" and all(map(is_plain, floats_in((args, kwargs))))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own, with its numbers one beside the other."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def in_float64(function: Any, args: Any, kwargs: Any) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """An operation computed in float64 on copies: its result, and what it has written with what that stands for."""
    wide: dict[int, Tensor] = {}

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _WIDE:
            return wide.setdefault(id(value), value.detach().to(_WIDE[value.dtype]))
        return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value

    out = run_carefully(function, tree_map(widen, args), tree_map(widen, kwargs))
    written = floats_in(_written(operation_of(function), args, kwargs))
    return out, [(wide[id(t)], t) for t in written if id(t) in wide]


def _corrected(function: Any, args: Any, kwargs: Any, formats: tuple[torch.dtype, ...], share: float) -> Any:
    with torch.no_grad():
        out, written = in_float64(function, args, kwargs)
        if share != 1:
            narrow = run_carefully(function, args, kwargs)
            pairs = zip(floats_in(narrow), floats_in(out), strict=True)
            for now, exact in (*pairs, *((t, w) for w, t in written)):
                if now.dtype in _WIDE and now.shape == exact.shape:
                    moved = now + (share * (exact - now)).nan_to_num(0.0, 0.0, 0.0)
                    now.copy_(torch.where(moved.to(now.dtype).isfinite() & exact.isfinite(), moved, now))
            return narrow
        for exact, tensor in written:
            tensor.copy_(exact)
        back = {id(exact): tensor for exact, tensor in written}
        left = iter(formats)

        def narrowed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = next(left)
            return back[id(value)] if id(value) in back else value.to(dtype)

        return tree_map(narrowed, out)

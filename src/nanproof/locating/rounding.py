"""Whether rounding in the operations before a failure is to blame for it: replays with other errors than they made."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from .exactly import Exactly, Failure, Reached, can_be_wide, in_float64, is_plain, rounds
from .mode import ReplayMode, run_carefully
from .trace import operation_of
from .values import current_stack, floats_in, key_of, tensors_in

_FEW, _SMALL = 200, 1_000_000
"""So many operations before it, and elements that the step starts from: more are tried at once first."""
_MOST = 20_000
"""Operations that replays may run which treat the operations before it one at a time."""
_ELSEWHERE = "does not come to it"


class Rounding:
    """The proof that no rounding before an operation makes it fail.

    In float64, all operations before it at once, it must fail as before; and with each of them alone as well. One
    operation is what a line does, wherever it runs, with whatever computes the same values elsewhere: so a tie that is
    meant to be exact, x − x, stays one. Only those are tried that round and that the operands go back to.

    Where that would take long, everything before it is given other errors first, several times as large as its own,
    of either sign. What fails all the same, and would with operands still further off, no single one could have healed.
    An overflow is no tie that a single one breaks: float64 for all of them, and operands further off, are enough.
    """

    def __init__(
        self,
        failure: Failure,
        formats: dict[int, tuple[torch.dtype, ...]],
        size: int,
        play: Callable[[ReplayMode], None],
        finite: Callable[[ReplayMode], bool],
        most: float,
        *,
        fails_rounded: bool,
        overflows: bool,
    ) -> None:
        """``play`` replays up to the failure, ``finite`` the whole step, and says whether it is.

        ``size``: elements that the step starts from. ``fails_rounded``: it does with just its operand rounded.
        """
        self._failure, self._formats, self._most = failure, formats, most
        self._play, self._finite = play, finite
        self._small = failure.call <= _FEW and size <= _SMALL
        self._fails_rounded, self._overflows = fails_rounded, overflows
        self.left: list[str] = []
        """Operations before it that could not be computed in float64."""

    def doubt(self) -> str:
        """Why rounding may be to blame; empty when it is not."""
        if not self._small:
            other = self._after(_all if self._overflows else _other_error)
            if other.fails_further:
                self.left = sorted(other.left)
                return ""
        if not self._fails_rounded and (said := self._all_at_once()):
            return said
        return self._one_by_one()

    def _all_at_once(self) -> str:
        exact = self._after(_all)
        self.left, fails = sorted(exact.left), exact.fails
        if fails is None and not self._finite(self._whole(_all)):
            fails = True  # it takes another way (a loop that depends on values, TorchScript), and fails there
        if fails:
            return ""
        if fails is None:
            return f"a replay with everything before it in float64 {_ELSEWHERE}"
        same, other = 1, self._failure.call  # in float64 below the first nothing changes, below the second it does
        while other - same > 1:
            middle = (same + other) // 2
            if self._alone(range(middle)).fails:
                same = middle
            else:
                other = middle
        alone = self._alone((same,), watched=same)
        return _blamed(alone.seen if alone.fails is False else f"everything up to {alone.seen}")

    def _one_by_one(self) -> str:
        marks = _Marks(self._failure, self._formats, self._most)
        self._play(marks)
        self.left = sorted({*self.left, *marks.left})
        if marks.found is None:
            return f"a replay up to it {_ELSEWHERE}"
        if len(marks.found) * self._failure.call > _MOST:
            return f"rounding before it may be to blame: {len(marks.found)} operations were not tried one by one"
        for numbers in marks.found:
            alone = self._alone(numbers, watched=min(numbers))
            fails = alone.fails
            if fails is False:
                return _blamed(f"{alone.seen} alone")
            if fails is None and self._finite(self._whole(_only(numbers))):
                return f"with {alone.seen} alone computed in float64 the step is finite"
        return ""

    def _alone(self, numbers: Container[int], watched: int = 0) -> Exactly:
        return self._after(_only(numbers), watched)

    def _whole(self, share: Callable[[int], float]) -> Exactly:
        return Exactly(None, self._formats, share, most=self._most)

    def _after(self, share: Callable[[int], float], watched: int = 0) -> Exactly:
        """A replay up to the failure with other errors before it."""
        mode = Exactly(self._failure, self._formats, share, watched, most=self._most)
        self._play(mode)
        return mode


def _all(number: int) -> float:
    return 1.0


def _only(numbers: Container[int]) -> Callable[[int], float]:
    return lambda number: float(number in numbers)


def _blamed(what: str) -> str:
    return f"rounding before it is to blame: with {what} computed in float64 it does not fail"


def _other_error(number: int) -> float:
    """Four to twelve times the error that an operation made, added or taken away; the same every time.

    >>> [round(_other_error(number), 1) for number in (1, 2, 3)]
    [5.1, 11.6, 5.9]
    """
    draw = random.Random(number)
    return draw.uniform(4, 12) * draw.choice((1, -1))


class _Marks(ReplayMode):  # type: ignore[no-untyped-call]
    """Replays up to a failure as it was, and learns which operations before it round, and reach its operands."""

    def __init__(self, failure: Failure, formats: dict[int, tuple[torch.dtype, ...]], most: float) -> None:
        super().__init__(most)
        self._failure, self._formats = failure, formats
        self.found: list[set[int]] | None = None
        """The numbers of each such operation; None when the failure was not met."""
        self.left: set[str] = set()
        self._groups: dict[Any, int] = {}
        self._members: list[set[int]] = []
        self._reach: dict[int, int] = {}
        """By memory: which groups its values go back to, one bit each."""
        self._steers = 0
        """What the way of the step depends on: numbers that its code has read."""

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        number = self._next()
        given, inputs = self._steers, {key_of(t) for t in tensors_in((args, kwargs))}
        for key in inputs:
            given |= self._reach.get(key, 0)
        if number == self._failure.call:
            if self._failure.is_met(function):
                self.found = [m for i, m in enumerate(self._members) if given >> i & 1]
            raise Reached
        op = operation_of(function)
        exact: list[Tensor] | None = None
        if number in self._formats and rounds(function, args, kwargs):
            exact = self._exact(function, args, kwargs)
        out = run_carefully(function, args, kwargs)
        made = tensors_in(out)
        if op.mutates:
            made += tensors_in([args[i] if i < len(args) else kwargs.get(n) for i, n in op.written])
        results = floats_in(out)
        if exact and any(not torch.equal(e.to(t.dtype), t) for e, t in zip(exact, results, strict=False)):
            given |= 1 << self._group(op.name, number, results)
        if op.name in ("_local_scalar_dense", "equal"):
            self._steers |= given
        for key in {key_of(t) for t in made}:
            self._reach[key] = given | (self._reach.get(key, 0) if op.mutates or key in inputs else 0)
        return out

    def _exact(self, function: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
        if can_be_wide(function, args, kwargs):
            try:
                with torch.no_grad():
                    exact = floats_in(in_float64(function, args, kwargs)[0])
                return exact if all(map(is_plain, exact)) else None
            except (RuntimeError, TypeError, ValueError):
                pass
        self.left.add(operation_of(function).name)
        return None

    def _group(self, op: str, number: int, made: list[Tensor]) -> int:
        """The operation behind a call: by its line, or by what it computes; in backward each is one of its own."""
        stack = current_stack()
        backward = torch._C._current_autograd_node() is not None
        line = (op, number if backward or not stack else stack[0])
        value = (op, *((tuple(t.shape), float(t.sum().double()), float(t.abs().sum().double())) for t in made))
        group = self._groups.get(line, self._groups.get(value, len(self._members)))
        if group == len(self._members):
            self._members.append(set())
        self._groups[line] = self._groups[value] = group
        self._members[group].add(number)
        return group

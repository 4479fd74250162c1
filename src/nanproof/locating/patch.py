"""Neutralize operations while a step is replayed: the proof that they are its origin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..tensors import parts_of
from .graph import number_of, runs_again
from .mode import ReplayMode, run_carefully
from .values import current_stack, floats_in, key_of, kind_of, tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Which operation to neutralize, with its own backward: alone, or wherever its line runs."""

    call: int
    seq: int
    place: tuple[str, int]
    whole_line: bool = False
    fill: float = 0.0

    def apply(self, tensor: Tensor) -> None:
        """Put finite values where bad ones are, unseen by autograd's version counters."""
        for part in parts_of(tensor):
            if torch._debug_has_internal_overlap(part) == 1:  # 2 means "hard to tell": a slice, for example
                continue
            large = min(self.fill, torch.finfo(part.dtype).max ** 0.5)
            with _unsafe_preserve_version_counter(part):
                if part.element_size() == 1:  # 8-bit floats have no nan_to_num_
                    part.copy_(part.float().nan_to_num(min(large, 1.0), large, -large))
                else:
                    part.nan_to_num_(min(large, 1.0), large, -large)


class Neutralize(ReplayMode):  # type: ignore[no-untyped-call]
    """Replays with patches in force; counts operations as `Trace` does, and looks at no others."""

    def __init__(self, patches: tuple[Patch, ...], most: float = math.inf) -> None:
        super().__init__(most)
        self._patches = patches
        self._whole = any(p.whole_line for p in patches)
        self._base = torch._C._autograd._get_sequence_nr()
        self._places: dict[int, tuple[str, int]] = {}
        """Of the forward call behind each sequence number."""
        self._gradients: set[int] = set()
        """Memory that a backward operation wrote."""

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        self._next()
        node: Any = torch._C._current_autograd_node()
        patch = self._covering(node)
        if node is not None and runs_again(node) and current_stack():
            node = None  # a forward pass within the backward pass
        if patch is not None and node is not None and self._brings_bad_gradient((args, kwargs)):
            patch = None
        out = run_carefully(function, args, kwargs)
        outputs = floats_in(out)
        if patch is not None:
            for tensor in outputs:
                patch.apply(tensor)
        if node is not None:
            self._gradients.update(key_of(t) for t in outputs)
        return out

    def _covering(self, node: Any) -> Patch | None:
        number = number_of(node) if node is not None else -1
        place = None
        if self._whole:
            stack = current_stack()
            place = (stack[0][0].co_filename, stack[0][1]) if stack else self._places.get(number)
            if place is not None:
                self._places.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        for patch in self._patches:
            if patch.whole_line:
                if place == patch.place:
                    return patch
            elif self.count == patch.call or (node is not None and number - self._base == patch.seq):
                return patch
        return None

    def _brings_bad_gradient(self, value: Any) -> bool:
        """Whether a gradient is bad already as it comes in: then another origin made it so, and it must show.

        Autograd sums the gradients of a value that is used twice within the node that arrives last.
        """
        return any(key_of(t) in self._gradients and kind_of(t) for t in floats_in(value))


class Shift(ReplayMode):  # type: ignore[no-untyped-call]
    """Replays with a number added to some results of one operation: whether anything but comparisons depends on them.

    Comparisons come out as in the first replay, which adds 0 and fills ``decisions``: where(x > 0, x, 0) stays at 0.
    """

    def __init__(
        self, call: int, where: Tensor, by: float, decisions: dict[int, list[Tensor]], most: float = math.inf
    ) -> None:
        super().__init__(most)
        self._call, self._where, self._by, self._decisions = call, where, by, decisions
        self.shifted = False

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        out = run_carefully(function, args, kwargs)
        if self._next() == self._call:
            for tensor in floats_in(out):
                if tensor.shape == self._where.shape:
                    with _unsafe_preserve_version_counter(tensor):
                        tensor.add_(self._by * self._where.to(tensor.dtype))
                    self.shifted = True
        elif self.shifted and (decided := [t for t in tensors_in(out) if t.dtype is torch.bool and t.numel()]):
            known = self._decisions.setdefault(self.count, [t.clone() for t in decided])
            for now, then in zip(decided, known, strict=False):
                if now.shape == then.shape:
                    now.copy_(then)
        return out

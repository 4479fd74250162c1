"""Neutralising one operation while a step is played again: the proof that it is the origin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

Frame = tuple[str, int, str]
"""File, line, function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Neutralises an operation and its own backward, alone or wherever its line runs it."""

    call: int
    seq: int
    op: str
    frame: tuple[Frame, ...]
    whole_line: bool = False
    fill: float = 0.0

    def covers(self, call: int, seq: int | None, op: str, frame: list[Frame]) -> bool:
        if self.whole_line:
            return tuple(f[:2] for f in frame) == tuple(f[:2] for f in self.frame)
        return call == self.call or (seq is not None and seq == self.seq)

    def apply(self, tensor: Tensor) -> None:
        """Put finite values where bad ones are, unseen by autograd's version counters."""
        if torch._debug_has_internal_overlap(tensor) == 1:  # 2 means "hard to tell": a slice, for example
            return
        with _unsafe_preserve_version_counter(tensor):
            plain = tensor.conj() if tensor.is_conj() else tensor
            real = torch.view_as_real(plain) if plain.is_complex() else plain
            large = min(self.fill, torch.finfo(real.dtype).max ** 0.5)
            real.nan_to_num_(min(large, 1.0), large, -large)

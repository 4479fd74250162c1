"""Random states, buffers and gradients that nobody clears, at one moment, so that a step can be undone or replayed.

>>> import torch
>>> model = torch.nn.BatchNorm1d(2)
>>> state = CapturedState(buffer_slots(model)); state.capture()
>>> _ = model(torch.randn(4, 2)), torch.rand(3)
>>> state.restore(); model.running_mean.tolist()
[0.0, 0.0]

One implementation serves the state before a step, snapshots and replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from .rng import random_states, set_random_states
from .tensors import bytes_of, is_finite

Slot = tuple[str, nn.Module, str]
"""A buffer's full name, the module that holds it, and its name there."""


MAX_GRADIENTS = 256 << 20
"""Bytes of gradients that nobody clears; more are not copied, but dropped with a step that is undone."""


def buffer_slots(model: nn.Module) -> list[Slot]:
    """Every buffer of a model, as the place that holds it."""
    return [(f"{n}.{k}".lstrip("."), m, k) for n, m in model.named_modules() for k in m._buffers]


class CapturedState:
    """Copies go into memory that is allocated once and reused by the next capture."""

    def __init__(self, slots: list[Slot], unstepped: Sequence[nn.Parameter] = ()) -> None:
        self._slots = slots
        self._unstepped = unstepped
        self._grads: list[tuple[Tensor | None, Tensor | None]] = []
        self._held: list[Tensor | None] = []
        self._copies: list[Tensor] = []
        self._random: dict[str, Any] | None = None

    @property
    def taken(self) -> bool:
        return self._random is not None

    @property
    def random(self) -> dict[str, Any]:
        assert self._random is not None
        return self._random

    def capture(self) -> None:
        """Remember this moment."""
        self._held = [m._buffers.get(k) for _, m, k in self._slots]
        present = [b for b in self._held if b is not None]
        same = len(present) == len(self._copies) and all(
            c.shape == b.shape and c.dtype == b.dtype and c.device == b.device
            for c, b in zip(self._copies, present, strict=True)
        )
        if not same:
            self._copies = [b.detach().clone() for b in present]
        elif present:
            torch._foreach_copy_(self._copies, present)
        grads = [p.grad for p in self._unstepped]
        small = sum(bytes_of(g) for g in grads if g is not None) <= MAX_GRADIENTS
        self._grads = [(g, g.detach().clone()) if small and g is not None else (None, None) for g in grads]
        self._random = random_states()

    def forget(self) -> None:
        self._random = None

    def restore(self) -> None:
        """Go back to it; a buffer that was replaced since is put back as the same object."""
        self.restore_buffers()
        set_random_states(self.random)

    def restore_buffers(self) -> None:
        for (_, module, key), held in zip(self._slots, self._held, strict=True):
            if module._buffers.get(key) is not held:
                module._buffers[key] = held
        present = [b for b in self._held if b is not None]
        if present:
            with torch.no_grad():
                torch._foreach_copy_(present, self._copies)
        for p, (grad, copy) in zip(self._unstepped, self._grads, strict=True):
            p.grad = grad
            if grad is not None and copy is not None:
                grad.detach().copy_(copy)

    def restore_nonfinite_buffers(self) -> None:
        """Put back the buffers of modules where one is not finite that was: a pass that nobody uses wrote into it."""
        kept = iter(self._copies)
        held = [(m, k, b, next(kept)) for (_, m, k), b in zip(self._slots, self._held, strict=True) if b is not None]
        held = [h for h in held if not h[2].is_inference()]
        bad = [b for m, k, b, copy in held if m._buffers.get(k) is b and is_finite(copy) and not is_finite(b)]
        hit = {id(m) for m, _, b, _ in held if any(b is one for one in bad)}
        buffers, copies = [b for m, _, b, _ in held if id(m) in hit], [c for m, _, _, c in held if id(m) in hit]
        # a graph of an earlier pass may wait for its backward pass: to autograd, nothing was written
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)

    def select_buffers(self, good: Tensor) -> None:
        """Keep the new buffers where ``good``, else these; decided on the device."""
        present = [b for b in self._held if b is not None]
        with torch.no_grad():
            for buffer, copy in zip(present, self._copies, strict=True):
                torch.where(good, buffer, copy, out=buffer)
            for p, (_, before) in zip(self._unstepped, self._grads, strict=True):
                if p.grad is not None:
                    torch.where(good, p.grad, torch.zeros_like(p.grad) if before is None else before, out=p.grad)

    def buffers(self) -> dict[str, Tensor]:
        """The captured buffers by name, for an incident's bundle."""
        names = [n for (n, _, _), held in zip(self._slots, self._held, strict=True) if held is not None]
        return dict(zip(names, self._copies, strict=True))

"""Optimizers that step in hooks during the backward pass: their steps wait until the whole pass can be judged.

The price is what such loops want to save: all gradients of a pass are in memory at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

log = logging.getLogger("nanproof")
Call = Callable[..., Any]


@dataclass(eq=False)
class _Waiting:
    """A step, the gradients that it was called with, and what is to be done after it."""

    optimizer: Optimizer
    call: Call
    gradients: list[tuple[Tensor, Tensor, int]]
    """Parameter, gradient, and how often that was written to."""
    then: Call | None = None


class StepsInBackward:
    """Holds steps back, with their gradients, and takes them once the backward pass is over."""

    def __init__(self) -> None:
        self._held: list[_Waiting] = []
        self._copies = True
        """Whether gradients are copied: until it is seen that the script does not overwrite them."""
        self._said = False

    def add(self, optimizer: Optimizer, call: Call) -> None:
        """A step is called within the backward pass."""
        found = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        kept = [(p, g.clone() if self._copies else g, g._version) for p, g in found]
        self._held.append(_Waiting(optimizer, call, kept))

    def clear(self, optimizer: Optimizer, call: Call) -> bool:
        """Let the gradients of a step that waits be cleared after it; False when none waits."""
        for waiting in self._held:
            if waiting.optimizer is optimizer:
                waiting.then = call
                return True
        return False

    def drop(self) -> None:
        """The backward pass has failed: nothing is stepped."""
        self._held.clear()

    def take(self, step: Callable[[Optimizer, Call, None], Any]) -> None:
        """The backward pass is over: hand every gradient back and let ``step`` judge and carry out the steps."""
        held, self._held = self._held, []
        if not held:
            return
        self._tell(held)
        left = [(p, p.grad) for waiting in held for p, _, _ in waiting.gradients]
        written = [g is not None and g._version for _, g in left]
        known = [version for waiting in held for _, _, version in waiting.gradients]
        self._copies = self._copies and any(now > before for now, before in zip(written, known, strict=True))
        for waiting in held:
            for parameter, gradient, _ in waiting.gradients:
                parameter.grad = gradient
        for waiting in held:
            step(waiting.optimizer, waiting.call, None)
        for parameter, remains in left:
            parameter.grad = remains  # as the hook has left it
        for waiting in held:
            if waiting.then is not None:
                waiting.then()

    def _tell(self, held: list[_Waiting]) -> None:
        if not self._said:
            self._said = True
            size = sum(g.nbytes for w in held for _, g, _ in w.gradients)
            log.info(
                "nanproof: %s steps inside the backward pass: its steps wait until the pass is judged, which keeps all"
                " gradients (%.3g MB) in memory",
                type(held[0].optimizer).__name__,
                size / 1e6,
            )

"""Who drew random numbers within a step: the model, or the loop around it, to fetch data or to make noise.

What the model drew is given back when a step is undone. What the loop drew stays drawn: rewinding it would fetch the
same batch again. So torch's generators are compared wherever a step passes from one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class RngTracking:
    """Notices that the loop itself moved torch's generators between the passes of a step.

    >>> tracking = RngTracking()
    >>> tracking.leave(); _ = torch.rand(1); tracking.enter()
    >>> sorted(tracking.outside)
    ['torch']
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A step begins with a forward pass."""
        self.outside: set[str] = set()
        self.calls = 0
        """How often the model was called in this step."""
        self._left: dict[str, bytes] | None = None

    def leave(self) -> None:
        """A forward or backward pass is over; the loop goes on."""
        self._left = _torch_states()

    def enter(self) -> None:
        """The next pass begins, or the verdict is due."""
        if self._left is not None:
            now = _torch_states()
            self.outside |= {name for name, state in now.items() if state != self._left.get(name)}
            self._left = None

    def since(self, first: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
        """The generators whose draws between two states are the loop's.

        Python's and NumPy's are too expensive to compare in between. Between several calls of the model what moved them
        is most likely the loading or the shuffling of data; with one call it is the model.
        """
        if self.calls <= 1:
            return self.outside
        moved = {k for k in ("python", "numpy") if k in now and not _same(now[k], first.get(k))}
        return self.outside | moved


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _torch_states() -> dict[str, bytes]:
    states = {"torch": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = b"".join(s.numpy().tobytes() for s in torch.cuda.get_rng_state_all())
    return states

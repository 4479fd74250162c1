"""What is normal for this run: a robust limit from recent healthy steps.

>>> window = Window(size=64, warmup=8)
>>> for norm in (1.1, 1.0, 0.9, 1.0, 1.1, 0.9, 1.0, 1.0):
...     window.add(loss=2.0, grad_norm=norm)
>>> round(window.limits().grad_norm, 6)
10.0

Median and MAD, not mean and variance: one outlier cannot widen them. Non-finite values never enter. Only the gradient
norm has a limit: a step acts on the weights through its gradients, while the loss of one hard batch near convergence
is many times the usual one and means nothing (`make spikes` measures both).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

# Far beyond noise, near enough for a spike that does harm: healthy norms are close to log-normal, and a clean
# run's heavy tail stays below ten times its median and twelve robust deviations.
DEVIATIONS = 12.0
NORM_RATIO = 10.0
# Where one batch in a hundred is a hard one (a rare class, a sparse reward), the median knows nothing of it, and where
# norms scatter over decades twelve deviations are no limit at all. What the run has reached in three stretches of its
# last 2,000 steps is normal for it; eight times that is not.
STRETCH, STRETCHES = 16, 128
WITHIN_REACH, FAR_BEYOND = 2.0, 8.0
_SIGMA = 1.4826  # a MAD of one is that many standard deviations of a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest gradient norm that still counts as normal; infinite while the window warms up."""

    grad_norm: float = math.inf


class Window:
    """The last healthy losses and gradient norms."""

    def __init__(self, *, size: int = 128, warmup: int | None = None) -> None:
        self.warmup = warmup if warmup is not None else max(1, size // 2)
        self._losses: deque[float] = deque(maxlen=size)
        self._norms: deque[float] = deque(maxlen=size)
        self._peaks: deque[float] = deque(maxlen=STRETCHES)
        """The largest norm of each stretch of steps; the last one is not complete."""
        self._in_stretch = 0

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, *, loss: float, grad_norm: float) -> None:
        """Take a healthy step in; a non-finite value is refused, whoever asks."""
        if math.isfinite(loss):
            self._losses.append(loss)
        if math.isfinite(grad_norm):
            self._norms.append(grad_norm)
            if self._in_stretch == 0:
                self._peaks.append(grad_norm)
            self._peaks[-1] = max(self._peaks[-1], grad_norm)
            self._in_stretch = (self._in_stretch + 1) % STRETCH

    def limits(self) -> Limits:
        """The limits for the next step."""
        if len(self._norms) < self.warmup:
            return Limits()
        # norms live on a log scale: a factor of ten means the same at 0.01 and at 100
        norm, log_spread = _median_and_mad([math.log(max(n, 1e-30)) for n in self._norms])
        least = NORM_RATIO * math.exp(norm)
        limit = max(least, math.exp(min(norm + DEVIATIONS * log_spread, 700.0)))
        if len(self._peaks) >= 3:
            peak = sorted(self._peaks)[-3]
            limit = min(max(limit, WITHIN_REACH * peak), max(least, FAR_BEYOND * peak))
        # as float32, because the device compares in float32 and both sides must agree
        return Limits(grad_norm=float(np.float32(min(limit, 3.4e38))))

    def medians(self) -> tuple[float, float]:
        """The median loss and gradient norm; NaN before the first healthy step."""
        if not self._losses or not self._norms:
            return math.nan, math.nan
        return _median_and_mad(self._losses)[0], _median_and_mad(self._norms)[0]

    def clear(self) -> None:
        """Forget, for example because a new level was accepted."""
        for kept in (self._losses, self._norms, self._peaks):
            kept.clear()
        self._in_stretch = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "peaks": list(self._peaks),
            "in_stretch": self._in_stretch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
        self._peaks.extend(state["peaks"])
        self._in_stretch = state["in_stretch"]


def _median_and_mad(values: deque[float] | list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    distances = sorted(abs(v - middle) for v in ordered)
    return middle, _SIGMA * distances[len(distances) // 2]

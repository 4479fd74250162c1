"""What is normal for this run: robust limits from recent healthy steps.

>>> window = Window(size=64, warmup=8)
>>> for loss in (2.1, 2.0, 1.9, 2.0, 2.1, 1.9, 2.0, 2.0):
...     window.add(loss=loss, grad_norm=1.0)
>>> limits = window.limits()
>>> limits.loss, limits.grad_norm
(4.0, 10.0)

Median and MAD, not mean and variance: one outlier cannot widen them. Non-finite values never enter.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

# Far beyond noise, near enough for a spike that would hurt: healthy norms are close to log-normal, and a clean
# run's heavy tail stays below ten times its median and twelve robust deviations.
DEVIATIONS = 12.0
NORM_RATIO = 10.0
LOSS_RATIO = 2.0
_SIGMA = 1.4826  # a MAD of one is that many standard deviations of a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest loss and gradient norm that still count as normal; infinite while the window warms up."""

    loss: float = math.inf
    grad_norm: float = math.inf


class Window:
    """The last healthy losses and gradient norms."""

    def __init__(self, *, size: int = 128, warmup: int = 64) -> None:
        self.warmup = warmup
        self._losses: deque[float] = deque(maxlen=size)
        self._norms: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, *, loss: float, grad_norm: float) -> None:
        """Take a healthy step in; a non-finite value is refused, whoever asks."""
        if math.isfinite(loss):
            self._losses.append(loss)
        if math.isfinite(grad_norm):
            self._norms.append(grad_norm)

    def limits(self) -> Limits:
        """The limits for the next step."""
        if len(self._losses) < self.warmup or len(self._norms) < self.warmup:
            return Limits()
        loss, spread = _median_and_mad(self._losses)
        loss_limit = loss + max(DEVIATIONS * spread, (LOSS_RATIO - 1) * abs(loss))
        # norms live on a log scale: a factor of ten means the same at 0.01 and at 100
        norm, log_spread = _median_and_mad([math.log(max(n, 1e-30)) for n in self._norms])
        norm_limit = math.exp(min(norm + max(DEVIATIONS * log_spread, math.log(NORM_RATIO)), 700.0))
        # as float32, because the device compares in float32 and both sides must agree
        return Limits(loss=_float32(loss_limit), grad_norm=_float32(norm_limit))

    def medians(self) -> tuple[float, float]:
        """The median loss and gradient norm; NaN before the first healthy step."""
        if not self._losses or not self._norms:
            return math.nan, math.nan
        return _median_and_mad(self._losses)[0], _median_and_mad(self._norms)[0]

    def clear(self) -> None:
        """Forget, for example because a new level was accepted."""
        self._losses.clear()
        self._norms.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])


def _float32(value: float) -> float:
    return float(np.float32(min(value, 3.4e38)))


def _median_and_mad(values: deque[float] | list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    distances = sorted(abs(v - middle) for v in ordered)
    return middle, _SIGMA * distances[len(distances) // 2]

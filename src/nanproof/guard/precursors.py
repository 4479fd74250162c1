"""What changes in the weights before a run breaks: the size of updates, the gradient against Adam's second moment.

>>> import torch
>>> w = torch.nn.Parameter(torch.ones(4, 4))
>>> precursors = Precursors([("w", w)], [torch.optim.SGD([w], lr=0.1)])
>>> precursors.sample(1).now()
{}
>>> with torch.no_grad(): _ = w.mul_(1.5)
>>> precursors.sample(2).now()
{'update_ratio/w': 0.5, 'unmoved': 0.0}

A sample of each weight matrix and of its second moment is sent with the step's other numbers and compared on the host
with the one before: no operation of its own on the device, and nothing waits. Biases and gains are left out: they begin
at zero or one, and an update of their own size is nothing special there. So are matrices of a few elements: when those
cross zero, any update is large.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .readback import Numbers, Part
from .samples import SAMPLE, place_of, view_of

_TINY = 1e-24
FEWEST = 16
"""Elements of a matrix that is looked at."""


class Precursors:
    """Samples weight matrices and their second moments before and after an update, and compares."""

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], optimizers: Sequence[Optimizer], size: int = SAMPLE
    ) -> None:
        self._size = size
        trained = [(n, p) for n, p in parameters if p.is_floating_point() and p.requires_grad]
        self._all = [(n, p) for n, p in trained if p.dim() >= 2 and p.numel() >= FEWEST]
        self._optimizers = optimizers
        self._samples: _Samples | None = None
        self._before: tuple[int, _Samples, Numbers] | None = None

    def sample(self, step: int) -> Part | None:
        """The weights as they are before the update of a step; read on the host, what the update before it did.

        ``update_ratio/…`` is ‖Δw‖/‖w‖, ``unmoved`` the share of elements that did not change, and ``g2_over_v/…`` the
        mean of g²/v, with the gradient as the optimizer saw it: its second moment before and after the update says.
        """
        found = [(n, p) for n, p in self._all if place_of(p)]
        if not found:
            return None
        moments = [(n, m) for n, m in self._second_moments(found) if place_of(m.values)]
        places = [place_of(p) for _, p in found], [(place_of(m.values), m.counter_place) for _, m in moments]
        if self._samples is None or self._samples.places != places:
            self._samples = _Samples(places, found, moments, self._size)
        return Part(self._samples.views, functools.partial(self._compare, step, self._samples))

    def _compare(self, step: int, samples: _Samples, numbers: Numbers) -> Mapping[str, float]:
        before, self._before = self._before, (step, samples, numbers)
        if before is None or before[0] != step - 1 or before[1].keys != samples.keys:
            return {}
        return samples.compare(before[2].astype(np.float64), numbers.astype(np.float64))

    def _second_moments(self, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, _Moment]]:
        for optimizer in self._optimizers:
            key, decay = _decay(optimizer)
            for name, p in named if key else ():
                state = optimizer.state.get(p) or {}
                values, step = state.get(key), state.get("step") if key == "exp_avg_sq" else None
                # in half precision the difference between two second moments is mostly rounding
                if isinstance(values, Tensor) and values.shape == p.shape and values.dtype == torch.float32:
                    yield name, _Moment(values, decay, step if isinstance(step, Tensor) else None)


def _decay(optimizer: Optimizer) -> tuple[str, float]:
    """The name of an optimizer's second moment, and how slowly it forgets; no name when there is none, or several."""
    for key, option in (("exp_avg_sq", "betas"), ("square_avg", "alpha"), ("square_avg", "rho")):
        if option in optimizer.defaults:
            given = [group[option] for group in optimizer.param_groups]
            decays = {float(v[1] if option == "betas" else v) for v in given}
            return (key, max(decays)) if len(decays) == 1 and max(decays) < 1 else ("", 0.0)
    return "", 0.0


class _Moment(NamedTuple):
    """The running mean of squared gradients of a parameter, how slowly it forgets, and the counter of its updates."""

    values: Tensor
    decay: float
    counter: Tensor | None

    @property
    def counter_place(self) -> int:
        return self.counter.data_ptr() if self.counter is not None else 0


class _Samples:
    """Views of weights, second moments and their counters, and what their elements in a row mean."""

    def __init__(
        self, places: object, weights: Sequence[tuple[str, Tensor]], moments: Sequence[tuple[str, _Moment]], size: int
    ) -> None:
        self.places = places
        first = [view_of(p, size) for _, p in weights]
        second = [view_of(m.values, size) for _, m in moments]
        self.keys = [*(f"update_ratio/{n}" for n, _ in weights), "unmoved", *(f"g2_over_v/{n}" for n, _ in moments)]
        # the parameters of an optimizer step together: one counter stands for all
        counters = {m.decay: m.counter.detach().reshape(1) for _, m in moments if m.counter is not None}
        self.views = [*first, *second, *counters.values()]
        self._weights, self._moments = _Row(first), _Row(second)
        self._decays = np.array([m.decay for _, m in moments])
        self._counted = list(counters)
        self._has_counter = np.array([m.counter is not None for _, m in moments], dtype=bool)

    def compare(self, before: Numbers, now: Numbers) -> dict[str, float]:
        """What happened between two readings, by name."""
        n, m = self._weights.size, self._weights.size + self._moments.size
        change = now[:n] - before[:n]
        with np.errstate(all="ignore"):  # a run that breaks: its numbers say so themselves
            sizes = np.maximum(self._weights.sums(before[:n] ** 2), _TINY)
            values = [*np.sqrt(self._weights.sums(change**2) / sizes), np.mean(change == 0)]
            if len(self._decays):
                new = now[n:m] - self._moments.spread(self._decays) * before[n:m]  # (1 - β) g²
                ratios = self._moments.means(new / np.maximum(now[n:m], _TINY)) / (1 - self._decays)
                # what each mean is short of by having begun at zero
                updates = dict(zip(self._counted, now[m:], strict=True))
                short = [1 - d ** updates.get(d, np.inf) for d in self._decays]
                values += list(ratios * np.where(self._has_counter, short, 1.0))
        return {k: float(v) for k, v in zip(self.keys, values, strict=True)}


class _Row:
    """Tensors one behind the other in a row of numbers."""

    def __init__(self, views: Sequence[Tensor]) -> None:
        self._lengths = np.array([len(v) for v in views], dtype=int)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self.size = int(self._lengths.sum())

    def sums(self, values: Numbers) -> Numbers:
        found: Numbers = np.add.reduceat(values, self._starts)
        return found

    def means(self, values: Numbers) -> Numbers:
        found: Numbers = self.sums(values) / self._lengths
        return found

    def spread(self, values: Numbers) -> Numbers:
        return np.repeat(values, self._lengths)

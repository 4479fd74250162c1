"""What changes before a run breaks: per parameter, the gradient against Adam's second moment, and the update's size.

>>> import torch
>>> w = torch.nn.Parameter(torch.ones(4))
>>> precursors = Precursors([("w", w)], [torch.optim.SGD([w], lr=0.1)])
>>> w.grad = torch.full((4,), 2.0)
>>> names, first = precursors.read()
>>> with torch.no_grad(): _ = w.mul_(1.5)
>>> names, second = precursors.read()
>>> dict(zip(names, second.tolist(), strict=True))
{'unmoved': 0.0, 'grad_norm/w': 4.0, 'update_ratio/w': 0.5}

Everything is measured on a sample of each tensor, evenly spaced, in one tensor for all: the number of operations on the
device does not grow with the model, nothing waits for the device, and the memory is a few numbers per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..tensors import local_values

SAMPLE = 256
"""Elements of each tensor; one that has no more is measured whole."""
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg")


class Precursors:
    """Reads the parameters of an optimizer, their gradients and second moments; the numbers stay on the device."""

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], optimizers: Sequence[Optimizer], size: int = SAMPLE
    ) -> None:
        self._size = size
        self._all = [(n, p) for n, p in parameters if p.requires_grad and p.is_floating_point() and p.numel()]
        self._optimizers = optimizers
        self._before: tuple[list[str], Tensor] | None = None
        self._segments: tuple[list[str], Tensor, Tensor, Tensor] | None = None

    def forget(self) -> None:
        """The next update is not compared with what was read last: it is not the one that followed."""
        self._before = None

    @torch.no_grad()
    def read(self) -> tuple[list[str], Tensor] | None:
        """Names and one tensor of their values, for the gradients as they are now and the update since the last read.

        ``grad_norm/…`` is estimated from the sample, ``g2_over_v/…`` is the mean of g²/v, ``update_ratio/…`` is
        ‖Δw‖/‖w‖ of the update between this read and the last one, and ``unmoved`` the share of elements that it left
        as they were.
        """
        found = [(n, p, p.grad) for n, p in self._all if p.grad is not None and p.grad.layout == torch.strided]
        if not found:
            return None
        names = [n for n, _, _ in found]
        device = found[0][1].device
        ids, counts, sizes = self._segments_of(names, [p for _, p, _ in found], device)

        def joined(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([self._sample(t).to(device, torch.float32) for t in tensors])

        def sums(values: Tensor) -> Tensor:
            return torch.zeros(len(names), device=device).index_add_(0, ids, values)

        weights = joined([p for _, p, _ in found])
        squares = joined([g for _, _, g in found]).square()
        mean_square = sums(squares) / counts
        keys = [f"grad_norm/{n}" for n in names]
        values = [(mean_square * sizes).sqrt()]
        moments = [self._second_moment(p) for _, p, _ in found]
        if all(m is not None for m in moments):
            v = joined([m for m, _ in moments])  # type: ignore[misc]
            correction = torch.tensor([c for _, c in moments], device=device)[ids]  # type: ignore[misc]
            values.append(sums(squares / (v / correction).clamp_min(1e-24)) / counts)
            keys += [f"g2_over_v/{n}" for n in names]
        before, self._before = self._before, (names, weights)
        if before is not None and before[0] == names:
            change = weights - before[1]
            ratio = (sums(change.square()) / sums(before[1].square()).clamp_min(1e-24)).sqrt()
            values = [(change == 0).float().mean().reshape(1), *values, ratio]
            keys = ["unmoved", *keys, *(f"update_ratio/{n}" for n in names)]
        return keys, torch.cat(values)

    def _sample(self, tensor: Tensor) -> Tensor:
        values = local_values(tensor.detach()).reshape(-1)
        stride = max(1, values.numel() // self._size)
        return values[::stride][: self._size]

    def _segments_of(
        self, names: list[str], parameters: list[nn.Parameter], device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._segments is None or self._segments[0] != names:
            lengths = torch.tensor([self._sample(p).numel() for p in parameters])
            ids = torch.repeat_interleave(torch.arange(len(names)), lengths)
            sizes = torch.tensor([float(local_values(p).numel()) for p in parameters])
            self._segments = (names, ids.to(device), lengths.float().clamp_min(1).to(device), sizes.to(device))
        return self._segments[1:]

    def _second_moment(self, parameter: nn.Parameter) -> tuple[Tensor, float] | None:
        """The running mean of squared gradients, and what it is short of by having begun at zero."""
        for optimizer in self._optimizers:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key in _SECOND_MOMENTS:
                moment = state.get(key)
                if isinstance(moment, Tensor) and moment.shape == parameter.shape:
                    return moment, _correction(optimizer, state)
        return None


def _correction(optimizer: Optimizer, state: dict[str, Any]) -> float:
    betas, step = optimizer.defaults.get("betas"), state.get("step")
    if betas is None or not isinstance(step, Tensor) or step.device.type != "cpu":
        return 1.0  # a counter on the device cannot be read without waiting; after a few hundred steps this is exact
    return float(1.0 - betas[1] ** float(step)) or 1.0

"""What changes in the weights before a run breaks: the gradient against Adam's second moment, the size of updates.

>>> import torch
>>> w = torch.nn.Parameter(torch.ones(2, 2))
>>> precursors = Precursors([("w", w)], [torch.optim.SGD([w], lr=0.1)])
>>> w.grad = torch.full((2, 2), 2.0)
>>> names, first = precursors.read()
>>> with torch.no_grad(): _ = w.mul_(1.5)
>>> names, second = precursors.read()
>>> dict(zip(names, second.tolist(), strict=True))
{'grad_norm/w': 4.0, 'unmoved': 0.0, 'update_ratio/w': 0.5}

Everything is measured on a sample of each weight matrix, evenly spaced, in one tensor for all: the number of operations
does not grow with the model, nothing waits for the device, and the memory is a few hundred numbers per matrix. Biases
and gains are left out: they begin at zero or one, and an update of their own size is nothing special there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..tensors import local_values

SAMPLE = 256
"""Elements of each matrix; one that has no more is measured whole."""
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
_TINY = 1e-24


class Precursors:
    """Reads weight matrices, their gradients and second moments; the numbers stay on the device."""

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], optimizers: Sequence[Optimizer], size: int = SAMPLE
    ) -> None:
        self._size = size
        self._all = [(n, p) for n, p in parameters if p.dim() >= 2 and p.is_floating_point() and p.requires_grad]
        self._optimizers = optimizers
        self._before: Tensor | None = None
        self._segments: dict[tuple[str, ...], _Segments] = {}

    def forget(self) -> None:
        """What was read last is not the state before the next update."""
        self._before = None

    @torch.no_grad()
    def read(self, *, gradients: bool = True) -> tuple[list[str], Tensor] | None:
        """Names, and one tensor of their values; None for a model without weight matrices.

        ``grad_norm/…`` is estimated from the sample and ``g2_over_v/…`` is the mean of g²/v, for the gradients as they
        are now; without ``gradients`` they are left out (they may still be scaled). ``update_ratio/…`` is ‖Δw‖/‖w‖ of
        what happened between this read and the last one, and ``unmoved`` the share of elements that did not change.
        """
        every = [(n, p) for n, p in self._all if local_values(p).numel()]
        if not every:
            return None
        device = every[0][1].device
        keys: list[str] = []
        values: list[Tensor] = []
        found = [(n, p, g) for n, p in every if (g := p.grad) is not None and g.layout == torch.strided]
        if gradients and found:
            part = self._segments_of([(n, p) for n, p, _ in found], device)
            squares = self._joined([g for _, _, g in found], device).square()
            mean = part.sums(squares) / part.counts
            keys += [f"grad_norm/{n}" for n, _, _ in found]
            values.append((mean * part.sizes).sqrt())
            moments = [m for _, p, _ in found if (m := self._second_moment(p)) is not None]
            if len(moments) == len(found):
                v = self._joined([m for m, _ in moments], device)
                unbiased = v / torch.stack([c for _, c in moments]).to(device, non_blocking=True)[part.ids]
                keys += [f"g2_over_v/{n}" for n, _, _ in found]
                values.append(part.sums(squares / unbiased.clamp_min(_TINY)) / part.counts)
        weights = self._joined([p for _, p in every], device)
        before, self._before = self._before, weights
        if before is not None and before.shape == weights.shape:
            part = self._segments_of(every, device)
            change = weights - before
            keys += ["unmoved", *(f"update_ratio/{n}" for n, _ in every)]
            values.append((change == 0).float().mean().reshape(1))
            values.append((part.sums(change.square()) / part.sums(before.square()).clamp_min(_TINY)).sqrt())
        return (keys, torch.cat(values)) if values else None

    def _joined(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        return torch.cat([self._sample(t).to(device, torch.float32) for t in tensors])

    def _sample(self, tensor: Tensor) -> Tensor:
        values = local_values(tensor.detach()).reshape(-1)
        return values[:: -(-values.numel() // self._size)]

    def _segments_of(self, named: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> _Segments:
        key = tuple(n for n, _ in named)
        if key not in self._segments:
            self._segments[key] = _Segments(
                [self._sample(p).numel() for _, p in named], [local_values(p).numel() for _, p in named], device
            )
        return self._segments[key]

    def _second_moment(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor] | None:
        """The running mean of squared gradients, and what it is short of by having begun at zero."""
        for optimizer in self._optimizers:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key in _SECOND_MOMENTS:
                moment = state.get(key)
                if isinstance(moment, Tensor) and moment.shape == parameter.shape:
                    return moment, _correction(optimizer, state)
        return None


class _Segments:
    """Which elements of a joined sample belong to which tensor."""

    def __init__(self, lengths: list[int], sizes: list[int], device: torch.device) -> None:
        self.ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        self.counts = torch.tensor(lengths, dtype=torch.float32, device=device)
        self.sizes = torch.tensor(sizes, dtype=torch.float32, device=device)

    def sums(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.counts).index_add_(0, self.ids, values)


def _correction(optimizer: Optimizer, state: dict[str, Any]) -> Tensor:
    """Computed where the counter is, so that nothing waits for it."""
    betas, step = optimizer.defaults.get("betas"), state.get("step")
    if betas is None or not isinstance(step, Tensor):
        return torch.ones(())
    short = 1.0 - betas[1] ** step.detach().float().reshape(())
    return torch.where(short > 0, short, 1.0)

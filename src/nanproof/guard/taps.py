"""Named checkpoints inside a forward pass.

    h = nanproof.tap("mhc.read_out", h, alpha=self.alpha)

Outside a guarded step a tap returns its tensor and does nothing else.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from ..records import TensorFacts

log = logging.getLogger("nanproof")
_listening: Taps | None = None


def tap(name: str, tensor: Tensor, **extra: Tensor | float) -> Tensor:
    """Mark a place in a forward pass; in an incident it is listed with shape, NaN/Inf counts, finite range and extras.

    >>> import torch
    >>> tap("block.out", torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    # compiled code must not break its graph for us; the eager replay of an incident hears its taps
    if _listening is not None and not torch.compiler.is_compiling():
        _listening.record(name, tensor, extra)
    return tensor


class Taps:
    """What the taps of the current step saw; statistics stay on the device until somebody asks."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, tuple[int, ...], str, Tensor, dict[str, Tensor | float]]] = []
        self._muted = False

    def listen(self) -> None:
        global _listening
        _listening = self

    def stop(self) -> None:
        global _listening
        if _listening is self:
            _listening = None

    def clear(self) -> None:
        """A new forward pass begins."""
        self._seen.clear()
        self._muted = False

    def mute(self) -> None:
        """Keep what the bad pass saw; its replays pass the same taps."""
        self._muted = True

    def record(self, name: str, tensor: Tensor, extra: dict[str, Tensor | float]) -> None:
        """Take the statistics of one tensor; a failure of ours must not end the model's forward pass."""
        if self._muted:
            return
        try:
            self._measure(name, tensor, extra)
        except Exception as error:
            self._muted = True
            log.error("nanproof: guard-failed, tap %s: %s: %s", name, type(error).__name__, error)

    @torch.no_grad()
    def _measure(self, name: str, tensor: Tensor, extra: dict[str, Tensor | float]) -> None:
        x = tensor.detach()
        x = torch.view_as_real(x) if x.is_complex() else x
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if x.numel() == 0:
            return
        x = x.float() if x.element_size() < 4 or not x.is_floating_point() else x
        finite = torch.isfinite(x)
        stats = torch.stack(
            [
                torch.isnan(x).sum(),
                (x == math.inf).sum(),
                (x == -math.inf).sum(),
                torch.where(finite, x, math.inf).amin(),
                torch.where(finite, x, -math.inf).amax(),
            ]
        )
        copied = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in extra.items()}
        self._seen.append((name, shape, dtype, stats, copied))

    def facts(self) -> tuple[TensorFacts, ...]:
        """All of it, in order."""
        found = []
        for name, shape, dtype, stats, extra in self._seen:
            nan, posinf, neginf, low, high = stats.double().tolist()  # host sync: incident path only
            values: dict[str, float] = {}
            for key, value in extra.items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    values |= {f"{key}.min": float(value.min()), f"{key}.max": float(value.max())}
                else:
                    values[key] = float(value)
            found.append(
                TensorFacts(
                    name=name,
                    shape=shape,
                    dtype=dtype,
                    nan=int(nan),
                    posinf=int(posinf),
                    neginf=int(neginf),
                    finite_min=low if math.isfinite(low) else None,
                    finite_max=high if math.isfinite(high) else None,
                    extra=values,
                )
            )
        return tuple(found)

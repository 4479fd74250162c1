"""What a choice of formats costs in memory, counted per parameter.

>>> bytes_of(WAYS["fp32"], 892_000_000) / 1e9
14.272

Weights, gradients, Adam's two moments, and the copies that mixed precision keeps; activations come on top and shrink
by up to half in 16 bits. Frozen parameters (LoRA) have weights only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes per trained parameter."""

    weights: int
    gradients: int
    moments: int
    copies: int = 0
    """The 16-bit copies of the weights that autocast caches, or fp32 master weights."""

    @property
    def all(self) -> int:
        return self.weights + self.gradients + self.moments + self.copies

    def __str__(self) -> str:
        copies = f" + copies {self.copies}" if self.copies else ""
        return f"{self.all} B: weights {self.weights} + gradients {self.gradients} + Adam {self.moments}{copies}"


WAYS = {
    "fp32": Bytes(weights=4, gradients=4, moments=8),
    "bf16 autocast": Bytes(weights=4, gradients=4, moments=8, copies=2),
    "fp16 autocast + scaler": Bytes(weights=4, gradients=4, moments=8, copies=2),
    "bf16 weights": Bytes(weights=2, gradients=2, moments=4),
    "fp16 weights": Bytes(weights=2, gradients=2, moments=4),
    "16-bit weights + fp32 master": Bytes(weights=2, gradients=2, moments=8, copies=4),
}


def bytes_of(way: Bytes, parameters: int, trainable: int | None = None) -> int:
    """Bytes for a model of so many parameters, of which ``trainable`` are trained (default: all)."""
    trained = parameters if trainable is None else min(trainable, parameters)
    return trained * way.all + (parameters - trained) * way.weights


def show_bytes(count: int) -> str:
    """
    >>> show_bytes(14_272_000_000)
    '14.3 GB'
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"

"""What some training steps were like: the record that the checks judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .chance import Chance
from .layers import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the steps were like, in host numbers; the checks judge this and nothing else."""

    losses: tuple[float, ...]
    """One before each step, and one after the last."""
    norms: tuple[float, ...]
    """Of the gradients that the optimizer received: after the script's own clipping."""
    unclipped: tuple[float, ...] = ()
    """The same before clipping, where the script clips."""
    chance: Chance = field(default_factory=Chance)
    layers: tuple[Layer, ...] = ()
    bad_at_start: tuple[str, ...] = ()
    bad_gradients: tuple[str, ...] = ()
    """What was not finite in the first backward pass, in words."""
    without_gradient: tuple[str, ...] = ()
    unmoved: tuple[str, ...] = ()
    largest_move: float = 0.0
    """The largest change of a parameter over all steps, relative to its own norm."""
    zero_gradients: float = 0.0
    """The share of gradient values that are exactly zero, in parameters of half precision."""
    optimizer: str = ""
    eps: float | None = None
    parameters: int = 0
    trainable: int = 0
    watched: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Largest magnitude of the named parameters, before and after."""
    same_batch: bool = True
    """Whether every step had the same data, so that a loss that does not fall says something."""
    turns: tuple[str, ...] = ()
    """The parts whose optimizers take turns, each with a loss of its own; empty when there is one loss."""
    scaler: bool = False
    overflows: int = 0
    """Steps that a GradScaler left out while it looked for its scale."""
    stopped: str = ""
    """What went wrong so that fewer steps ran than were asked for."""
    short: str = ""
    """Why fewer steps ran, when nothing went wrong."""
    not_seen: Mapping[str, str] = field(default_factory=dict)
    """What of a script could not be watched, by name, and why."""

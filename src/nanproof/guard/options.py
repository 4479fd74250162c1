"""What can be set for a guard, in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .checks import at_least, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is measured besides loss and gradients.

    >>> Watch(modules=["blocks.*.attn"], every=25).every
    25
    """

    modules: Sequence[str] = ()
    """Patterns of module names whose outputs' largest magnitude is read, with its headroom to the dtype's maximum."""
    params: Sequence[str] = ()
    """Patterns of parameter names whose largest magnitude is read (gates, temperatures, scales); of weight matrices
    the log also has the norm, the gradient norm and the relative size of updates."""
    automatic: int = 8
    """How many module outputs are watched besides: those that have the least headroom in the first step. 0: none, and
    no weight matrices either."""
    every: int = 10
    """How often, in steps; the first ones and those under suspicion are all read."""
    chance: float | None = None
    """The loss of a model that has learned nothing; a run that stays there while gradients vanish is called dead."""
    still_after: int = 20
    """Warn when no parameter has changed over that many steps."""

    def __post_init__(self) -> None:
        for name in ("modules", "params"):  # one pattern is a pattern, not a row of letters
            if isinstance(pattern := getattr(self, name), str):
                object.__setattr__(self, name, (pattern,))
        numbers = {"watch.every": self.every, "watch.chance": self.chance, "watch.still_after": self.still_after}
        positive(("watch.chance",), **numbers)
        at_least(0, (), **{"watch.automatic": self.automatic})


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What is written down, and where it goes besides the run's folder.

    >>> Records(log_every=1).keep
    3
    """

    log_every: int = 50
    """Lines of the log that are written together; a bad step is written at once."""
    incident_bytes: int = 64 << 20
    """Tensors larger than this are left out of an incident's bundle."""
    keep: int = 3
    """How many checkpoints `Guard.save` keeps; the last good one is never deleted."""
    loggers: Sequence[Any] = ()
    """TensorBoard writers, MLflow clients, W&B or Trackio runs, or functions of (step, values)."""

    def __post_init__(self) -> None:
        positive(**{f"records.{name}": getattr(self, name) for name in ("log_every", "incident_bytes", "keep")})

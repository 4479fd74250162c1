"""What a loss is worth when the model knows nothing: read off the loss functions that a step calls.

>>> import torch
>>> with watch_chance() as seen:
...     loss = torch.nn.functional.cross_entropy(torch.randn(4, 10), torch.arange(4))
>>> seen.chance.words
'chance is 2.303 = ln 10'
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_CLASSES = {F.cross_entropy, F.nll_loss}
_BINARY = {F.binary_cross_entropy, F.binary_cross_entropy_with_logits}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """The loss of a model that has learnt nothing, when the loss function tells."""

    level: float | None = None
    why: str = ""
    summed: bool = False
    """Whether the loss function adds up, so that this is chance only if the step divides by the number of items."""

    @property
    def words(self) -> str:
        return f"chance is {self.level:.3f} = {self.why}" if self.level is not None else "chance level unknown"


@dataclass
class Seen:
    """What was called so far."""

    levels: list[Chance] = field(default_factory=list)

    @property
    def chance(self) -> Chance:
        """Known when the step computes one such loss; of several nobody knows the weights."""
        kinds = {c.level: c for c in self.levels}
        return next(iter(kinds.values())) if len(kinds) == 1 else Chance()


class _Watch(TorchFunctionMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _level(func, args, kwargs or {})
        if found is None:
            return func(*args, **(kwargs or {}))
        self._seen.levels.append(found)
        with torch._C.DisableTorchFunction():  # cross_entropy calls nll_loss: one loss, not two
            return func(*args, **(kwargs or {}))


def _level(func: Any, args: Any, kwargs: dict[str, Any]) -> Chance | None:
    if func not in _CLASSES and func not in _BINARY and func is not F.mse_loss:
        return None
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("mean", "sum"):
        return None
    summed = reduction == "sum"
    given = args[0] if args else kwargs.get("input")
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if not isinstance(given, Tensor) or not isinstance(target, Tensor):
        return None
    if func in _CLASSES:
        classes = given.shape[1] if given.ndim > 1 else given.shape[0]
        return Chance(level=math.log(classes), why=f"ln {classes:,}", summed=summed) if classes > 1 else None
    if func in _BINARY:
        return Chance(level=math.log(2), why="ln 2", summed=summed)
    spread = float(target.detach().double().var(correction=0)) if target.numel() > 1 else 0.0  # host sync: once
    if not math.isfinite(spread) or spread <= 0:
        return None
    return Chance(level=spread, why="the variance of the target", summed=summed)


@contextmanager
def watch_chance() -> Iterator[Seen]:
    """Watch which losses are computed inside the block."""
    seen = Seen()
    with _Watch(seen):
        yield seen

"""Whether what a script is about to save is a training state that has gone bad.

Only training state counts: a cache of features or a mask may hold NaN and infinities as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..guard.training import Training
from ..records import TensorFacts
from ..tensors import is_finite, nonfinite

_WRAPPERS = ("module.", "_orig_mod.")


def find_poison(value: Any, training: Training) -> TensorFacts | None:
    """The first tensor of a training state within ``value`` that is not finite."""
    names = set(_plain_names(training))
    for name, tensor in _states(value, names):
        if is_finite(tensor) or any(training.is_intentional(n) for n in _spellings(name, training)):
            continue
        return nonfinite(name, tensor)
    return None


def _plain_names(training: Training) -> Iterator[str]:
    """The names that a state dict of the model, or of one of several models, would have."""
    for name, _ in [*training.model.named_parameters(), *training.buffers()]:
        yield _bare(name)
        if len(training.roots) > 1:
            yield _bare(name.partition(".")[2])


def _spellings(name: str, training: Training) -> list[str]:
    return [n for n, _ in training.buffers() if _bare(n) == _bare(name)]


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _states(value: Any, names: set[str], depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of what looks like the state of a model or an optimizer."""
    if isinstance(value, nn.Module):
        yield from value.state_dict().items()
    elif isinstance(value, Optimizer):
        yield from _moments(value.state_dict()["state"])
    elif isinstance(value, Mapping):
        if "param_groups" in value and isinstance(value.get("state"), Mapping):
            yield from _moments(value["state"])
            return
        if any(isinstance(k, str) and _bare(k) in names for k in value):
            yield from ((str(k), v) for k, v in value.items() if isinstance(v, Tensor))
        if depth < 6:
            for item in value.values():
                yield from _states(item, names, depth + 1)
    elif isinstance(value, list | tuple) and depth < 6:
        for item in value:
            yield from _states(item, names, depth + 1)


def _moments(state: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    for number, entries in state.items():
        if isinstance(entries, Mapping):
            yield from ((f"optimizer state {number}.{k}", v) for k, v in entries.items() if isinstance(v, Tensor))

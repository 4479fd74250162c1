"""Averages of the weights that a script computes itself: nobody calls them by a known name, so they are watched.

``for a, p in zip(average.parameters(), model.parameters()): a.lerp_(p, 0.01)`` runs after a skipped step too, and takes
unchanged weights in. That does no harm, but it is not what a run without the batch would have done, so it is said.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..collector import objects
from ..guard.training import Training
from ..tensors import has_memory, local_values

TRIES, SAMPLED, VALUES = 5, 4, 512
LARGEST = 100_000
"""Containers with more entries are no state of a model."""


@dataclass(frozen=True)
class _State:
    """Some values of the model's own tensors at a skipped step, and of everything that looks like a copy of them."""

    shapes: list[torch.Size]
    addresses: set[int]
    chosen: list[int]
    weights: Tensor
    copies: list[Tensor]

    def find(self, homes: list[tuple[Any, list[Tensor]]]) -> list[tuple[Any, Tensor]]:
        """What looks like a copy now, each with its values."""
        found = [(home, ts) for home, ts in homes if [t.shape for t in ts] == self.shapes]
        own = self.addresses
        return [(home, _sample(ts, self.chosen)) for home, ts in found if own.isdisjoint(t.data_ptr() for t in ts)]


class OwnAverages:
    """Looks, after a skipped step, for whatever moves towards the weights although these have not moved."""

    def __init__(self) -> None:
        self._left = TRIES
        self._states: list[_State] = []

    def skipped(self, training: Training) -> None:
        """A step was not carried out: remember everything that looks like a copy of the model."""
        if not self._left:
            return
        self._left -= 1
        self._states = [_state(own) for root in training.roots for own in _states_of(root)]
        homes = self._homes()
        for state in self._states:
            state.copies.extend(values for _, values in state.find(homes))

    def look(self) -> str:
        """The next pass begins: the name of an average that has moved meanwhile, or nothing."""
        if not any(s.copies for s in self._states):
            return ""
        homes = self._homes()
        states, self._states = self._states, []
        for state in states:
            for home, now in state.find(homes):
                same = any(torch.equal(now, known) for known in (state.weights, *state.copies))
                if not same and any(_moved_towards(state.weights, before, now) for before in state.copies):
                    self._left = 0
                    return _name_of(home)
        return ""

    def _homes(self) -> list[tuple[Any, list[Tensor]]]:
        count = min((len(s.shapes) for s in self._states), default=LARGEST)
        return [(home, _tensors(home)) for home in _containers(count)]


def _state(own: list[Tensor]) -> _State:
    chosen = sorted(range(len(own)), key=lambda i: own[i].numel())[:SAMPLED]
    shapes, addresses = [t.shape for t in own], {t.data_ptr() for t in own}
    return _State(shapes, addresses, chosen, _sample(own, chosen), [])


def _states_of(root: nn.Module) -> list[list[Tensor]]:
    """What a script may keep an average of: all parameters, those that are trained, or the whole state."""
    parameters: list[Tensor] = list(root.parameters())
    whole = [v for v in root.state_dict().values() if isinstance(v, Tensor) and v.is_floating_point()]
    found: list[list[Tensor]] = [parameters, [p for p in parameters if p.requires_grad], whole]
    found = [ts for i, ts in enumerate(found) if ts and len(ts) not in map(len, found[:i])]
    return [ts for ts in found if all(has_memory(t) and type(t) in (nn.Parameter, Tensor) for t in ts)]


def _containers(count: int) -> Iterator[Any]:
    """Modules, and dictionaries and lists of tensors, that may hold so many tensors."""
    for found in objects():
        kind = type(found)
        if kind is list or kind is dict or kind is OrderedDict:
            if count <= len(found) < LARGEST:  # millions of objects come by here: one look at the first must do
                first = found[0] if kind is list else next(iter(found.values()))
                if type(first) in (nn.Parameter, Tensor):
                    yield found
        elif issubclass(kind, nn.Module):
            yield found


def _tensors(home: Any) -> list[Tensor]:
    """The tensors that correspond to parameters, in order."""
    if isinstance(home, nn.Module):
        return [p for p in home.parameters() if type(p) in (nn.Parameter, Tensor)]
    values = list(home.values() if isinstance(home, dict) else home)
    # a state dict also has counters, which nobody averages
    return [v for v in values if type(v) in (nn.Parameter, Tensor) and v.is_floating_point()]


def _moved_towards(weights: Tensor, before: Tensor, now: Tensor) -> bool:
    """Whether ``now`` lies on the way from ``before`` to ``weights``, the same share of it everywhere."""
    way, moved = weights - before, now - before
    length = float(way.square().sum())
    if not length or not bool(moved.any()):
        return False
    share = float((way * moved).sum()) / length
    left = float((moved - share * way).square().sum())
    return 0 < share < 1 and left < 1e-3 * float(moved.square().sum())


def _name_of(home: Any) -> str:
    main = next((k for k, v in vars(sys.modules["__main__"]).items() if v is home), "")
    if main:
        return main
    for holder in gc.get_referrers(home):
        held = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        for name, value in held.items() if isinstance(held, dict) else ():
            if value is home and isinstance(name, str):
                return name
    return type(home).__name__


def _sample(tensors: list[Tensor], chosen: list[int]) -> Tensor:
    flat = [local_values(tensors[i].detach()).reshape(-1) for i in chosen]
    return torch.cat([v[:: max(1, v.numel() // VALUES)].double().cpu() for v in flat])

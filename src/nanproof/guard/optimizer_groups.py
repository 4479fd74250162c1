"""Which optimizers step together, learned from the loop, and what is normal for each such group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .policy import History
from .training import Training
from .window import Window

Members = tuple[int, ...]
"""Optimizers by number."""


@dataclass
class OptimizerGroup:
    """Optimizers that step after the same backward passes, with the range of normal steps and the history of theirs."""

    members: Members
    optimizers: list[Optimizer]
    parameters: list[tuple[str, nn.Parameter]]
    window: Window
    history: History = field(default_factory=History)

    def state_dict(self) -> dict[str, Any]:
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.history).items()}
        return {"members": list(self.members), "window": self.window.state_dict(), "history": plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window.load_state_dict(state["window"])
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in state["history"].items()}
        self.history = History(**plain)


class OptimizerGroups:
    """All groups of a run; until the loop shows otherwise, all optimizers step together."""

    def __init__(self, training: Training, window: int) -> None:
        self._training, self._size = training, window
        self._known: dict[Members, OptimizerGroup] = {}
        self._of: dict[int, Members] = {}
        self.all = self.get(range(len(training.optimizers)))
        # single micro-batches scatter more than windows of them do: they have a range of their own
        self.micro = OptimizerGroup(
            members=(), optimizers=training.optimizers, parameters=training.parameters, window=Window(size=window)
        )
        self._known[()] = self.micro

    def get(self, members: Iterable[int]) -> OptimizerGroup:
        """The group of these optimizers."""
        key = tuple(sorted(members))
        if key not in self._known:
            t = self._training
            optimizers = [t.optimizers[i] for i in key]
            owned = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
            everything = len(key) == len(t.optimizers)
            self._known[key] = OptimizerGroup(
                members=key,
                optimizers=optimizers,
                parameters=t.parameters if everything else [(n, p) for n, p in t.parameters if id(p) in owned],
                window=Window(size=self._size),
            )
        return self._known[key]

    def of(self, number: int) -> OptimizerGroup:
        """Those that stepped with this one the last time; before that, all that are not known to step apart."""
        if number in self._of:
            return self.get(self._of[number])
        optimizers = self._training.optimizers
        others = [i for i, o in enumerate(optimizers) if i not in self._of and _has_gradients(o)]
        return self.get({number, *others})

    def learn(self, stepped: set[int]) -> None:
        """These have stepped after the same backward passes."""
        for number in stepped:
            self._of[number] = tuple(sorted(stepped))

    def clear(self) -> None:
        """Forget everything; the optimizers may go."""
        for group in self._known.values():
            group.optimizers = []
        self._known.clear()

    @property
    def several(self) -> bool:
        return len(set(self._of.values())) > 1

    def name(self, group: OptimizerGroup) -> str:
        """A group by the parts of the model that it trains."""
        return "+".join(self._name(i) for i in group.members)

    def _name(self, number: int) -> str:
        names = {n.partition(".")[0] for n, _ in self.get((number,)).parameters}
        return names.pop() if len(names) == 1 else str(number)

    def state_dict(self) -> list[dict[str, Any]]:
        return [g.state_dict() for g in self._known.values()]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        count = len(self._training.optimizers)
        for saved in state:
            if all(i < count for i in saved["members"]):
                self.get(saved["members"]).load_state_dict(saved)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for g in optimizer.param_groups for p in g["params"])

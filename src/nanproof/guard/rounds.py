"""A foreign loop's step as the guard sees it: its passes, who steps after them, and which batch was which."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..tensors import is_finite, tensors_in
from .feed import Delivered
from .policy import History
from .seam import Seam
from .window import Window

Party = tuple[int, ...]
"""The optimizers, by number, that step after the same backward passes."""


@dataclass
class Pass:
    """One micro-batch: what went in, and the random states that its forward pass began with."""

    batch: Any = None
    """As whoever listens to the loop knows it."""
    delivered: Sequence[Delivered] = ()
    """What loaders handed out last; one of these may be the batch."""
    inputs: list[Any] = field(default_factory=list)
    """What went into each of the models."""
    seam: Seam = field(default_factory=Seam)
    random: dict[str, Any] = field(default_factory=dict)

    def name_batch(self) -> tuple[Any, str]:
        """The batch of this pass, and which it was in words: as delivered when that is sure, else what went in."""
        known = [t for _, t in tensors_in(self.seen)]
        for d in reversed(self.delivered):
            if not known or any(_equal(a, b) for a in known for _, b in tensors_in(d.batch)):
                return d.batch, d.about
        last = f"the loader's last batch was {self.delivered[-1].about}" if self.delivered else ""
        return self.seen, last

    @property
    def seen(self) -> Any:
        """The batch, as far as it went by."""
        if self.batch is not None or not self.inputs:
            return self.batch
        return self.inputs[0] if len(self.inputs) == 1 else self.inputs

    @property
    def copied(self) -> Any:
        """What went in, if it is not the named batch itself but was moved or converted on the way."""
        mine = {id(t) for _, t in tensors_in(self.name_batch()[0])}
        return None if any(id(t) in mine for _, t in tensors_in(self.inputs)) else self.seen

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is about to run: keep what goes in, by name or in order."""
        named = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
        self.inputs.append(named if kwargs else args[0] if len(args) == 1 else args)
        self.seam.before(module, args, kwargs)

    @property
    def bad_input(self) -> bool:
        return any(not is_finite(t) for _, t in tensors_in(self.name_batch()[0]))


@dataclass
class Decision:
    """One verdict on the gradients of a party of optimizers."""

    members: Party
    go: bool
    stepped: set[int] = field(default_factory=set)


@dataclass
class Round:
    """One or more forward and backward passes, and the steps that follow them."""

    scaler: Any
    divided: bool
    began: bool = False
    """Whether its first forward pass was seen, so that it can be undone."""
    forward: bool = False
    """Whether a forward pass has begun whose backward pass has not."""
    passes: list[Pass] = field(default_factory=list)
    losses: list[Pass] = field(default_factory=list)
    """The pass of each loss that was met."""
    backwards: int = 0
    decisions: list[Decision] = field(default_factory=list)

    def culprit(self, bad: Sequence[str]) -> Pass | None:
        """The pass that a bad step is to be blamed on, given the names of what was bad; None when it is not clear."""
        if len(self.passes) == 1:
            return self.passes[0]
        named = [b.removeprefix("loss:micro-batch ") for b in bad if b.startswith("loss:micro-batch ")]
        if named:
            return self.losses[int(named[0])]
        return next((p for p in self.passes if p.bad_input), None)


class Parties:
    """Which optimizers step together, learned from the loop, and what is normal for each party of them."""

    def __init__(self, optimizers: list[Optimizer], window: Window, history: History) -> None:
        self._optimizers = optimizers
        self._of: dict[int, Party] = {}
        self._window = copy.deepcopy(window)
        self._memories: dict[Party, tuple[Window, History]] = {tuple(range(len(optimizers))): (window, history)}

    def of(self, number: int) -> Party:
        """Those that stepped with this one the last time; before that, all that are not known to step apart."""
        if number in self._of:
            return self._of[number]
        others = [i for i, o in enumerate(self._optimizers) if i not in self._of and _has_gradients(o)]
        return tuple(sorted({number, *others}))

    def learn(self, stepped: set[int]) -> None:
        for number in stepped:
            self._of[number] = tuple(sorted(stepped))

    @property
    def several(self) -> bool:
        return len(set(self._of.values())) > 1

    def memory(self, members: Party) -> tuple[Window, History]:
        """The range of normal losses and norms, and the history, of a party."""
        if members not in self._memories:
            fresh = copy.deepcopy(self._window)
            fresh.clear()
            self._memories[members] = (fresh, History())
        return self._memories[members]

    def keep(self, members: Party, window: Window, history: History) -> None:
        self._memories[members] = (window, history)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for g in optimizer.param_groups for p in g["params"])


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included; incident path only."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype or a.numel() == 0 or a.layout != torch.strided:
        return False
    return bool(torch.equal(*(t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b))))

"""Who trains in this process: optimizers, schedules and scalers as the script makes them, and their models."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..guard.guard import guard_of
from ..guard.hooks import Hook
from .module_lookup import Loose, find_owners, leaves_of, name_owners, parameters_of


class Registry:
    """Remembers them without holding on to them, and says when one of their models is about to run."""

    def __init__(self, on_forward: Callable[[nn.Module, Any, Any], None]) -> None:
        self._on_forward = on_forward
        self._count = itertools.count()
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Those that are alive, numbered in the order of their making."""
        self._passed_over: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.triggers: list[RemovableHandle] = []
        self._known: set[int] = set()
        """Parameters whose owner has a trigger."""
        self.copied: set[int] = set()
        """Parameters of a model whose master weights an optimizer steps."""

    def add(self, optimizer: Optimizer) -> None:
        self._optimizers.setdefault(optimizer, next(self._count))

    def watch_owners(self, optimizer: Optimizer) -> None:
        """Let the next forward pass of an optimizer's models be heard of."""
        parameters = parameters_of([optimizer])
        if all(id(p) in self._known for p in parameters):
            return
        for owner in find_owners(parameters):
            self._known |= {id(p) for p in owner.parameters()}
            self.watch(owner)

    def watch(self, module: nn.Module) -> None:
        # first of all hooks: FSDP's own would have exchanged the parameters
        hook = Hook(self._on_forward)
        self.triggers.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def drop_triggers(self) -> None:
        for trigger in self.triggers:
            trigger.remove()
        self.triggers.clear()
        self._known.clear()

    def pass_over(self, optimizers: list[Optimizer]) -> None:
        """Leave these alone from now on."""
        self._passed_over.update(optimizers)

    def is_passed_over(self, optimizer: Optimizer) -> bool:
        return optimizer in self._passed_over

    @property
    def optimizers(self) -> list[Optimizer]:
        """All that are alive."""
        return list(self._optimizers)

    @property
    def guardable(self) -> list[Optimizer]:
        """The optimizers whose steps can be vetoed, in the order of their making."""
        found = [o for o in self._optimizers if o not in self._passed_over]
        return sorted(found, key=lambda o: self._optimizers[o])

    @property
    def unguarded(self) -> list[Optimizer]:
        """Those of them that are not under an open guard."""
        return [o for o in self.guardable if guard_of(o) is None]

    def assemble(self, optimizers: list[Optimizer], losses: Any = ()) -> dict[str, Any]:
        """What a guard is made of: the models that own the parameters, their schedules, the scaler if there is one.

        Master weights are copies that no model holds; then it is the losses that lead to the model.
        """
        parameters = parameters_of(optimizers)
        owners = find_owners(parameters)
        held = {id(p) for m in owners for p in m.parameters()}
        loose = [p for p in parameters if id(p) not in held]
        if loose:
            leaves = [p for p in leaves_of(losses) if id(p) not in held]
            if {id(p) for p in loose}.isdisjoint(map(id, leaves)):
                owners += find_owners(leaves)
                self.copied |= {id(p) for p in leaves}
            owners.append(Loose(loose))
        enabled = [s for s in self.scalers if s.is_enabled()]
        return {
            "model": owners[0] if len(owners) == 1 else nn.ModuleDict(name_owners(owners)),
            "optimizer": optimizers,
            "scheduler": [s for s in self.schedulers if any(getattr(s, "optimizer", None) is o for o in optimizers)],
            "scaler": enabled[0] if len(enabled) == 1 else None,
        }

    def has_scheduler(self, optimizer: Optimizer) -> bool:
        return any(getattr(s, "optimizer", None) is optimizer for s in self.schedulers)

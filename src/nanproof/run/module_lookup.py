"""Finding the modules that own an optimizer's parameters: a script hands over parameters, not models."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..collector import objects

_AVERAGE = re.compile(r"EMA|Ema(?![a-z])|Averag|SWA")
"""How classes are called that average a model's weights."""
NODES = 50_000
"""So much of a graph is walked at most."""


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [p for o in optimizers for g in o.param_groups for p in g["params"]]


def find_owners(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The outermost living modules that hold these parameters: wrappers rather than what they wrap.

    >>> inner = nn.Linear(2, 2); outer = nn.Sequential(inner)
    >>> [type(m).__name__ for m in find_owners([inner.weight])]
    ['Sequential']
    """
    wanted = {id(p) for p in parameters}
    # by type, not isinstance: lazy proxies would be woken up by a look at their __class__
    modules = [o for o in objects() if issubclass(type(o), nn.Module)]
    children = {id(c) for m in modules for c in vars(m).get("_modules", {}).values() if c is not None}
    roots = [m for m in modules if id(m) not in children and "_modules" in vars(m)]
    found = []
    for root in roots:
        held = {id(p) for p in root.parameters()} & wanted
        if held:
            trained = _trained_in(root, held)
            found.append((len(held), trained is root, trained))
    # of several that hold the same parameters, those that hold most: a wrapper is one of them, a part is not
    chosen: list[nn.Module] = []
    for _, _, root in sorted(found, key=lambda f: f[:2], reverse=True):
        held = {id(p) for p in root.parameters()} & wanted
        if held:
            chosen.append(root)
            wanted -= held
    return chosen


def _trained_in(root: nn.Module, wanted: set[int]) -> nn.Module:
    """The module itself, or of an average that holds the model beside its copy, the model."""
    if not _AVERAGE.search(type(root).__name__):
        return root
    ids = {part: {id(p) for p in part.parameters()} for part in root.children()}
    trained = [part for part, own in ids.items() if own & wanted]
    copies = [part for part, own in ids.items() if own and own.isdisjoint(wanted)]
    whole = len(trained) == 1 and wanted <= ids[trained[0]]
    return trained[0] if whole and any(_shapes(c) == _shapes(trained[0]) for c in copies) else root


def _shapes(module: nn.Module) -> list[Any]:
    return [p.shape for p in module.parameters()]


def leaves_of(losses: Any) -> list[Tensor]:
    """The leaf tensors that a backward pass from these losses reaches.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> [t is w for t in leaves_of((w * 2).sum())]
    [True]
    """
    given = [losses] if isinstance(losses, Tensor) else [t for t in losses if isinstance(t, Tensor)]
    waiting: list[Any] = [t.grad_fn for t in given if t.grad_fn is not None]
    seen, found = set(waiting), list[Tensor]()
    while waiting and len(seen) < NODES:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def name_owners(owners: list[nn.Module]) -> dict[str, nn.Module]:
    """The owners under the names that the script gives them, or those of their classes."""
    given = {id(v): k for k, v in vars(sys.modules["__main__"]).items() if isinstance(v, nn.Module)}
    named: dict[str, nn.Module] = {}
    for module in owners:
        name = base = given.get(id(module), type(module).__name__)
        number = 2
        while name in named or not name.isidentifier() or hasattr(nn.ModuleDict, name):
            name, number = f"{base}_{number}", number + 1
        named[name] = module
    return named


class Loose(nn.Module):
    """Parameters that no module holds, under made-up names, so that a guard can speak of them."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        held: dict[str, Any] = self._parameters  # past the check of types: plain leaf tensors are welcome too
        held.update({f"parameter_{i}": p for i, p in enumerate(parameters)})

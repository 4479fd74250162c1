"""Hooks on modules and tensors that can only watch: a failure of theirs does not end the pass, copies do nothing.

A guarded model may be copied (averaged weights begin as a copy) or pickled; the guard must not go with it.

>>> import copy
>>> from torch import nn
>>> calls = []
>>> model = nn.Identity(); _ = model.register_forward_hook(Hook(lambda *_: calls.append("forward")))
>>> copied = copy.deepcopy(model)
>>> _ = copied(1), model(1)
>>> calls
['forward']
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class Hook:
    """Forwards the call, and tells ``failed`` when it raises; a no-op once copied or pickled."""

    def __init__(self, call: Callable[..., Any], failed: Callable[[Exception], object] | None = None) -> None:
        self._call, self._failed = call, failed

    def __call__(self, *args: Any) -> Any:
        try:
            return None if transforming() else self._call(*args)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)
            return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(_nothing)

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., None]]]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    return None


def unwatched(error: Exception) -> None:
    """For `Hook`: a module that cannot be watched is not; its forward pass goes on."""


def transforming() -> bool:
    """Whether torch.func is computing: weights and values are stand-ins then, without memory, and end with it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def anything_compiled() -> bool:
    """Whether torch has compiled code in this process: it would be compiled again when hooks come and go."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


@contextmanager
def removed(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """A block in which hooks are not there at all, so that a model pickled in it does not contain them."""
    taken = []
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            taken.append((hooks, handle.id, hooks.pop(handle.id)))
    try:
        yield
    finally:
        for hooks, number, hook in taken:
            hooks[number] = hook

"""Hooks on modules that hear for somebody, and are deaf in copies of the module.

A model that is guarded may be copied (averaged weights begin as a copy) or pickled; the guard must not go with it.

>>> import copy
>>> from torch import nn
>>> heard = []
>>> model = nn.Identity(); _ = model.register_forward_hook(Ear(lambda *_: heard.append("a pass")))
>>> copied = copy.deepcopy(model)
>>> _ = copied(1), model(1)
>>> heard
['a pass']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle


class Ear:
    """Hands on what it hears."""

    def __init__(self, hear: Callable[..., Any]) -> None:
        self._hear = hear

    def __call__(self, *heard: Any) -> Any:
        return self._hear(*heard)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ear:
        return Ear(_nothing)

    def __reduce__(self) -> tuple[type[Ear], tuple[Callable[..., None]]]:
        return Ear, (_nothing,)


def _nothing(*_: Any) -> None:
    return None


@contextmanager
def taken_off(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """A block in which hooks are not there at all, so that a file written in it does not speak of them."""
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

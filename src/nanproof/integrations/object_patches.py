"""Methods replaced on single objects, for as long as a guard needs them.

>>> class Trainer:
...     def save(self): return "saved"
>>> trainer, patches = Trainer(), ObjectPatches()
>>> patches.put(trainer, "save", lambda original: lambda: original() + ", checked")
>>> trainer.save(), Trainer().save()
('saved, checked', 'saved')
>>> patches.undo(); trainer.save()
'saved'
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ..guard.data import DataSource
from ..guard.external import ExternalLoop

_MISSING = object()


class ObjectPatches:
    """Remembers what was there before."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put ``make(original)`` in front of a method of this one object."""
        original = getattr(owner, name)
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, functools.wraps(original)(make(original)))

    def undo(self) -> None:
        """Give every object its own methods back."""
        for owner, name, before in reversed(self._undo):
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._undo.clear()

    def watch_optimizer(self, optimizer: Any, loop: ExternalLoop) -> None:
        """Ask the guard before each step of a torch optimizer."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def step(closure: Callable[[], Any] | None = None, **rest: Any) -> Any:
                return loop.step(optimizer, functools.partial(original, **rest), closure)

            return step

        self.put(optimizer, "step", make)

    def watch_loader(self, loader: Any, source: DataSource) -> None:
        """Remember the batches of a torch loader as they are handed out, and which samples they are made of."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def get_iterator() -> Any:
                iterator = original()
                # no reference to itself: its workers end when nobody holds it any more
                kind, own = type(iterator), weakref.ref(iterator)
                iterator._next_data = lambda: source.pass_on(own(), kind._next_data(own()))
                if loader.num_workers == 0:  # workers have drawn the first indices by now
                    iterator._next_index = lambda: source.asked(own(), kind._next_index(own()))
                return iterator

            return get_iterator

        self.put(loader, "_get_iterator", make)

    def watch_scaler(self, scaler: Any, loop: ExternalLoop) -> None:
        """Leave vetoed steps out of a GradScaler's own decisions, and let it take the scale that the guard says."""

        def make_step(original: Callable[..., Any]) -> Callable[..., Any]:
            def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                if loop.judge(optimizer):
                    return original(optimizer, *args, **kwargs)
                loop.left(optimizer)
                return None

            return step

        def make_update(original: Callable[..., Any]) -> Callable[..., Any]:
            def update(new_scale: Any = None) -> None:
                held = loop.held_scale(scaler)
                original(new_scale if new_scale is not None else held)

            return update

        self.put(scaler, "step", make_step)
        self.put(scaler, "update", make_update)

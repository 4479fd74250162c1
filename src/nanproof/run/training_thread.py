"""The thread that trains under the guard.

>>> from concurrent.futures import ThreadPoolExecutor
>>> trains = TrainingThread()
>>> trains.enter()
True
>>> with ThreadPoolExecutor() as pool:
...     pool.submit(trains.enter).result()
False

A thread that comes after a step was ended takes over: a pool may run each step in another one.

>>> trains.ended()
>>> with ThreadPoolExecutor() as pool:
...     pool.submit(trains.enter).result()
True
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

WHY = (
    "another thread trains under the guard at the same time, and the steps of two cannot be told apart. Next: train in"
    " processes, or one after the other"
)


class TrainingThread:
    """Tells the one from others that train at the same time."""

    def __init__(self, is_open: Callable[[], bool] = lambda: False) -> None:
        """``is_open``: whether a forward pass was seen whose step is not decided about."""
        self._is_open = is_open
        self._thread: threading.Thread | None = None
        self._in_step = False
        self._apart: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """A forward or backward pass begins; whether it is that thread's."""
        here = self.here(enter=True)
        self._in_step = self._in_step or here
        return here

    def ended(self) -> None:
        """A step is over."""
        self._in_step = False

    def here(self, *, enter: bool = False) -> bool:
        """Whether the caller is that thread."""
        thread = threading.current_thread()
        if thread is self._thread or isinstance(thread, threading._DummyThread):
            return True  # the other ones are autograd's own, within a backward pass
        with self._lock:
            alone = self._thread is None or not self._thread.is_alive()
            if alone or (thread not in self._apart and not self._in_step and not self._is_open()):
                self._thread, self._in_step = thread, enter
                return True
            self._apart.add(thread)
            return False

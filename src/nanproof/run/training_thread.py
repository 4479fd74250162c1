"""The thread that trains under the guard.

>>> from concurrent.futures import ThreadPoolExecutor
>>> trains = TrainingThread(lambda: True)  # a step is always open here
>>> trains.here()
True
>>> with ThreadPoolExecutor() as pool:
...     pool.submit(trains.here).result()
False

A thread that comes while no step is open takes over: a pool may run each step in another one.
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

    def __init__(self, is_open: Callable[[], bool]) -> None:
        """``is_open``: whether a step has begun and is not decided yet."""
        self._is_open = is_open
        self._thread: threading.Thread | None = None
        self._apart: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def here(self) -> bool:
        """Whether the caller is that thread."""
        thread = threading.current_thread()
        if thread is self._thread or isinstance(thread, threading._DummyThread):
            return True  # the other ones are autograd's own, within a backward pass
        if self._thread is None or not self._thread.is_alive() or (thread not in self._apart and not self._is_open()):
            self._thread = thread
            return True
        self._apart.add(thread)
        return False

"""Bounds for replays on other values than the step had.

A value that was repaired, rounded otherwise or filled with NaN may be the step or the bound of a loop that then never
ends. Such a replay is ended: after many times the operations of the original, or, where a loop does none, in time.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SECONDS = 300.0
"""For a replay of which nothing else says how long it may take."""
AGAIN_SECONDS = 1.0
"""The code that is ended may catch what ends it: it is told again."""
_POLL = 0.0005


class Endless(BaseException):
    """Ends a replay that runs on and on; no user code should catch it."""


def most_operations(original: int) -> int:
    """How many operations a replay may run, given those of the original pass.

    >>> most_operations(50)
    1500
    """
    return 1000 + 10 * original


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of ``work``; `Endless` is raised in its Python code, wherever it is then, when it takes longer.

    >>> within(60, lambda: 1 + 1)
    2

    A call of compiled code cannot be ended: the exception waits until it returns. Nothing is raised after the return.
    """
    if math.isinf(seconds):
        return work()
    thread = threading.get_ident()
    wake = threading.Lock()
    wake.acquire()
    state = {"over": False, "watched": True, "raised": False}

    def watch() -> None:
        wait = max(seconds, 0.0)
        while not wake.acquire(timeout=min(wait, threading.TIMEOUT_MAX)) and not state["over"]:
            state["raised"] = True
            _raise_in(thread)
            wait = AGAIN_SECONDS
        state["watched"] = False

    # no `with`, no lock of Python's own classes: the exception may come at the beginning of any of their methods
    try:
        try:
            threading.Thread(target=watch, name="nanproof-replay", daemon=True).start()
        except RuntimeError:  # no more threads can be had
            state["watched"] = False
        return work()
    finally:
        last = False
        while True:
            try:
                state["over"] = True
                if wake.locked():
                    wake.release()
                while state["watched"]:
                    time.sleep(_POLL)
                last = True
                if state["raised"]:  # one may still wait: it is replaced by this one, and awaited here
                    _raise_in(thread)
                    while True:
                        time.sleep(_POLL)
                break
            except Endless:
                if last:
                    break


def _raise_in(thread: int) -> None:
    # never taken back with NULL: Python 3.11 then waits for it forever in code that is traced (a debugger, coverage)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Endless))

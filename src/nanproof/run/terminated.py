"""SIGTERM ends a program at once, as without nanproof; before that, its records are completed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..launch import rank_and_world


def before_sigterm(call: Callable[[], Any]) -> Callable[[], None]:
    """Call something before SIGTERM ends this process; what is returned undoes that.

    A program that handles the signal itself keeps its handler. One rank of several may be blocked in a collective,
    where no handler of Python's would run, so it gets none.
    """
    alone = rank_and_world()[1] == 1 and threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return lambda: None
    process = os.getpid()

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == process:
            with suppress(BaseException):  # whatever it interrupts, the process ends
                call()
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)

    def undo() -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return undo

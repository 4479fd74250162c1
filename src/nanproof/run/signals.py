"""SIGTERM and Ctrl-C end a program as they do without nanproof; before that, its records are completed."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def before_sigterm(call: Callable[[], Any], *, blocked: bool) -> Callable[[], None]:
    """Call something before SIGTERM ends this process; what is returned undoes that.

    A program that handles the signal itself keeps its handler. Where it may be ``blocked``, as one rank of several is
    in a collective, no handler of Python's would run in the main thread, so another thread waits for the signal.
    """
    if not _is_ours(signal.SIGTERM, signal.SIG_DFL):
        return lambda: None
    process, begun = os.getpid(), threading.Lock()

    def end(*_: object) -> None:
        if not begun.acquire(blocking=False):
            return
        if os.getpid() == process:
            with suppress(BaseException):  # whatever it interrupts, the process ends
                call()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        else:  # where Python's own call is not allowed
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    forget = _in_a_thread(end) if blocked else lambda: None

    def undo() -> None:
        if _is_ours(signal.SIGTERM, end):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            forget()

    return undo


def _in_a_thread(end: Callable[[], None]) -> Callable[[], None]:
    """Call ``end`` at SIGTERM, from a thread that reads the numbers of signals as they come."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait() -> None:
        with suppress(OSError):  # the program has closed it
            while number := os.read(read, 1):
                if number[0] == signal.SIGTERM:
                    end()

    threading.Thread(target=wait, name="nanproof-sigterm", daemon=True).start()

    def forget() -> None:
        now = signal.set_wakeup_fd(before)
        if now != write:  # an event loop has set its own meanwhile
            signal.set_wakeup_fd(now)

    return forget


@contextmanager
def heeding_ctrl_c() -> Iterator[None]:
    """A block in which no library can swallow Ctrl-C, as torch does while it loads NumPy."""
    if not _is_ours(signal.SIGINT, signal.default_int_handler):
        yield
        return
    pressed = []

    def interrupt(number: int, frame: Any) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed:
            raise KeyboardInterrupt


def heard_ctrl_c() -> None:
    """The program ends because of Ctrl-C: one more, such as torchrun's own, is ignored; the next ends it at once."""

    def ignore(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)

    if _is_ours(signal.SIGINT, signal.default_int_handler):
        signal.signal(signal.SIGINT, ignore)


def _is_ours(number: signal.Signals, handler: Any) -> bool:
    """Whether a signal can be handled from this thread, and is handled as nanproof knows it."""
    here = threading.current_thread() is threading.main_thread()
    return here and signal.getsignal(number) is handler

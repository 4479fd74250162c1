"""Progress of what takes longer than a second, on a terminal only: a bar, or a word about what is being done."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..text import console
from .shell import Screen

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def _is_wanted(screen: Screen) -> bool:
    return sys.stderr.isatty() and not screen.quiet and not screen.as_json


@contextmanager
def working(screen: Screen, words: str) -> Iterator[Callable[[str], None]]:
    """A block that says what it is doing once it has taken a second; what it yields changes the words."""
    if not _is_wanted(screen):
        yield lambda _: None
        return
    from rich.markup import escape

    place = console(err=True)
    status = place.status(escape(words), spinner="dots" if place.encoding.startswith("utf") else "line")
    timer = threading.Timer(1, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda now: status.update(escape(now))
    finally:
        timer.cancel()
        timer.join()  # never begin after the end
        status.stop()


class Bar:
    """Counts bytes; without a total it only shows that something moves."""

    def __init__(self, screen: Screen, title: str, total: int | None = None) -> None:
        self._wanted = _is_wanted(screen)
        self._title, self._total = title, total
        self._began, self._done = time.monotonic(), 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        return self

    def advance(self, count: int) -> None:
        self._done += count
        if not self._wanted or time.monotonic() - self._began < 1:
            return
        if self._bar is None:
            from rich.markup import escape
            from rich.progress import Progress

            self._bar = Progress(console=console(err=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(escape(self._title), total=self._total or None)
        assert self._task is not None
        self._bar.update(self._task, completed=self._done)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

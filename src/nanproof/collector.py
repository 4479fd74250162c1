"""Python's garbage collector, switched off for a while.

>>> import gc
>>> with without_collector():
...     gc.isenabled()
False
>>> gc.isenabled()
True
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Around work that makes many objects and no garbage, such as syntax trees."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def loading() -> Iterator[None]:
    """Around imports: what modules make stays to the end, so the collector need not look at it, now or later."""
    with without_collector():
        yield
        gc.freeze()

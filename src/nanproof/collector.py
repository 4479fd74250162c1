"""Python's garbage collector, switched off for a while, and what it knows.

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
from typing import Any


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


def objects(*generations: int) -> Iterator[Any]:
    """All objects that the collector knows, or those of some of its generations (0 and 1 are young).

    >>> class Kept: pass
    >>> kept = Kept()
    >>> sum(type(found) is Kept for found in objects())
    1

    Compare types, do not use `isinstance`: lazy proxies are woken up by a look at their class. The collector is off
    meanwhile: torch 2.7 warns when a storage is freed while somebody else holds its Python object.
    """
    with without_collector():
        for generation in generations or (None,):
            yield from gc.get_objects(generation=generation)

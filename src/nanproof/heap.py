"""Every object that the garbage collector knows, to find what nobody has told us about.

>>> class Kept: pass
>>> kept = Kept()
>>> sum(type(found) is Kept for found in objects())
1
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any


def objects(*generations: int) -> Iterator[Any]:
    """All objects, or those of some generations of the garbage collector; 0 and 1 are young.

    Compare their types, never use `isinstance`: lazy proxies are woken up by a look at their class. The collector is
    paused meanwhile: up to torch 2.9 a tensor must not be freed while somebody else holds on to its Python object.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        if generations:
            for generation in generations:
                yield from gc.get_objects(generation=generation)
        else:
            yield from gc.get_objects()
    finally:
        if was_on:
            gc.enable()

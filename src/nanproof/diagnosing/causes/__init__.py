"""The causes, one file each; a new one is a new file that defines ``CAUSE``, or an entry point of another package.

>>> from nanproof.diagnosing.causes import all_causes
>>> len(all_causes())
25
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from ...plugins import plugins
from ..cause import Cause


@functools.cache
def all_causes() -> tuple[Cause, ...]:
    """Every cause of this folder and of other packages, by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    found = [*(m.CAUSE for m in modules), *plugins("causes", Cause)]
    assert all(isinstance(c, Cause) for c in found)
    return tuple(sorted(found, key=lambda c: c.name))

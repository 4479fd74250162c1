"""Joins Python processes that a guarded program starts to its run; found first on their PYTHONPATH."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

sys.path[:] = [p for p in sys.path if Path(p) != Path(__file__).parent]
try:
    from nanproof.run.children import join

    join()
except Exception as error:  # another interpreter, or an environment without nanproof: it runs as it would without us
    sys.stderr.write(f"nanproof: process {os.getpid()} is not guarded: {type(error).__name__}: {error}\n")

# the interpreter imports one module of this name: the one that it would have found is next
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    sys.modules["sitecustomize"] = _next = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_next)

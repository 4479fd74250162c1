"""Joins Python processes that a guarded program starts to its run; found first on their PYTHONPATH."""

import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != _here]
try:
    from nanproof.run.children import join

    join()
except Exception as error:  # another interpreter, or an environment without nanproof: it runs as it would without us
    sys.stderr.write(f"nanproof: process {os.getpid()} is not guarded: {type(error).__name__}: {error}\n")

# the interpreter imports one module of this name: the one that would have been found is next
del sys.modules["sitecustomize"]
if importlib.util.find_spec("sitecustomize") is not None:
    import sitecustomize  # noqa: F401

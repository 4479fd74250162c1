"""Shared by all tests: one torch thread per worker, so that results do not depend on how many share a machine.

Examples are the same in every run; ``HYPOTHESIS_PROFILE=default pytest`` looks for new ones.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from nanproof.collector import loading

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("same", derandomize=True, deadline=None)  # no clock decides a test
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What collecting imports stays to the end: the collector would walk through it again and again."""
    with loading():
        return (yield)  # type: ignore[return-value]


@pytest.fixture(scope="module", autouse=True)
def _out_of_sight() -> None:
    """What earlier files have left is not looked at: a guarded run searches all objects for those of the loop."""
    gc.collect()
    gc.freeze()
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:  # a guard that finds compiled code in its process places no hooks that come and go
        dynamo.counters.clear()

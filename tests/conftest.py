"""Shared by all tests: one torch thread per worker, so that results do not depend on how many share a machine.

Examples are the same in every run; ``HYPOTHESIS_PROFILE=default pytest`` looks for new ones.
"""

from __future__ import annotations

import os
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

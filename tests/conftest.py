"""Shared by all tests: one torch thread per worker, so that results do not depend on how many share a machine.

Examples are the same in every run; ``HYPOTHESIS_PROFILE=default pytest`` looks for new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("same", derandomize=True, deadline=None)  # no clock decides a test
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

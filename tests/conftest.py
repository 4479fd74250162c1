"""Shared by all tests: one torch thread per worker, so that results do not depend on how many share a machine."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

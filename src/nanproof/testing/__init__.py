"""Tests that a model stays finite: two assertions and a pytest fixture.

    from nanproof.testing import assert_finite, assert_stable

    def test_training(finite_guard):        # fails when any module output or gradient becomes NaN or Inf
        loss = train_one_step(model)
        assert_finite(model)                # parameters, buffers, gradients

    def test_my_loss():
        assert_stable(my_loss, torch.ones(4))   # both passes, over the edge values of the dtype

Names are resolved when they are first used: the pytest plugin lives here, and must not import torch into
test runs that do not ask for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .finite import assert_finite as assert_finite
    from .stable import assert_stable as assert_stable
    from .watch import FiniteWatch as FiniteWatch

_HOMES = {"assert_finite": "finite", "assert_stable": "stable", "FiniteWatch": "watch"}

__all__ = ["FiniteWatch", "assert_finite", "assert_stable"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'nanproof.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)

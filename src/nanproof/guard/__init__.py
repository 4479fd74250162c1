"""Guarding a training run: a bad step never happened."""

from .guard import Guard
from .policy import Policy
from .taps import tap

__all__ = ["Guard", "Policy", "tap"]

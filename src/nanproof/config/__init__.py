"""Configs of training runs: read, resolved, checked and hardened; no code of theirs is ever run.

    from nanproof.config import load, check_config, precision, harden

    settings = load("conf/train.yaml", overrides=["optimizer.lr=5e-5"])
    settings.tell("optimizer.lr")         # conf/train.yaml:3 says 0.0001, the command line overrides it with 5e-05
    check_config(["conf/train.yaml"])     # findings NP701 to NP710
    precision(settings, hardware="V100")  # who says what about precision, and what counts in the end
    harden("conf/train.yaml")             # a stable variant, every change with its reason

`value` and `meaning` are what the rest is made of: a flat view with the place of every value, and one vocabulary over
all dialects. `yamlfile`, `jsonfile`, `tomlfile`, `pythonfile`, `launch` read; `hydra`, `overrides`, `interpolate`
resolve; `loading` puts the layers together. `sources`, `effective`, `contradictions` and `precision_table` are about
formats of numbers. `case`, `remedies`, `ladder`, `marks` and `edits` make a hardened variant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .check import check_config as check_config
    from .hardening import harden as harden
    from .loading import load as load
    from .precision_table import precision as precision
    from .project import Project as Project
    from .value import Settings as Settings

__all__ = ["Project", "Settings", "check_config", "harden", "load", "precision"]

_HOMES = {
    "check_config": "check",
    "harden": "hardening",
    "load": "loading",
    "precision": "precision_table",
    "Project": "project",
    "Settings": "value",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

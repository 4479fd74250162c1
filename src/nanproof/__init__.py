"""nanproof keeps PyTorch training finite.

    from nanproof import Guard

    guard = Guard(model, optimizer, scheduler=scheduler, max_norm=1.0, run_dir="runs/a")
    for batch in guard.batches(loader):
        guard.step(lambda: loss_fn(model(batch.x), batch.y))

Names are resolved when they are first used, so ``import nanproof`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import integrations as integrations
    from . import islands as islands
    from . import ops as ops
    from . import testing as testing
    from . import watch as watch
    from .checkpoint import ScanReport as ScanReport
    from .checkpoint import scan as scan
    from .config import harden as harden
    from .diagnosing import Diagnosis as Diagnosis
    from .diagnosing import diagnose as diagnose
    from .errors import GuardStop as GuardStop
    from .errors import NanproofError as NanproofError
    from .guard import Guard as Guard
    from .guard import Policy as Policy
    from .guard import tap as tap
    from .linting import lint as lint
    from .locating import locate as locate
    from .records import Finding as Finding
    from .records import Incident as Incident
    from .records import Location as Location
    from .records import Verdict as Verdict

__version__ = "0.1.0"

_HOMES = {
    "Guard": "guard",
    "Policy": "guard",
    "tap": "guard",
    "locate": "locating",
    "scan": "checkpoint",
    "diagnose": "diagnosing",
    "lint": "linting",
    "harden": "config",
    "Verdict": "records",
    "Incident": "records",
    "Finding": "records",
    "Location": "records",
    "ScanReport": "checkpoint",
    "Diagnosis": "diagnosing",
    "GuardStop": "errors",
    "NanproofError": "errors",
}

_NAMESPACES = ("integrations", "islands", "ops", "testing", "watch")

__all__ = [
    "Diagnosis",
    "Finding",
    "Guard",
    "GuardStop",
    "Incident",
    "Location",
    "NanproofError",
    "Policy",
    "ScanReport",
    "Verdict",
    "diagnose",
    "harden",
    "integrations",
    "islands",
    "lint",
    "locate",
    "ops",
    "scan",
    "tap",
    "testing",
    "watch",
]


def __getattr__(name: str) -> object:
    if name in _HOMES or name in _NAMESPACES:
        try:
            home = importlib.import_module(f".{_HOMES.get(name, name)}", __name__)
            return getattr(home, name) if name in _HOMES else home
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            hint = f"nanproof.{name} needs torch. Next: pip install 'nanproof[torch]'"
            raise ModuleNotFoundError(hint, name="torch") from None
    raise AttributeError(f"module 'nanproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

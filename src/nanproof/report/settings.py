"""Settings in a report: what a hardened config would change, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..config import harden
from ..config.value import show
from ..errors import NanproofError
from ..watch.runs import Run
from ..watch.why import configs_of

Row = tuple[str, ...]


def proposed(run: Run) -> Iterator[Row]:
    """What harden would change: setting, before, after, why."""
    for config in configs_of(run.home)[:3]:
        try:
            hardening = harden(config.path)
        except NanproofError:
            continue
        for change in hardening.changes:
            yield f"{Path(config.path).name}: {change.key}", show(change.before), show(change.after), change.why
        for left in hardening.left:
            yield f"{Path(config.path).name}: {left.what}", "as it is", left.mark or "not changed", left.why

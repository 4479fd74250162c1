"""Settings in a report: what two runs set differently, or what a hardened config would change and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..config import harden
from ..config.value import show
from ..errors import NanproofError
from ..watch.runs import Run
from ..watch.why import configs_of, settings_of

Row = tuple[str, ...]


def changed(runs: Sequence[Run]) -> Iterator[Row]:
    """Settings that are not the same in the configs of two runs: key, first, second."""
    before, after = (settings_of(r.path) for r in runs[:2])
    if not before or not after:
        return
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield key, before.get(key, "–"), after.get(key, "–")


def proposed(run: Run) -> Iterator[Row]:
    """What harden would change: setting, before, after, why."""
    for config in configs_of(run.path)[:3]:
        try:
            hardening = harden(config.path)
        except NanproofError:
            continue
        for change in hardening.changes:
            yield f"{Path(config.path).name}: {change.key}", show(change.before), show(change.after), change.why
        for left in hardening.left:
            yield f"{Path(config.path).name}: {left.what}", "as it is", left.mark or "not changed", left.why

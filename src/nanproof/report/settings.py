"""Settings in a report: what two runs set differently, or what a hardened config would change and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..config import harden
from ..config.value import show
from ..diagnosing.sources.configs import Config, find_configs
from ..diagnosing.sources.places import find_places
from ..errors import NanproofError
from ..watch.runs import Run

Row = tuple[str, ...]


def configs_of(run: Run) -> list[Config]:
    """The project's own configs in a run's folder."""
    if not run.path.is_dir():
        return []
    try:
        places = find_places([run.path])
        return [c for c in find_configs(places.configs, run.path) if c.kind == "own"]
    except NanproofError:
        return []


def changed(runs: Sequence[Run]) -> Iterator[Row]:
    """Settings that are not the same in the configs of two runs: key, first, second."""
    before, after = ({v.key: show(v.value) for c in configs_of(r) for v in c.settings} for r in runs[:2])
    if not before or not after:
        return
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield key, before.get(key, "–"), after.get(key, "–")


def proposed(run: Run) -> Iterator[Row]:
    """What harden would change: setting, before, after, why."""
    for config in configs_of(run)[:3]:
        try:
            hardening = harden(config.path)
        except NanproofError:
            continue
        for change in hardening.changes:
            yield f"{Path(config.path).name}: {change.key}", show(change.before), show(change.after), change.why
        for left in hardening.left:
            yield f"{Path(config.path).name}: {left.what}", "as it is", left.mark or "not changed", left.why

"""When a watched run is worth a message: pure, from one glance to the next."""

from __future__ import annotations

from collections.abc import Iterator

from .glance import Glance
from .notify import Occasion


def occasions(before: Glance | None, now: Glance) -> Iterator[tuple[Occasion, str]]:
    """What happened between two looks at a run."""
    if now.alarm and (before is None or not before.alarm):
        yield "nonfinite", now.alarm
    if now.warning and (before is None or not before.warning):
        yield "warning", f"likely to break soon: {now.warning}"
    if before is None:
        return
    if before.alarm and not now.alarm:
        yield "recovery", f"finite again at step {now.step:,}"
    if now.counts.get("rollback", 0) > before.counts.get("rollback", 0):
        yield "rollback", f"rolled back at step {now.step:,}"
    if now.counts.get("stop", 0) > before.counts.get("stop", 0):
        yield "stop", f"stopped at step {now.step:,}"
    if now.max_steps and before.step < now.max_steps <= now.step:
        yield "finish", f"all {now.max_steps:,} steps done"

"""A series of checkpoints: its order, the last healthy one, the first bad one, and finding both in few reads."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UsageError
from .layout import Checkpoint
from .report import ScanReport, SeriesReport, Turn

Scan = Callable[[Checkpoint], ScanReport]


def order(reports: list[ScanReport], checkpoints: list[Checkpoint]) -> SeriesReport:
    """Reports in the order of training, with the turn of every series among them."""
    families = {c.path: c.family for c in checkpoints}
    ordered = sorted(reports, key=lambda r: (families[r.path], r.step is None, r.step or 0, r.name))
    groups: dict[tuple[str, str], list[ScanReport]] = {}
    for report in ordered:
        groups.setdefault(families[report.path], []).append(report)
    turns = tuple(_turn(group) for group in groups.values() if len(group) > 1)
    return SeriesReport(reports=tuple(ordered), turns=turns, total=len(checkpoints))


def is_bad(report: ScanReport) -> bool:
    """What ends a series: suspect checkpoints are finite and do not."""
    return report.health not in ("healthy", "suspect")


def _turn(reports: list[ScanReport]) -> Turn:
    return Turn(
        last_healthy=next((r.name for r in reversed(reports) if r.ok), None),
        first_bad=next((r.name for r in reports if is_bad(r)), None),
    )


def bisect(checkpoints: list[Checkpoint], scan: Scan) -> SeriesReport:
    """Find where a series turned bad by reading O(log n) of it; once bad, a run does not become good again."""
    if len({c.family for c in checkpoints}) > 1:
        names = ", ".join(sorted({f"{c.family[0]}/{c.family[1]}" for c in checkpoints})[:4])
        raise UsageError(f"--bisect needs one series, here are several: {names}", hint="name one of them with a glob")
    reports: dict[str, ScanReport] = {}

    def turned(i: int) -> bool:
        path = checkpoints[i].path
        if path not in reports:
            reports[path] = scan(checkpoints[i])
        return is_bad(reports[path])

    low, high = 0, len(checkpoints)  # everything before low is good, everything from high on is bad
    while low < high:
        middle = (low + high) // 2
        if turned(middle):
            high = middle
        else:
            low = middle + 1
    read = [reports[c.path] for c in checkpoints if c.path in reports]
    return SeriesReport(reports=tuple(read), turns=(_turn(read),), total=len(checkpoints))

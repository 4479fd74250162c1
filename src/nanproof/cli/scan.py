"""``nanproof scan``: which checkpoint is still good."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ..collector import loading
from ..text import plain, style
from .progress import Bar
from .shell import Screen, verb

if TYPE_CHECKING:
    from ..checkpoint.against import Comparison
    from ..checkpoint.config import Difference
    from ..checkpoint.layout import Checkpoint
    from ..checkpoint.report import ScanReport, SeriesReport
    from ..checkpoint.scan import Policy


@verb(example="nanproof scan runs/a/checkpoints --quarantine runs/a/bad", inert=True)
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option("--bisect", is_flag=True, help="Read only O(log n) checkpoints to find where a series turned bad.")
@click.option("--fast", is_flag=True, help="Skip checksums.")
@click.option("--jobs", type=click.IntRange(1, 64), help="Number of threads. Default: one per core.")
@click.option("--against", metavar="REF", help="Compare with this checkpoint; --repair takes buffers from it.")
@click.option("--config", metavar="FILE", help="Compare the restored settings with a config: YAML, JSON, TOML, Python.")
@click.option("--quarantine", metavar="DIR", help="Move what is corrupt, damaged, refused or dangerous to DIR.")
@click.option("--undo", is_flag=True, help="With --quarantine: put everything back.")
@click.option(
    "--policy", type=click.Choice(["weights-only"]), help="Report whether torch.load(weights_only=True) accepts it."
)
@click.option("--repair", metavar="OUT", help="Write a repaired copy; the original is not touched.")
def command(
    screen: Screen,
    paths: tuple[str, ...],
    bisect: bool,
    fast: bool,
    jobs: int | None,
    against: str | None,
    config: str | None,
    quarantine: str | None,
    undo: bool,
    policy: Policy | None,
    repair: str | None,
) -> int:
    """Scan checkpoints for NaN, Inf and damage: files, folders, a series of them, globs or URLs.

    Nothing in a checkpoint is executed. Verdicts: healthy, suspect (finite but wrong, or loading it would call what
    no checkpoint needs), corrupt (NaN or Inf), damaged (truncated, checksum, header lies), unreadable (unknown
    format), refused (unsafe structure).
    """
    from ..errors import UsageError

    # scanning a small file is mostly starting: numpy need not start threads for products of matrices
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if undo:
        if quarantine is None:
            raise UsageError("--undo needs --quarantine DIR", hint="nanproof scan --quarantine DIR --undo")
        return _undo(screen, quarantine)
    if not paths:
        raise UsageError("no path given", hint="nanproof scan runs/a/checkpoints")
    with loading():
        from ..checkpoint.layout import discover
        from ..checkpoint.ranks import Group, world

    found = discover(list(paths))
    kept = [c for c in found if not _is_of_an_incident(c.path, paths)]
    if kept and len(kept) < len(found):  # batches and weights that a guard kept for a replay are no checkpoints
        screen.note(f"{len(found) - len(kept):,} files of incidents left out; name an incident's folder to scan it")
        found = kept
    if repair is not None and len(found) != 1:
        raise UsageError(f"--repair takes one checkpoint, got {len(found)}", hint="name the one to repair")
    reference = discover([against]) if against else []
    if len(reference) > 1:
        raise UsageError(f"--against takes one checkpoint, got {len(reference)}", hint="name one of them")
    if world()[1] > 1:
        if bisect or repair or quarantine or against or config or policy:
            raise UsageError("only a plain scan works under torchrun", hint="run the other options in one process")
        group = Group()
        try:
            return group.share_code(_together(screen, group, found, fast=fast, jobs=jobs))
        finally:
            group.close()
    return _alone(
        screen,
        found,
        reference[0] if reference else None,
        bisect=bisect,
        fast=fast,
        jobs=jobs,
        config=config,
        quarantine=quarantine,
        policy=policy,
        repair=repair,
    )


def _is_of_an_incident(path: str, named: tuple[str, ...]) -> bool:
    folder, _, rest = path.rpartition("/incidents/")
    return bool(folder and rest) and not any("incidents" in name for name in named)


def _together(screen: Screen, group: object, found: list[Checkpoint], *, fast: bool, jobs: int | None) -> int:
    """Under torchrun: rank 0 prints, the others only work."""
    from ..checkpoint.ranks import Group, scan_together
    from ..checkpoint.series import order

    assert isinstance(group, Group)
    reports = scan_together(group, found, fast=fast, jobs=jobs)
    if group.rank:
        return 0
    series = order(reports, found)
    screen.data({"series": series})
    width = _width([r.name for r in series])
    folded = _Folded(screen, width)
    for report in series:
        folded.take(report)
    folded.end()
    _show_end(screen, series)
    return 0 if series.ok else 1


def _alone(
    screen: Screen,
    found: list[Checkpoint],
    reference: Checkpoint | None,
    *,
    bisect: bool,
    fast: bool,
    jobs: int | None,
    config: str | None,
    quarantine: str | None,
    policy: Policy | None,
    repair: str | None,
) -> int:
    from ..checkpoint.scan import scan_checkpoint
    from ..checkpoint.series import bisect as find_turn
    from ..checkpoint.series import order

    expected: dict[str, float] = {}
    if config:
        from ..config import load

        expected = load(config).numbers()
    width = _width([c.name for c in found])

    def one(checkpoint: Checkpoint) -> ScanReport:
        with Bar(screen, checkpoint.name, sum(i.size for i in checkpoint.items)) as bar:
            report = scan_checkpoint(checkpoint, fast=fast, jobs=jobs, policy=policy, progress=bar.advance)
        folded.take(report)
        if screen.as_json or repair is not None:
            return report
        return replace(report, tensors=report.bad)  # a long series of large checkpoints must fit into memory

    folded = _Folded(screen, width)
    series = find_turn(found, one) if bisect else order([one(c) for c in found], found)
    folded.end()
    _show_end(screen, series, bisected=bisect)
    machine: dict[str, object] = {"series": series}
    code = 1 if not series.ok or any(r.against for r in series) else 0

    drift = _drift(series, expected) if expected else {}
    machine["config"] = {name: [str(d) for d in found_] for name, found_ in drift.items()}
    for name, found_ in drift.items():
        code = 1
        for difference in found_:
            screen.result(f"{plain(name)}: {plain(str(difference))}")
    if reference is not None and repair is None:
        code = max(code, _compare(screen, found, reference, machine))
    if repair is not None:
        code = _repair(screen, found[0], series.reports[0], repair, reference, machine)
    if quarantine is not None:
        from ..checkpoint.quarantine import quarantine as move_away

        moves = move_away(list(series), quarantine)
        machine["moved"] = moves
        for old, new in moves:
            screen.result(f"moved {plain(old)} → {plain(new)}")
        if moves:
            screen.note(f"undo with: nanproof scan --quarantine {plain(quarantine)} --undo")
    screen.data(machine)
    return code


def _drift(series: SeriesReport, expected: dict[str, float]) -> dict[str, tuple[Difference, ...]]:
    from ..checkpoint.config import differences

    return {r.name: found for r in series if (found := differences(r.settings, expected))}


def _compare(screen: Screen, found: list[Checkpoint], reference: Checkpoint, machine: dict[str, object]) -> int:
    from ..checkpoint.against import compare

    results = [compare(c, reference) for c in found if c.path != reference.path]
    machine["against"] = results
    for result in results:
        for line in _comparison_lines(result):
            screen.result(plain(line))
    return 0 if all(r.ok for r in results) else 1


def _comparison_lines(c: Comparison) -> list[str]:
    lines = [f"{c.name} against {c.reference}:"]
    for word, names in (("missing", c.missing), ("unexpected", c.unexpected), ("shape changed", c.reshaped)):
        if names:
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            lines.append(f"  {len(names):,} {word}: {', '.join(names[:3])}{more}")
    if c.stuck:
        why = "and should have" if c.should_move else "frozen, or not trained"
        lines.append(f"  {len(c.stuck):,} parameters did not move ({why}): {', '.join(c.stuck[:3])}")
    moved = sorted(
        (x for x in c.changes if not x.identical), key=lambda x: -x.relative if x.relative == x.relative else -math.inf
    )
    lines += [f"  {x.name}: relative change {x.relative:.3g}" for x in moved[:5]]
    rest = f", {len(moved) - 5:,} more moved less" if len(moved) > 5 else ""
    lines.append(f"  {len(c.changes) - len(moved):,} of {len(c.changes):,} tensors identical{rest}")
    return lines


def _repair(
    screen: Screen,
    checkpoint: Checkpoint,
    report: ScanReport,
    out: str,
    reference: Checkpoint | None,
    machine: dict[str, object],
) -> int:
    from ..checkpoint.repair import repair
    from ..checkpoint.scan import scan

    result = repair(checkpoint, report, out, reference)
    machine["repair"] = result
    if result.refused:
        screen.result(f"not repaired: {plain(result.refused)}")
        return 1
    for line in result.done:
        screen.result(f"  {plain(line)}")
    after = scan(out)
    machine["repaired"] = after
    screen.result(f"wrote {plain(out)}: {after.health}; {plain(checkpoint.name)} is as it was")
    return 0 if after.health in ("healthy", "suspect") else 1


def _undo(screen: Screen, folder: str) -> int:
    from ..checkpoint.quarantine import undo

    moves = undo(folder)
    screen.data({"returned": moves})
    for _, new in moves:
        screen.result(f"put back {plain(new)}")
    if not moves:
        screen.note("nothing to put back")
    return 0


def _width(names: list[str]) -> int:
    return min(48, max((len(n) for n in names), default=0))


_STYLES = {"healthy": "green", "suspect": "yellow"}


def _show(screen: Screen, report: ScanReport, width: int) -> None:
    """One line, and below it whatever else there is to say."""
    word = report.health if report.ok else report.health.upper()
    reasons = [*report.reasons[:1]] if not report.ok else [_summary(report)]
    tail = "   → repairable" if report.repairable else ""
    color = _STYLES.get(report.health, "red")
    head = f"{plain(report.name):<{width}}   {style(f'{word:<10}', fg=color)} "
    screen.result(f"{head}{plain(reasons[0] if reasons else '')}{tail}", width + 14)
    for words in report.reasons[1:6]:
        screen.result(f"{'':<{width}}              {plain(words)}", width + 14)
    if len(report.reasons) > 6:
        screen.result(f"{'':<{width}}              and {len(report.reasons) - 6:,} more")
    if report.against is not None:
        from ..checkpoint.weights_only import UNSURE

        word = "may" if report.against and report.against[0].endswith(UNSURE) else "would"
        accepted = f"{word} refuse it: {report.against[0]}" if report.against else "would accept it"
        screen.result(f"{'':<{width}}              torch.load(weights_only=True) {plain(accepted)}", width + 14)
    for note in report.notes:
        screen.note(style(f"{'':<{width}}              note: {plain(note)}", dim=True))


class _Folded:
    """Prints reports as they come; a row of checkpoints that are bad in the same way becomes one line.

    ``step_000020 … step_000300   CORRUPT    29 checkpoints, 83 of 83 parameters NaN``
    """

    def __init__(self, screen: Screen, width: int) -> None:
        self._screen, self._width = screen, width
        self._held: list[ScanReport] = []

    def take(self, report: ScanReport) -> None:
        if self._held and _alike(self._held[0]) != _alike(report):
            self.end()
        self._held.append(report)
        if report.ok or report.against is not None:  # healthy ones say something each: their headroom, their rate
            self.end()

    def end(self) -> None:
        held, self._held = self._held, []
        if len(held) < 3:
            for report in held:
                _show(self._screen, report, self._width)
            return
        first, last = held[0], held[-1]
        head = f"{plain(first.name)} … {plain(last.name)}"
        word = style(f"{first.health.upper():<10}", fg=_STYLES.get(first.health, "red"))
        reason = f"{len(held):,} checkpoints, each: {plain(_reason(first))}"
        self._screen.result(f"{head:<{self._width}}   {word} {reason}", self._width + 14)


def _alike(report: ScanReport) -> tuple[str, str]:
    return report.health, _reason(report)


def _reason(report: ScanReport) -> str:
    return report.reasons[0] if report.reasons else ""


def _summary(report: ScanReport) -> str:
    from ..floats import find_format

    parts = [f"{len(report):,} tensor{'' if len(report) == 1 else 's'}, {_size(report.bytes)}"]
    tight = report.tightest
    form = find_format(tight.dtype) if tight else None
    if tight is not None and form is not None and tight.headroom:
        more = "" if (tight.at_most or 0) > 2 else "+"
        parts.append(f"headroom {(form.aliases or (form.name,))[0]} 2^{math.floor(math.log2(tight.headroom))}{more}")
    if report.settings.lr is not None:
        parts.append(f"lr {report.settings.lr:.3g}")
    return ", ".join(parts)


def _size(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def _show_end(screen: Screen, series: SeriesReport, bisected: bool = False) -> None:
    if bisected:
        screen.result(f"read {len(series.reports)} of {series.total} checkpoints")
    for turn in series.turns:
        healthy, bad = turn.last_healthy or "none", turn.first_bad or "none"
        screen.result(f"last healthy: {plain(healthy)}    first bad: {plain(bad)}", 4)

"""`scan`: is this checkpoint still good?

    report = nanproof.scan("runs/a/checkpoint-28000")
    report.health, report.reasons          # "corrupt", ("4 buffers NaN (…), parameters finite",)
    [t.name for t in report if t.bad]

Nothing in the file is executed, torch is not imported, and memory stays below a fixed bound.
"""

from __future__ import annotations

import os
from typing import Literal

from ..errors import UsageError
from .calls import Calls
from .consistency import check_folder
from .flaws import Flaw, Health
from .judge import judge
from .layout import Checkpoint, discover, is_part
from .part import Part, PartResult, scan_part
from .report import ScanReport, SeriesReport
from .series import order
from .settings import Gatherer
from .store import Item, Remote
from .sweep import Progress, default_jobs, share

Policy = Literal["weights-only"]


def scan(
    path: str | os.PathLike[str], *, fast: bool = False, jobs: int | None = None, policy: Policy | None = None
) -> ScanReport:
    """The verdict on one checkpoint: a file or a folder. For a series use `scan_series`."""
    found = discover([path])
    if len(found) > 1:
        raise UsageError(
            f"{os.fspath(path)} holds {len(found)} checkpoints", hint="name one, or use nanproof.checkpoint.scan_series"
        )
    return scan_checkpoint(found[0], fast=fast, jobs=jobs, policy=policy)


def scan_series(*paths: str | os.PathLike[str], fast: bool = False, jobs: int | None = None) -> SeriesReport:
    """All checkpoints under some paths, in the order of training."""
    found = discover(list(paths))
    return order([scan_checkpoint(c, fast=fast, jobs=jobs) for c in found], found)


def scan_checkpoint(
    checkpoint: Checkpoint,
    *,
    fast: bool = False,
    jobs: int | None = None,
    policy: Policy | None = None,
    progress: Progress | None = None,
) -> ScanReport:
    """One checkpoint that `discover` found."""
    parts, flaws = plan(checkpoint)
    results = scan_parts(checkpoint, parts, fast=fast, jobs=jobs, strict=policy is not None, progress=progress)
    return conclude(checkpoint, results, flaws, fast=fast)


REMOTE_JOBS = 16  # ranges asked for at the same time: a store far away is slow to answer, not to send
REMOTE_PARTS = 8


def scan_parts(
    checkpoint: Checkpoint,
    parts: list[Part],
    *,
    fast: bool,
    jobs: int | None,
    strict: bool = False,
    progress: Progress | None = None,
) -> list[PartResult]:
    """The files of a checkpoint: one after the other, or several at once where each is mostly waiting."""
    far = isinstance(checkpoint.store, Remote)
    together = max(1, min(REMOTE_PARTS, len(parts))) if far else 1
    each = max(1, (jobs or (REMOTE_JOBS if far else default_jobs())) // together)
    results: dict[int, PartResult] = {}

    def work(task: tuple[int, Part]) -> None:
        i, part = task
        results[i] = scan_part(checkpoint.store, part, check=not fast, jobs=each, strict=strict, progress=progress)

    share(iter(list(enumerate(parts))), work, together)
    return [results[i] for i in range(len(parts))]


def conclude(
    checkpoint: Checkpoint, results: list[PartResult], flaws: list[tuple[Health, str]], *, fast: bool
) -> ScanReport:
    """The report, once all parts are there."""
    gatherer = Gatherer()
    extra = flaws + check_folder(checkpoint, results, gatherer)
    return judge(checkpoint, results, extra=extra, gatherer=gatherer, fast=fast)


def plan(checkpoint: Checkpoint) -> tuple[list[Part], list[tuple[Health, str]]]:
    """The files to scan, and what is wrong before any is opened."""
    if checkpoint.flaw is not None:
        return [], [(checkpoint.flaw.health, checkpoint.flaw.why)]
    if len(checkpoint.items) == 1 and checkpoint.items[0].path == checkpoint.path:
        item = checkpoint.items[0]
        return [Part(file=item.name, path=item.path, size=item.size)], []
    parts: list[Part] = []
    flaws: list[tuple[Health, str]] = []
    indexed: set[str] = set()
    by_name = {i.name: i for i in checkpoint.items}
    for item in checkpoint.items:
        if item.name.rpartition("/")[2] == ".metadata":
            prefix = item.name.removesuffix(".metadata")
            try:
                parts += _dcp_parts(checkpoint, item.path, prefix, by_name, indexed, flaws)
            except Flaw as flaw:
                flaws.append((flaw.health, f"{item.name}: {flaw.why}"))
    for item in checkpoint.items:
        name = item.name.rpartition("/")[2].lower()
        if item.name in indexed or name.startswith(".") or not is_part(checkpoint.store, item):
            continue
        if name.endswith(".distcp"):
            flaws.append(("damaged", f"{item.name}: no .metadata says what is in it"))
            continue
        parts.append(Part(file=item.name, path=item.path, size=item.size))
    return parts, flaws


def _dcp_parts(
    checkpoint: Checkpoint,
    path: str,
    prefix: str,
    by_name: dict[str, Item],
    indexed: set[str],
    flaws: list[tuple[Health, str]],
) -> list[Part]:
    from .dcp import read_index

    source = checkpoint.store.open(path)
    seen = Calls()
    try:
        index = read_index(source, seen)
    finally:
        source.close()
        flaws += [("suspect", f"{prefix}.metadata: {words}") for words in seen.reasons()]
    parts = []
    for file, entries in sorted(index.files.items()):
        if file.startswith("/") or "\\" in file or ".." in file.split("/"):
            raise Flaw("refused", f"points out of the folder, at {file[:80]!r}")
        name = f"{prefix}{file}"
        if name not in by_name:
            raise Flaw("damaged", f"{file[:80]} is missing")
        indexed.add(name)
        item = by_name[name]
        parts.append(Part(file=name, path=item.path, size=item.size, entries=entries))
    for name in by_name:  # a rank that holds nothing writes an empty file
        if name.startswith(prefix) and name.endswith(".distcp") and by_name[name].size == 0:
            indexed.add(name)
    return parts

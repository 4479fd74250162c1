"""One file of a checkpoint: read it, sweep it, look closely at what is bad, and keep the findings as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .calls import Calls
from .contents import Contents, Stored, element
from .detail import chunks, look, values
from .finite import Sweep
from .flaws import Flaw
from .formats import read_file
from .report import TensorReport
from .roles import last, role_of
from .settings import Gatherer
from .source import RemoteFile, Source, read
from .suspicion import suspicion
from .sweep import Progress, share, sweep_file

if TYPE_CHECKING:
    from .dcp import Entry


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Part:
    """A file still to be scanned; the entries are those of a DCP index."""

    file: str
    path: str
    size: int
    entries: list[Entry] | None = None


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class PartResult:
    """What was found in one file; plain data, so that it can travel between machines."""

    file: str
    path: str
    format: str = ""
    size: int = 0
    flaw: tuple[str, str] | None = None
    """Verdict and sentence, when the file could not be read to its end."""
    tensors: list[TensorReport] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    """What its pickles would call that checkpoints do not need."""
    against: list[str] | None = None
    """Why torch.load(weights_only=True) would refuse it; None where that was not asked."""
    suspicions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    verified: bool = False


def open_part(source: Source, part: Part, *, check: bool, seen: Calls | None = None, later: bool = False) -> Contents:
    """The contents of a part, by its own format or by the index of its folder.

    With ``later``, headers of a remote file may be checked after its bytes were read, by ``confirm``.
    """
    if part.entries is not None:
        from .dcp import read_distcp

        return read_distcp(source, part.entries, check=check, seen=seen)
    return read_file(source, check=check, seen=seen, later=later)


def scan_part(
    store: Any, part: Part, *, check: bool, jobs: int, strict: bool = False, progress: Progress | None = None
) -> PartResult:
    """Everything about one file; never raises for what is wrong with it."""
    result = PartResult(file=part.file, path=part.path, size=part.size)
    seen = Calls()
    source: Source | None = None
    try:
        source = store.open(part.path)
        result.size = source.size
        if isinstance(source, RemoteFile):
            source.ahead = jobs - 2  # with the two ends, as many requests at once as later
        _scan(source, part, result, seen, check=check, jobs=jobs, progress=progress)
    except Flaw as flaw:
        result.flaw = (flaw.health, flaw.why)
    except MemoryError:
        result.flaw = ("refused", "needs more memory than there is")
    if source is not None:
        if strict:
            result.against = _against(source, result)
        if result.flaw is not None:  # only now: until here, the error holds what was built of the pickle
            from .hidden import search_file

            search_file(source, seen)
        source.close()
    result.calls = seen.reasons()
    result.notes += seen.notes()
    return result


def _against(source: Source, result: PartResult) -> list[str] | None:
    """Why torch.load(weights_only=True) would refuse it; None for other formats, and for zips that are damaged."""
    from .hidden import may_be_pickle
    from .weights_only import reasons

    try:
        head = read(source, 0, min(source.size, 512))
        pickled = head[:4] == b"PK\3\4" or may_be_pickle(head)
        return reasons(source) if pickled and result.format in ("", "torch zip", "legacy torch", "pickle") else None
    except (Flaw, MemoryError):
        return None


def _scan(
    source: Source,
    part: Part,
    result: PartResult,
    seen: Calls,
    *,
    check: bool,
    jobs: int,
    progress: Progress | None,
    later: bool = True,
) -> None:
    contents = open_part(source, part, check=check, seen=seen, later=later)
    if seen.nested or seen.held:
        from .hidden import search

        nested, seen.nested, held, seen.held = seen.nested, [], seen.held, []
        for data in nested:
            search(data, seen)
        for data in held:
            search(data, seen, run=False)
    result.format, result.notes, result.unread = contents.format, contents.notes, contents.unread
    gatherer = Gatherer()
    if contents.tree is not None:
        gatherer.take_tree(contents.tree)
        contents.tree = None  # free it before the tensors are read
    sweeps, failed = sweep_file(source, contents, jobs=jobs, progress=progress)
    if contents.confirm is not None and not contents.confirm():
        _scan(source, part, result, seen, check=check, jobs=jobs, progress=None, later=False)
        return
    result.verified = bool(contents.checksums)
    if failed:
        result.flaw = ("damaged", _failed_words(contents, failed))
    _judge_tensors(source, part, contents, sweeps, result, jobs)
    _take_steps(source, contents, gatherer)
    result.found, result.arguments, result.steps = gatherer.found, gatherer.arguments, gatherer.steps


def _failed_words(contents: Contents, failed: list[int]) -> str:
    ends = {start: start + size for start, size, _ in contents.checksums.in_order()}
    first = min(failed)
    hit = next((t.name for t in contents.tensors if first <= t.start < max(ends[first], first + 1)), f"byte {first:,}")
    more = " …" if len(failed) > 1 else ""
    return f"{len(failed):,} of {len(ends):,} checksums fail ({hit}{more}): bytes have changed since it was written"


def _judge_tensors(
    source: Source, part: Part, contents: Contents, sweeps: list[Sweep | None], result: PartResult, jobs: int
) -> None:
    closer = _look_closer(source, contents, sweeps, jobs)
    for i, (stored, sweep) in enumerate(zip(contents.tensors, sweeps, strict=True)):
        role = role_of(stored.name, part.file)
        facts = closer.get(i)
        bad = facts is not None and facts.bad > 0
        at_most = None if sweep is None else sweep.at_most
        if facts is not None and facts.finite_max is not None and facts.finite_min is not None:
            at_most = max(abs(facts.finite_max), abs(facts.finite_min))
        report = TensorReport(
            name=stored.name,
            dtype=stored.dtype,
            shape=stored.shape,
            file=part.file,
            role=role,
            at_most=at_most,
            state="not applicable" if sweep is None else "nonfinite" if bad else "finite",
            facts=facts if bad else None,
        )
        result.tensors.append(report)
        if sweep is not None and not bad and (words := suspicion(source, stored, sweep, report)):
            result.suspicions.append(f"{stored.name}: {words}")


def _look_closer(source: Source, contents: Contents, sweeps: list[Sweep | None], jobs: int) -> dict[int, Any]:
    """The facts of every tensor that the fast test flagged, found by as many threads as the scan has."""
    todo = iter([i for i, s in enumerate(sweeps) if s is not None and s.bad])
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = look(source, contents.tensors[i], contents.tensors[i].name)

    share(todo, work, jobs)
    return found


def _take_steps(source: Source, contents: Contents, gatherer: Gatherer) -> None:
    """Step counters and the loss scale are tensors in newer files."""
    for stored in contents.tensors:
        word = last(stored.name)
        if word in ("step", "scale", "_scale") and stored.numel == 1 and stored.columns is None:
            value = scalar(source, stored)
            if value is None:
                continue
            if word == "step" and role_of(stored.name) == "moment" and abs(value) < 1 << 53:
                gatherer.steps.append(int(value))
            elif word != "step" and "scaler" in stored.name:
                gatherer.add("scale", value)


def scalar(source: Source, stored: Stored) -> float | None:
    """The value of a tensor with one element, if it is a finite number."""
    kind = element(stored.dtype)
    for _, data in chunks(source, stored):
        if kind is not None and kind.format is not None:
            value = float(values(data, kind.format)[0])
            return value if np.isfinite(value) else None
        if stored.dtype in ("int64", "int32"):
            return float(data.view(stored.dtype)[0])
    return None

"""Reading a whole file once, in threads, through small reused buffers: fast test and checksums in the same pass."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .checksum import combine, crc32
from .contents import Columns, Contents, element
from .finite import Bytes, Sweep
from .source import RemoteFile, Source

CHUNK = 4 << 20  # what one thread has in memory: larger falls out of the caches, smaller pays for calls
BUFFERS = 32 << 20  # what all threads have in memory together
BLOCK = 16 << 20  # what one thread takes at a time
PAGE = 4096

Progress = Callable[[int], None]
T = TypeVar("T")


def default_jobs() -> int:
    """One thread for each core that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(slots=True, eq=False, repr=False)
class _Span:
    """The bytes of one tensor, or of several that share them."""

    start: int
    end: int
    sweep: Sweep
    columns: Columns | None = None


@dataclass(slots=True, eq=False, repr=False)
class _Region:
    """Bytes that are read in one go: a zip member with its checksum, or a tensor of a file without."""

    start: int
    end: int
    spans: list[_Span]
    crc: int | None = None
    parts: dict[int, tuple[int, int]] | None = None
    """CRC and size of the blocks of a region that several threads share, by their start."""

    @property
    def unit(self) -> int:
        """Blocks begin at multiples of this from the start of the region."""
        return self.spans[0].columns.block if self.spans and self.spans[0].columns else 1


def sweep_file(
    source: Source, contents: Contents, *, jobs: int, progress: Progress | None = None
) -> tuple[list[Sweep | None], list[int]]:
    """Test every float tensor, in the order of ``contents.tensors``; None where there is nothing to test.

    Also returns the offsets of what failed its checksum.
    """
    chunk = max(1 << 18, min(CHUNK, BUFFERS // jobs))
    sweeps = _start(contents)
    failed: list[int] = []
    lock = threading.Lock()
    large: list[_Region] = []
    buffers = threading.local()

    def work(task: _Task) -> None:
        if not hasattr(buffers, "own"):
            buffers.own = _buffer(chunk)
        _run(source, task, buffers.own, lock, failed)
        if progress:
            progress(task.end - task.start)

    # a store far away answers more requests at once than there are cores: blocks as small as one request
    block = chunk if isinstance(source, RemoteFile) else BLOCK
    share(_tasks(_regions(contents, sweeps), chunk, block, large, failed), work, min(jobs, -(-source.size // chunk)))
    failed += [r.start for r in large if r.crc is not None and _joined(r) != r.crc]
    return sweeps, failed


def _buffer(size: int) -> Bytes:
    """Memory for some bytes and for `_placed` to move them, beginning at a page."""
    memory = np.empty(size + 2 * PAGE, np.uint8)
    return memory[-memory.__array_interface__["data"][0] % PAGE :][: size + PAGE]


def _placed(buffer: Bytes, start: int, end: int) -> Bytes:
    """Where to put the bytes of a file from ``start`` to ``end``.

    At a cache line, for the passes over them; and not where in a page they lie in the file or shortly after: to
    less than 32 bytes after it, some processors copy several times slower.
    """
    at = (start // 64 * 64 + 256) % PAGE
    return buffer[at : at + end - start]


def share(tasks: Iterator[T], work: Callable[[T], None], jobs: int) -> None:
    """Do all tasks in up to ``jobs`` threads, this one among them; the first error ends all and is raised."""
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors:
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return
                work(task)
        except BaseException as error:  # a thread cannot raise: handed to the caller below
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(max(0, min(jobs, 64) - 1))]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _start(contents: Contents) -> list[Sweep | None]:
    """A sweep for each float tensor; what stands in the pickle itself is tested at once."""
    sweeps: list[Sweep | None] = []
    for t in contents.tensors:
        kind = element(t.dtype)
        format = t.columns.format if t.columns else kind.format if kind else None
        sweep = None if format is None else Sweep(format)
        if sweep is not None and t.inline is not None:
            sweep.add(np.frombuffer(t.inline, np.uint8)[t.start : t.start + t.nbytes])
        sweeps.append(sweep)
    return sweeps


def _spans(contents: Contents, sweeps: list[Sweep | None]) -> Iterator[_Span]:
    """The tensors in the order of the file; those that share all their bytes share one span and one sweep."""
    tensors = contents.tensors
    starts = np.fromiter((t.start for t in tensors), np.uint64, len(tensors))
    here: dict[tuple[int, str], Sweep] = {}
    at = -1
    for i in np.argsort(starts, kind="stable").tolist():
        t, sweep = tensors[i], sweeps[i]
        if sweep is None or t.inline is not None or not t.nbytes:
            continue
        if t.start != at:
            at, here = t.start, {}
        if (t.nbytes, t.dtype) in here:
            sweeps[i] = here[t.nbytes, t.dtype]
            continue
        here[t.nbytes, t.dtype] = sweep
        yield _Span(t.start, t.start + t.nbytes, sweep, t.columns)


def _regions(contents: Contents, sweeps: list[Sweep | None]) -> Iterator[_Region]:
    """What to read, made as it is needed; each span goes to the member that holds it."""
    spans = _spans(contents, sweeps)
    if not len(contents.checksums):
        for span in spans:
            yield _Region(span.start, span.end, [span])
        return
    waiting = next(spans, None)
    for start, size, crc in contents.checksums.in_order():
        region = _Region(start, start + size, [], crc)
        while waiting is not None and waiting.start < region.end:
            inside = waiting.start >= start and waiting.end <= region.end
            if inside:
                region.spans.append(waiting)
            else:  # a safetensors blob among the zips of a DCP file has no checksum
                yield _Region(waiting.start, waiting.end, [waiting])
            waiting = next(spans, None)
        yield region
    while waiting is not None:
        yield _Region(waiting.start, waiting.end, [waiting])
        waiting = next(spans, None)


@dataclass(slots=True, eq=False, repr=False)
class _Task:
    """A stretch to read: several small regions at once, or one block of a large one."""

    start: int
    end: int
    regions: list[_Region]
    block: bool = False


def _tasks(
    regions: Iterator[_Region], chunk: int, block: int, large: list[_Region], failed: list[int]
) -> Iterator[_Task]:
    """Stretches of work; regions that are dealt out in blocks are also noted in ``large``."""
    few: list[_Region] = []
    for region in regions:
        size = region.end - region.start
        if few and (region.end - few[0].start > chunk or not 0 <= region.start - few[-1].end <= chunk // 16):
            yield _Task(few[0].start, few[-1].end, few)
            few = []
        if size > chunk:
            region.parts = {}
            large.append(region)
            step = max(1, block // region.unit) * region.unit
            for at in range(region.start, region.end, step):
                yield _Task(at, min(at + step, region.end), [region], block=True)
        elif size:
            few.append(region)
        elif region.crc:
            failed.append(region.start)  # nothing has the checksum 0
    if few:
        yield _Task(few[0].start, few[-1].end, few)


def _run(source: Source, task: _Task, buffer: Bytes, lock: threading.Lock, failed: list[int]) -> None:
    if task.block:
        _run_block(source, task, buffer, lock)
    else:
        data = _placed(buffer, task.start, task.end)
        source.read_into(data.data, task.start)
        for region in task.regions:
            piece = data[region.start - task.start : region.end - task.start]
            if region.crc is not None and crc32(piece.data) != region.crc:
                failed.append(region.start)
            for span in region.spans:
                _feed(span, span.sweep, data, task.start, task.end)


def _run_block(source: Source, task: _Task, buffer: Bytes, lock: threading.Lock) -> None:
    region = task.regions[0]
    alone = task.start == region.start and task.end == region.end
    touched = [s for s in region.spans if s.start < task.end and s.end > task.start]
    mine = [(s, s.sweep if alone else Sweep(s.sweep.form)) for s in touched]
    crc = 0
    chunk = (len(buffer) - PAGE) // region.unit * region.unit
    for at in range(task.start, task.end, chunk):
        data = _placed(buffer, at, min(at + chunk, task.end))
        source.read_into(data.data, at)
        if region.crc is not None:
            crc = crc32(data.data, crc)
        for span, sweep in mine:
            _feed(span, sweep, data, at, at + len(data))
    with lock:
        if not alone:
            for span, sweep in mine:
                span.sweep.join(sweep)
        if region.parts is not None:
            region.parts[task.start] = (crc, task.end - task.start)


def _feed(span: _Span, sweep: Sweep, data: Bytes, start: int, end: int) -> None:
    """Test the part of a span that lies in ``data``, which holds the file from ``start`` to ``end``."""
    if span.start >= end or span.end <= start:
        return
    piece = data[max(span.start - start, 0) : min(span.end, end) - start]
    if span.columns is not None:
        rows = piece.reshape(-1, span.columns.block)
        piece = np.ascontiguousarray(rows[:, span.columns.at : span.columns.at + span.columns.size]).reshape(-1)
    sweep.add(piece)


def _joined(region: _Region) -> int:
    crc = 0
    for _, (part, size) in sorted((region.parts or {}).items()):
        crc = combine(crc, part, size)
    return crc

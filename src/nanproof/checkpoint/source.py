"""Where bytes come from: a local file read with ``pread``, a window into one, memory, or a remote file.

Files are not mapped into memory: mapped pages count as resident memory, and a file that shrinks while it is
read would end the process with SIGBUS. Here a short read is a `Flaw` like any other.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
from bisect import bisect_left, bisect_right, insort
from operator import itemgetter
from typing import Any, Protocol

from .flaws import damaged, unreadable


class Source(Protocol):
    """Random access to bytes; safe to use from several threads."""

    name: str
    size: int

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill the whole view from ``offset`` on, or raise `Flaw`."""

    def take(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on, in one copy, or raise `Flaw`."""

    def close(self) -> None: ...


def read(source: Source, offset: int, size: int) -> bytes:
    """``size`` bytes at ``offset``; a range that the file does not have is damage, and costs no memory."""
    if offset < 0 or size < 0 or offset + size > source.size:
        raise damaged(f"needs bytes {offset:,} to {offset + size:,}, the file ends at {source.size:,}")
    return source.take(offset, size)


def reason(error: OSError) -> str:
    """The words for an operating-system error, without the path, which stands beside it anyway."""
    return os.strerror(error.errno).lower() if error.errno else str(error)


class LocalFile:
    """A regular file on this machine."""

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            # O_NONBLOCK: a named pipe would otherwise wait for a writer for ever
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            word = "a loop of symbolic links" if error.errno == errno.ELOOP else reason(error)
            raise unreadable(f"cannot be opened: {word}") from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise unreadable("is not a regular file")
        self.size = status.st_size

    def read_into(self, view: memoryview, offset: int) -> None:
        done = 0
        try:
            while done < len(view):
                count = os.preadv(self._fd, [view[done:] if done else view], offset + done)
                if not count:
                    raise damaged(f"ends at byte {offset + done:,}, {len(view) - done:,} bytes early")
                done += count
        except OSError as error:
            raise damaged(f"byte {offset + done:,} cannot be read: {reason(error)}") from None

    def take(self, offset: int, size: int) -> bytes:
        try:
            data = os.pread(self._fd, size, offset)
        except OSError as error:
            raise damaged(f"byte {offset:,} cannot be read: {reason(error)}") from None
        if len(data) != size:
            raise damaged(f"ends at byte {offset + len(data):,}, {size - len(data):,} bytes early")
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


TRIES = 5
WAIT = 0.2  # seconds before the second try; each later one waits twice as long
SMALL = 4 << 20  # a file up to this size comes in one request
EDGE = 1 << 18  # of a larger one, the beginning and the end: pickle, headers and directory are there, in small pieces
TOGETHER = 64  # small ranges that are asked for at the same time
BLOCK = 1 << 21  # what is read ahead of a large file at a time
BESIDE = 4096  # a small range that begins this close in front of a large one comes along with it


class RemoteFile:
    """A file behind an fsspec URL, read by ranges; one that fails is asked for again, from where it broke off.

    A round trip takes as long as some megabytes, so small ranges come together, or along with a large one beside them,
    and are kept.
    """

    def __init__(self, filesystem: Any, path: str, size: int) -> None:
        self._filesystem, self._path = filesystem, path
        self.name, self.size = path, size
        self._lock = threading.Lock()
        self._kept: list[tuple[int, bytes]] = []  # by offset; other threads may read it while one inserts
        self._wanted: list[tuple[int, int]] = []
        self.ahead = 0
        """How many blocks behind its beginning to ask for together with it, where all will be read."""
        self._begun = False

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = self._get(offset, len(view))

    def take(self, offset: int, size: int) -> bytes:
        return bytes(self._get(offset, size))

    def _get(self, offset: int, size: int) -> memoryview | bytes:
        if not self._begun:
            with self._lock:
                if not self._begun:
                    self.prefetch(self._edges())
                    for missing in self._edges():
                        if self.known(*missing) is None:
                            self._keep(missing[0], self._fetch(*missing))
                    self._begun = True
        known = self.known(offset, size)
        if known is not None:
            return known
        start = self._piece(offset)
        if start is not None and self.ahead:  # read ahead in part
            half = start[0] + len(start[1])
            return start[1][offset - start[0] :] + bytes(self._get(half, offset + size - half))
        end = offset + size
        before = bisect_left(self._wanted, (offset,)) - 1
        first = self._wanted[before][0] if before >= 0 and offset - self._wanted[before][0] <= BESIDE else offset
        data = self._fetch(first, end - first)
        for at, length in self._wanted[bisect_left(self._wanted, (first,)) : bisect_left(self._wanted, (end,))]:
            if at + length <= end:
                with self._lock:
                    self._keep(at, data[at - first : at - first + length])
        return memoryview(data)[offset - first :]

    def _edges(self) -> list[tuple[int, int]]:
        """What is needed first: the beginning and, of a zip file, the end; of a DCP file, what its index says."""
        if self.size <= SMALL:
            return [(0, self.size)]
        name = self.name.lower()
        if name.endswith(".distcp"):
            return []
        last = self.size - EDGE
        blocks = range(EDGE, min(last, EDGE + self.ahead * BLOCK), BLOCK)
        found = [(0, EDGE), *((at, min(BLOCK, last - at)) for at in blocks)]
        return found if name.endswith((".safetensors", ".gguf")) else [*found, (last, EDGE)]

    def known(self, offset: int, size: int) -> bytes | None:
        """Bytes that are here already."""
        start, data = self._piece(offset) or (offset, b"")
        return data[offset - start : offset - start + size] if offset + size <= start + len(data) else None

    def _piece(self, offset: int) -> tuple[int, bytes] | None:
        """What is kept around an offset."""
        i = bisect_right(self._kept, offset, key=itemgetter(0))
        start, data = self._kept[i - 1] if i else (offset, b"")
        return (start, data) if start <= offset < start + len(data) else None

    def _keep(self, offset: int, data: bytes) -> None:
        insort(self._kept, (offset, data), key=itemgetter(0))

    def _fetch(self, offset: int, size: int) -> bytes:
        data, tries = b"", 0
        while len(data) < size:
            got = b""
            try:
                got = bytes(self._filesystem.cat_file(self._path, start=offset + len(data), end=offset + size))
            except Exception as error:  # every store has errors of its own
                if is_final(error) or tries + 1 >= TRIES:
                    raise unreadable(f"cannot be fetched: {network_words(error)}") from None
            data += got
            if len(data) < size:
                tries += 1
                if tries >= TRIES:
                    raise damaged(f"ends {size - len(data):,} bytes early")
                time.sleep(WAIT * 2 ** (tries - 1))
        return data

    def prefetch(self, ranges: list[tuple[int, int]]) -> None:
        """Ask for many small ranges at once; what does not come will be asked for by itself, and say what is wrong."""
        ranges = [r for r in ranges if self.known(*r) is None] if self.size > SMALL else []
        for i in range(0, len(ranges), TOGETHER):
            some = ranges[i : i + TOGETHER]
            starts, ends = [at for at, _ in some], [at + size for at, size in some]
            try:
                found = self._filesystem.cat_ranges([self._path] * len(some), starts, ends, on_error="return")
            except Exception:
                return
            for (at, size), data in zip(some, found, strict=True):
                if isinstance(data, bytes) and len(data) == size:
                    self._keep(at, data)

    def bring(self, ranges: list[tuple[int, int]]) -> None:
        """Small ranges to keep when something right behind or around them is read."""
        self._wanted = sorted(ranges)

    def forget(self) -> None:
        """Keep no bytes of a large file any longer."""
        self._kept = [] if self.size > SMALL else self._kept

    def close(self) -> None:
        self._kept = []


def is_final(error: Exception) -> bool:
    """Whether asking again cannot help."""
    return isinstance(error, FileNotFoundError | PermissionError | NotImplementedError | ImportError)


def network_words(error: BaseException) -> str:
    """What a remote store said, in one line, and that it was the network if it was."""
    chain, seen = [error], error
    while (seen := seen.__cause__ or seen.__context__) is not None and len(chain) < 10:  # type: ignore[assignment]
        chain.append(seen)
    words = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    named = any(isinstance(e, ConnectionError | TimeoutError) or _NETWORK.search(type(e).__name__) for e in chain)
    return f"network error ({words[:300]})" if named else words[:300]


_NETWORK = re.compile(r"Connect|Timeout|Timed|DNS|Socket|Unreachable|HTTPClientError|IncompleteRead|ServerDisconnected")


class Memory:
    """Bytes that are here already."""

    def __init__(self, data: bytes, name: str = "") -> None:
        self.name, self.size, self._data = name, len(data), data

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = self._data[offset : offset + len(view)]

    def take(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    def close(self) -> None:
        return None


class Window:
    """A stretch of another source, seen as a file: the blobs inside a DCP file are whole files themselves."""

    def __init__(self, whole: Source, start: int, size: int) -> None:
        if start < 0 or size < 0 or start + size > whole.size:
            raise damaged(f"an entry claims bytes {start:,} to {start + size:,} of {whole.size:,}")
        self.name, self.size, self.start, self._whole = whole.name, size, start, whole

    def read_into(self, view: memoryview, offset: int) -> None:
        if offset + len(view) > self.size:
            raise damaged(f"an entry ends at byte {self.size:,} of its own")
        self._whole.read_into(view, self.start + offset)

    def take(self, offset: int, size: int) -> bytes:
        return self._whole.take(self.start + offset, size)

    def close(self) -> None:
        return None

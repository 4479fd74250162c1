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


class RemoteFile:
    """A file behind an fsspec URL, read by ranges; one that fails is asked for again, from where it broke off."""

    def __init__(self, filesystem: Any, path: str, size: int) -> None:
        self._filesystem, self._path = filesystem, path
        self.name, self.size = path, size
        self._fetched: dict[tuple[int, int], bytes] = {}
        self._lock = threading.Lock()
        self._edges: dict[int, bytes] = {}

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = self.take(offset, len(view))

    def take(self, offset: int, size: int) -> bytes:
        known = self._fetched.pop((offset, size), None)
        if known is not None:
            return known
        for start, end in ((0, self.size),) if self.size <= SMALL else ((0, EDGE), (self.size - EDGE, self.size)):
            if start <= offset and offset + size <= end:
                with self._lock:
                    if start not in self._edges:
                        self._edges |= self._both_edges()
                    if start not in self._edges:
                        self._edges[start] = self._fetch(start, end - start)
                return self._edges[start][offset - start : offset - start + size]
        return self._fetch(offset, size)

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
        """Ask for many small ranges at once; a round trip for each would take as long as reading the file."""
        ranges = [] if self.size <= SMALL else [r for r in ranges if r[0] + r[1] > EDGE and r[0] < self.size - EDGE]
        for i in range(0, len(ranges), TOGETHER):
            self._fetched |= self._at_once(ranges[i : i + TOGETHER])

    def _at_once(self, ranges: list[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        """Those of the ranges that came whole; the others will be asked for by themselves, and say what is wrong."""
        starts, ends = [at for at, _ in ranges], [at + size for at, size in ranges]
        try:
            found = self._filesystem.cat_ranges([self._path] * len(ranges), starts, ends, on_error="return")
        except Exception:
            return {}
        pairs = zip(ranges, found, strict=True)
        return {r: data for r, data in pairs if isinstance(data, bytes) and len(data) == r[1]}

    def _both_edges(self) -> dict[int, bytes]:
        """Whoever needs the beginning of a large file mostly needs its end: one round trip for both."""
        if self.size <= SMALL or self._edges:
            return {}
        return {at: data for (at, _), data in self._at_once([(0, EDGE), (self.size - EDGE, EDGE)]).items()}

    def close(self) -> None:
        self._fetched.clear()
        self._edges.clear()


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

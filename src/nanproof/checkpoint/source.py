"""Where bytes come from: a local file read with ``pread``, a window into one, memory, or a remote file.

Files are not mapped into memory: mapped pages count as resident memory, and a file that shrinks while it is
read would end the process with SIGBUS. Here a short read is a `Flaw` like any other.
"""

from __future__ import annotations

import errno
import os
import stat
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


class RemoteFile:
    """A file behind an fsspec URL."""

    def __init__(self, filesystem: Any, path: str, size: int) -> None:
        self._filesystem, self._path = filesystem, path
        self.name, self.size = path, size

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = self.take(offset, len(view))

    def take(self, offset: int, size: int) -> bytes:
        try:
            data = self._filesystem.cat_file(self._path, start=offset, end=offset + size)
        except Exception as error:  # every store has errors of its own
            raise unreadable(f"cannot be fetched: {type(error).__name__}: {error}") from None
        if len(data) != size:
            raise damaged(f"ends {size - len(data):,} bytes early")
        return bytes(data)

    def close(self) -> None:
        return None


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

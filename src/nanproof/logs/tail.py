"""A file that grows: its new bytes, whatever happens to it meanwhile.

Rotation (another file under the name), truncation, deletion and re-creation are noticed: the old file is read to its
end first, then ``None`` says that the file starts over. A file that was cut and has already grown beyond its old length
is recognized by its last bytes, which are no longer where they were.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import UsageError

CHUNK = 1 << 17
"""Small enough that what becomes of a chunk stays in the caches of the processor."""
_MARK = 64


class Tail:
    """Reads on where it stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._offset = 0
        self._mark = b""

    def chunks(self) -> Iterator[bytes | None]:
        """The bytes that are new, piece by piece; None where the file starts over."""
        if self._fd is None and not self._open():
            return
        if self._was_cut():
            self._offset, self._mark = 0, b""
            yield None
        yield from self._rest()
        if self._was_replaced():
            self.close()
            if self._open():
                yield None
                yield from self._rest()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._offset, self._mark = None, 0, b""

    def __del__(self) -> None:
        self.close()

    def _open(self) -> bool:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hold us up
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be read: {error.strerror}", hint="name a log that you may read"
            ) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise UsageError(f"{self.path} is not a file", hint="write the log to a file and name that")
        self._fd = fd
        return True

    def _rest(self) -> Iterator[bytes]:
        assert self._fd is not None
        while data := os.pread(self._fd, CHUNK, self._offset):
            self._offset += len(data)
            self._mark = (self._mark + data[-_MARK:])[-_MARK:]
            yield data

    def _was_cut(self) -> bool:
        assert self._fd is not None
        if os.fstat(self._fd).st_size < self._offset:
            return True
        return os.pread(self._fd, len(self._mark), self._offset - len(self._mark)) != self._mark

    def _was_replaced(self) -> bool:
        assert self._fd is not None
        try:
            there = os.stat(self.path)  # noqa: PTH116
        except OSError:
            return False  # gone; it may come again
        here = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

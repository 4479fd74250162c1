"""Every byte that nanproof writes goes through here, so that a kill at any moment leaves old or new, never torn.

>>> import tempfile, pathlib
>>> folder = pathlib.Path(tempfile.mkdtemp())
>>> write_atomic(folder / "a.json", b"{}")
>>> (folder / "a.json").read_bytes()
b'{}'

Each operation passes a named fault point. Fault points do nothing until a test arms one, in this process with
`arm` or in a child through the environment variable ``NANPROOF_FAULT``, for example ``write:2:enospc``: the
second time that ``write`` is passed, it fails as a full disk does.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import io
import json
import os
import re
import shutil
import signal
import socket
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, cast

from .errors import LockedError, UsageError

POINTS = ("create", "write", "fsync", "rename", "fsync-dir", "append", "truncate", "remove", "mkdir", "lock")
FAULTS = ("kill", "enospc", "eio", "short")
Fault = Literal["kill", "enospc", "eio", "short"]

_armed: dict[str, tuple[int, Fault]] = {}
_passed: dict[str, int] = {}


def arm(point: str, *, on: int = 1, fault: Fault = "enospc") -> None:
    """Make the ``on``-th pass of a fault point fail; ``kill`` ends the process with SIGKILL."""
    if point not in POINTS or fault not in FAULTS:
        raise UsageError(f"no fault {point}:{fault}", hint=f"points are {POINTS}, faults are {FAULTS}")
    _armed[point] = (on, fault)
    _passed[point] = 0


def disarm() -> None:
    """Switch all fault points off again."""
    _armed.clear()
    _passed.clear()


def _arm_from_environment() -> None:
    for spec in filter(None, os.environ.get("NANPROOF_FAULT", "").split(",")):
        point, on, fault = spec.split(":")
        arm(point, on=int(on), fault=cast(Fault, fault))


def _fault(point: str, data: memoryview | None = None) -> memoryview | None:
    """Pass a fault point; returns what is left to write when the armed fault is a short write."""
    if point not in _armed:
        return data
    on, fault = _armed[point]
    _passed[point] += 1
    if _passed[point] != on:
        return data
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "short" and data is not None:
        return data[: len(data) // 2]
    code = errno.EIO if fault == "eio" else errno.ENOSPC
    raise OSError(code, f"{os.strerror(code)} (armed at {point})")


def open_file(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A file that somebody else wrote, to be read; anything but a regular file is an `OSError`.

    A named pipe in a project would otherwise hold up whoever opens it until somebody writes into it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "not a regular file", os.fspath(path))
    return os.fdopen(fd, "rb")


def file_bytes(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a file, as `open_file` opens it."""
    with open_file(path) as file:
        return file.read()


def file_text(path: str | os.PathLike[str], *, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text of a file, as `open_file` opens it, with newlines as Python has them."""
    with io.TextIOWrapper(open_file(path), encoding=encoding, errors=errors) as file:
        return file.read()


class _Stream(io.RawIOBase):
    """A raw file whose writes pass the fault point and are never silently short."""

    def __init__(self, path: Path) -> None:
        _fault("create")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return os.lseek(self._fd, offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        data = os.read(self._fd, len(memoryview(buffer).cast("B")))
        memoryview(buffer).cast("B")[: len(data)] = data
        return len(data)

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        allowed = _fault("write", view)
        assert allowed is not None
        done = 0
        while done < len(allowed):
            done += os.write(self._fd, allowed[done:])
        if done < len(view):
            raise OSError(errno.ENOSPC, f"only {done} of {len(view)} bytes were written")
        return done

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


def _sync_folder(folder: Path) -> None:
    _fault("fsync-dir")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _beside(path: Path) -> Path:
    """A name in the same folder (rename is atomic only within one filesystem) that no reader takes for real."""
    _clean(path.parent)
    return path.with_name(f".{path.name}.{os.getpid()}-{_machine()}.tmp")


_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)-(?P<machine>[0-9a-f]{8})\.tmp")
_cleaned: set[str] = set()


def intended(path: str | os.PathLike[str]) -> Path:
    """The file that a temporary one was to become; any other path as it is.

    >>> str(intended("runs/.report.html.12-0123abcd.tmp"))
    'runs/report.html'
    """
    found = _TEMPORARY.fullmatch(Path(path).name)
    return Path(path).with_name(found["name"]) if found else Path(path)


@functools.cache
def _machine() -> str:
    """This machine and this namespace of processes: elsewhere the same number means another process."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{zlib.crc32(f'{socket.gethostname()}/{space}'.encode()):08x}"


def _clean(folder: Path) -> None:
    """Remove what a killed process of this machine left in a folder; once for each folder that is written to."""
    if str(folder) in _cleaned:
        return
    _cleaned.add(str(folder))
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name)
            if found and found["machine"] == _machine() and not _is_alive(int(found["pid"])):
                with suppress(OSError):
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


@contextmanager
def atomic_file(path: str | os.PathLike[str], *, check: Callable[[], None] | None = None) -> Iterator[IO[bytes]]:
    """A binary file that appears under ``path``, whole, when the block ends, and not at all if it raises.

    ``check`` is called right before the file takes its name, and may raise to prevent it.

    >>> import tempfile, pathlib
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "weights.bin"
    >>> with atomic_file(target) as file:
    ...     _ = file.write(b"abc")
    ...     target.exists()
    False
    >>> target.read_bytes()
    b'abc'
    """
    target = Path(path)
    temporary = _beside(target)
    try:
        with io.BufferedRandom(_Stream(temporary), 1 << 20) as file:
            yield cast(IO[bytes], file)
            file.flush()
            _fault("fsync")
            os.fsync(file.fileno())
        if check is not None:
            check()
        _fault("rename")
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(target.parent)


def write_in_place(path: str | os.PathLike[str], data: bytes) -> None:
    """New bytes for a file that keeps its other names; a kill half-way tears it, so a copy must exist elsewhere."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hold us up
    try:
        allowed = _fault("write", memoryview(data))
        assert allowed is not None
        done = 0
        while done < len(allowed):
            done += os.write(fd, allowed[done:])
        if done < len(data):
            raise OSError(errno.ENOSPC, f"only {done} of {len(data)} bytes were written")
        os.ftruncate(fd, len(data))
        _fault("fsync")
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Replace a file by new contents: readers see the old file or the new one."""
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder that appears under ``path``, whole, when the block ends; ``path`` must not exist yet.

    The block gets a temporary folder to fill, with this module or with a library that only writes folders.
    """
    target = Path(path)
    if target.exists():
        raise UsageError(f"{target} exists already", hint="choose another name")
    temporary = _beside(target)
    make_folder(temporary)
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                _sync_file(Path(folder, name))
            _sync_folder(Path(folder))
        _fault("rename")
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(target.parent)


def _sync_file(path: Path) -> None:
    _fault("fsync")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create a folder and its parents; one that exists is fine."""
    _fault("mkdir")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def move(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file or folder within one filesystem; refuses to overwrite."""
    if os.path.lexists(target):
        raise UsageError(f"{target} exists already", hint="choose another place, or move it away first")
    _fault("rename")
    os.rename(source, target)
    _sync_folder(Path(target).parent)
    if Path(source).parent != Path(target).parent:
        _sync_folder(Path(source).parent)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a file or a folder; one that is gone already is fine.

    A folder is renamed out of sight first, so that a kill half-way leaves no half-empty folder under its name.
    """
    target = Path(path)
    _fault("remove")
    if target.is_dir() and not target.is_symlink():
        hidden = _beside(target)
        with suppress(FileNotFoundError):  # what a killed process left may have been cleaned by this moment
            os.rename(target, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        target.unlink(missing_ok=True)


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a file with its permissions and times, into a scratch folder: nothing waits for the disk."""
    _fault("create")
    shutil.copy2(source, target)


def link(target: str, path: str | os.PathLike[str]) -> None:
    """Point the symbolic link ``path`` at ``target``, replacing it atomically."""
    place = Path(path)
    temporary = _beside(place)
    _fault("create")
    with suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(target)
    _fault("rename")
    os.replace(temporary, place)
    _sync_folder(place.parent)


@contextmanager
def output_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file that a child process writes its output into, growing while it runs."""
    _fault("create")
    with open(path, "ab") as stream:
        yield stream


class JsonLines:
    """An append-only file of JSON lines; whole lines only, whatever interrupts it.

    >>> import tempfile, pathlib
    >>> log = JsonLines(pathlib.Path(tempfile.mkdtemp()) / "log.jsonl")
    >>> log.append([{"step": 1}, {"step": 2}])
    >>> list(read_jsonl(log.path))
    [{'step': 1}, {'step': 2}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records with a single write; a torn line left by a crash before is cut off first."""
        data = b"".join(json.dumps(r, allow_nan=False, separators=(",", ":")).encode() + b"\n" for r in records)
        if not data:
            return
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _cut_torn_line(fd)
            whole = os.fstat(fd).st_size
            allowed = _fault("append", memoryview(data))
            assert allowed is not None
            done = os.write(fd, allowed)
            if done < len(data):  # a full disk: take the half line back rather than leave it
                os.ftruncate(fd, whole)
                raise OSError(errno.ENOSPC, f"{self.path}: only {done} of {len(data)} bytes fitted")
        finally:
            os.close(fd)


def _cut_torn_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return
    _fault("truncate")
    end = size
    while end > 0:
        start = max(0, end - (1 << 16))
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            os.ftruncate(fd, start + newline + 1)
            return
        end = start
    os.ftruncate(fd, 0)


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file; a torn last line is passed over, damage before it is not."""
    with open_file(path) as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


class Lock:
    """Ownership of a folder by one live process; the kernel frees it when the process ends, however it ends.

    >>> import tempfile
    >>> lock = Lock(tempfile.mkdtemp())
    >>> lock.acquire(); lock.release()
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / ".lock"
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise `LockedError` naming the owner."""
        _fault("lock")
        try:  # not through a link: the file is emptied, and a folder out of a repository may point it anywhere
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UsageError(f"{self.path} is a symbolic link", hint="remove it, then run again") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(fd, 200, 0).decode(errors="replace").strip() or "an unknown process"
            os.close(fd)
            raise LockedError(
                f"{self.path.parent} is in use by {owner}",
                hint="give this run a folder of its own, or end the other run first",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._fd = fd

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        if self._fd is not None:
            with suppress(OSError):  # a program may have closed every file, and opened others since
                if os.fstat(self._fd).st_ino == self.path.stat().st_ino:
                    os.close(self._fd)
            self._fd = None


_arm_from_environment()

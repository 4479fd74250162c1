"""Whether somebody still writes to a run, seen from outside and without touching it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import NanproofError
from ..files import file_bytes, file_text
from ..records import Repair
from .state import Signs

RUN_LOG = "training_log.jsonl"
_WRITES = 0o3  # the bits of a file's flags that are set when it is open for writing, alone or with reading


def signs_of(path: Path, home: Path | None = None) -> Signs:
    """What shows of a run: its lock, who has its log open, when it was written, the exit code that was recorded.

    ``home`` is the folder of a run whose log is a file.
    """
    log = path / RUN_LOG if (path / RUN_LOG).is_file() else path
    written = _written(log)
    if written is None:
        return Signs()
    home = home or path
    record, recorded = record_of(home)
    code = record.get("exit_code")
    held = _lock_is_held(home / ".lock")
    claimed = held is False and record.get("state") == "running"
    if claimed and _owner_lives(
        home / ".lock"
    ):  # the folder is claimed, and the guard takes the lock at its first step
        held = True
    killed = claimed and not held
    if held is None:
        held = True if log.is_file() and _has_writer(log) else None
    # the record of an earlier run in the same folder says nothing about a later one
    current = recorded + 1 >= written and not held
    return Signs(
        open=held,
        quiet=max(0.0, time.time() - written),
        killed=killed,
        exit_code=code if current and isinstance(code, int) else None,
        ended=str(record.get("ended", "")) if current else "",
        repairs=_repairs(home, record),
    )


def _written(log: Path) -> float | None:
    """When a log, or the newest file of one that is a folder, was last written."""
    try:
        if log.is_dir():
            return max((f.stat().st_mtime for f in log.iterdir() if f.is_file()), default=None)
        return log.stat().st_mtime
    except OSError:
        return None


def _repairs(home: Path, record: dict[str, Any]) -> tuple[str, ...]:
    """The repairs that the run has in force; those of an earlier run in the same folder are not."""
    file = home / "repairs.json"
    try:
        if file.stat().st_mtime + 1 < float(record.get("started", 0)):
            return ()
        found = [Repair.from_json(r) for r in json.loads(file_bytes(file))]
    except (OSError, ValueError, TypeError, NanproofError):
        return ()
    return tuple(f"{r.name} {r.does} since step {r.step:,}: {r.why}" for r in found)


def record_of(path: Path) -> tuple[dict[str, Any], float]:
    """The run.json of a run, and when it was written."""
    record = path / "run.json"
    try:
        data = json.loads(file_bytes(record))
        return (data if isinstance(data, dict) else {}), record.stat().st_mtime
    except (OSError, ValueError):
        return {}, 0.0


def _lock_is_held(lock: Path) -> bool | None:
    """Whether a process on this machine holds the lock; None when it is another machine's, or there is none.

    The lock itself is never tried: for that instant a starting run could not take it.
    """
    try:
        owner, inode = file_text(lock, errors="replace"), lock.stat().st_ino
        held = Path("/proc/locks").read_text()
    except OSError:
        return None
    if not owner.strip().endswith(f" on {socket.gethostname()}"):
        return None
    return any(line.split()[-3].endswith(f":{inode}") for line in held.splitlines() if len(line.split()) >= 8)


def _owner_lives(lock: Path) -> bool:
    """Whether the process that wrote the lock is still there, and not a later one with its number."""
    try:
        pid, written = int(file_text(lock, errors="replace").split()[1]), lock.stat().st_mtime
        ticks = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return False
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK") <= written + 1


def _has_writer(log: Path) -> bool:
    """Whether another process of this user has the file open for writing."""
    try:
        wanted = log.stat()
    except OSError:
        return False
    for fd in _files_of_others():
        with suppress(OSError, ValueError, IndexError):
            found = os.stat(fd)  # noqa: PTH116 - a link into another process, asked for thousands of times
            if (found.st_ino, found.st_dev) == (wanted.st_ino, wanted.st_dev):
                info = Path(fd.replace("/fd/", "/fdinfo/")).read_text()
                flags = next(line.split()[1] for line in info.splitlines() if line.startswith("flags:"))
                if int(flags, 8) & _WRITES:
                    return True
    return False


def _files_of_others() -> Iterator[str]:
    mine = str(os.getpid())
    with suppress(OSError):
        for process in [p for p in _listed("/proc") if p.isdigit() and p != mine]:
            with suppress(OSError):
                yield from (f"/proc/{process}/fd/{name}" for name in _listed(f"/proc/{process}/fd"))


def _listed(folder: str) -> list[str]:
    with os.scandir(folder) as found:
        return [entry.name for entry in found]

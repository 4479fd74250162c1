"""Files that a script is about to empty are copied first.

A script often begins with ``open("train.jsonl", "w")``. `nanproof run` keeps the log of the run before; a smoke test,
whose ten steps are worth nothing, keeps every file and puts it back.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import file_bytes, make_folder, write_atomic

log = logging.getLogger("nanproof")

LARGEST = 256 << 20  # bytes of a file that is copied
_active: Overwritten | None = None
_hooked = False


class Overwritten:
    """Originals of files that were opened with mode "w" while a script ran."""

    def __init__(self, folder: Path, *, logs_only: bool = False) -> None:
        """With ``logs_only`` only logs of earlier runs are kept, and that is said."""
        self._logs_only, self._started = logs_only, time.time()
        self._folder = folder / "overwritten"
        self._kept: dict[Path, Path] = {}
        self.too_large: list[Path] = []
        self._process = os.getpid()

    def __enter__(self) -> Overwritten:
        global _active, _hooked
        _active = self
        if not _hooked:  # Python offers no way to take an audit hook away again; without an active copy it does nothing
            sys.addaudithook(_hear)
            _hooked = True
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        _active = None

    def keep(self, path: Path) -> None:
        """Copy a file that is about to be emptied."""
        place = path.absolute()
        if place in self._kept or self._folder.parent.absolute() in place.parents or os.getpid() != self._process:
            return
        if not place.is_file() or not place.stat().st_size:
            return
        if self._logs_only and (place.stat().st_mtime >= self._started or not _is_log(place)):
            return
        if place.stat().st_size > LARGEST:
            self.too_large.append(place)
            return
        copy = make_folder(self._folder) / f"{len(self._kept)}-{place.name}"
        self._kept[place] = copy
        write_atomic(copy, file_bytes(place))
        if self._logs_only:
            log.warning("nanproof: the script overwrites %s, a log of an earlier run; a copy is in %s", path, copy)

    def restore(self) -> list[str]:
        """Put the originals back; what the script still writes goes to its own, nameless file."""
        done = []
        for place, copy in self._kept.items():
            with suppress(OSError):
                original = file_bytes(copy)
                if not place.is_file() or file_bytes(place) != original:
                    write_atomic(place, original)
                    done.append(os.path.relpath(place))
        self._kept = {}
        return done


def _is_log(path: Path) -> bool:
    from ..logs.find import find_logs  # brings numpy, which a program may want to import itself first

    return bool(find_logs(path))


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    kept = _active
    if kept is None or event != "open":
        return
    path, mode = arguments[0], arguments[1]
    if isinstance(mode, str) and "w" in mode and isinstance(path, str | os.PathLike):
        with suppress(Exception):  # a copy that fails must not fail the script
            kept.keep(Path(path))

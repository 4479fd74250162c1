"""Which files had no findings last time, so that they need not be read again.

What a file is found guilty of depends on the files it works with, so the record holds for the whole set: it counts only
while no file, no setting and no rule has changed. It lies in ``.nanproof/cache`` of a project (a folder with .git or
pyproject.toml); elsewhere, and where nothing can be written, nothing is recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from .. import __version__, files
from ..files import file_bytes
from ..plugins import sources_of

PLACE = Path(".nanproof", "cache", "lint.json")


class Cache:
    """The files that were clean, under a key made of everything that a finding depends on."""

    def __init__(self, home: Path, sources: Sequence[Path], rules: Iterable[str], settings: object) -> None:
        self._path = home / PLACE if any((home / mark).exists() for mark in (".git", "pyproject.toml")) else None
        self._key = _key(sources, sorted(rules), settings) if self._path is not None else ""
        self._clean = self._read()

    def is_clean(self, path: Path) -> bool:
        return str(path.absolute()) in self._clean

    def write(self, clean: Iterable[Path]) -> None:
        """Record the clean files of a run that looked at all of them."""
        if self._path is None:
            return
        names = sorted(str(p.absolute()) for p in clean)
        with suppress(OSError):
            folder = files.make_folder(self._path.parent)
            if not (mark := folder / ".gitignore").exists():
                files.write_atomic(mark, "*\n")
            files.write_atomic(self._path, json.dumps({"key": self._key, "clean": names}))

    def _read(self) -> frozenset[str]:
        if self._path is None:
            return frozenset()
        try:
            data = json.loads(file_bytes(self._path))
            return frozenset(map(str, data["clean"])) if data["key"] == self._key else frozenset()
        except (OSError, ValueError, TypeError, KeyError):
            return frozenset()


def _key(sources: Sequence[Path], rules: Sequence[str], settings: object) -> str:
    own = [Path(folder, name) for folder, _, names in os.walk(Path(__file__).parent) for name in sorted(names)]
    marks = [f"{__version__} {rules} {settings}"]
    for path in [*sources, *(p for p in own if p.suffix == ".py"), *sources_of("rules"), *sources_of("checks")]:
        try:
            stat = path.stat()
            marks.append(f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}")
        except OSError:
            marks.append(f"{path.absolute()} ?")
    return hashlib.sha256("\n".join(marks).encode("utf-8", "replace")).hexdigest()

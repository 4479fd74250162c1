"""Changes to the user's files that can be taken back, bit for bit, and that a kill cannot leave half done.

>>> import tempfile, pathlib
>>> home = pathlib.Path(tempfile.mkdtemp())
>>> _ = (home / "train.py").write_bytes(b"old")
>>> done = apply({home / "train.py": b"new"}, home=home, why="lint --fix")
>>> (home / "train.py").read_bytes(), [p.name for p in undo(home)], (home / "train.py").read_bytes()
(b'new', ['train.py'], b'old')

Each application is a folder ``.nanproof/journal/ID`` that is there before the first file changes: ``entry.json``
says which files, with the hashes of their old and new bytes, and beside it lie the old bytes themselves. The file
``applied`` marks the end, ``undoing`` the beginning and ``undone`` the end of taking it back. An application with
neither ``applied`` nor ``undone`` was killed; `recover` takes it back.

An entry is not trusted: paths in it are relative to the project and must stay inside of it once all links are followed,
so that a journal out of a cloned repository cannot make an undo write elsewhere.
"""

from __future__ import annotations

import datetime
import glob
import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import files
from .errors import FormatError, UsageError
from .files import file_bytes
from .records import from_json, to_json

FOLDER = Path(".nanproof") / "journal"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """One file of an application: its hashes, and its permissions; ``old`` is None for a file that was created."""

    path: str
    """Relative to the project."""
    old: str | None
    new: str
    mode: int | None = None
    backup: str | None = None
    linked: bool = False
    """Whether the file has other names (hard links), so that it must be written in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """What was changed, when and why."""

    id: str
    time: str
    why: str
    files: tuple[Touched, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION


def apply(
    changes: Mapping[Path, bytes],
    *,
    home: Path,
    why: str,
    details: Mapping[str, Any] | None = None,
    seen: Mapping[Path, bytes] | None = None,
) -> Application:
    """Write new contents into files, journal first, each file atomically, with the permissions and hard links it had.

    Files that do not exist are created. If one of them cannot be written, or is no longer what it was when it was
    ``seen`` (by default, when this began), those before it are put back. All files must lie in ``home``.
    """
    recover(home)
    contents = {_inside(home, path.absolute()): data for path, data in changes.items()}
    expected = {_inside(home, path.absolute()): data for path, data in (seen or {}).items()}
    for path, data in expected.items():
        if _hash(path) != _digest(data):
            raise UsageError(f"{path} was edited since it was read; nothing was written", hint="run it again")
    _refuse_read_only(contents, home)
    place = files.make_folder(_place(home))
    _keep_out_of_git(home)
    with _Locked(place):
        number = 1 + max((int(a.id) for a in _entries(home)), default=0)
        application, backups = _intend(f"{number:04d}", home, contents, why, details or {})
        with files.atomic_folder(place / application.id) as folder:
            for name, data in backups.items():
                files.write_atomic(folder / name, data)
            files.write_atomic(folder / "entry.json", json.dumps(to_json(application), indent=1))
        try:
            for touched, (path, data) in zip(application.files, contents.items(), strict=True):
                _write(path, data, touched, expected=touched.old)
        except _Changed as changed:
            _restore(home, application)
            words = f"{changed.path} was edited in this moment; it was left as it is, and nothing else was changed"
            raise UsageError(words, hint="run it again") from None
        except OSError as error:
            _restore(home, application)  # if this fails too, the journal has no end mark, and the next run does it
            raise UsageError(f"{error.strerror}; what was written was put back", hint=_ROOM) from error
        files.write_atomic(place / application.id / "applied", b"")
    return application


_ROOM = "make room, or make the files writable, then run again"


def applications(home: Path) -> tuple[Application, ...]:
    """What can be undone, oldest first."""
    return tuple(a for a in _entries(home) if _is(home, a, "applied") and not _is(home, a, "undone"))


def undo(home: Path, id: str | None = None) -> tuple[Path, ...]:
    """Put the exact old bytes back: of the last application, or of the one named; returns the files.

    Files that the application created are removed. Nothing is touched if any file was edited since.
    """
    recover(home)
    chosen = _choose(home, id)
    with _Locked(home / FOLDER):
        paths = [_inside(home, touched.path) for touched in chosen.files]
        for path, touched in zip(paths, chosen.files, strict=True):
            if (now := _hash(path)) not in (touched.new, touched.old):
                what = "was removed" if now is None else "was edited"
                raise UsageError(
                    f"{path} {what} since {chosen.why} changed it; nothing was undone",
                    hint=f"the old contents are in {home / FOLDER / chosen.id / (touched.backup or 'entry.json')}",
                )
        _refuse_read_only(dict.fromkeys(paths, b""), home)
        try:
            _restore(home, chosen)
        except _Changed as changed:
            words = f"{changed.path} was edited in this moment; what was not yet taken back stays as it is"
            raise UsageError(words, hint="nanproof lint --undo takes back the rest") from None
    return tuple(paths)


def unfinished(home: Path) -> tuple[Application, ...]:
    """Applications that a kill left half-way, applying or undoing."""
    return tuple(
        a
        for a in _entries(home)
        if not _is(home, a, "undone") and (_is(home, a, "undoing") or not _is(home, a, "applied"))
    )


def recover(home: Path) -> tuple[Application, ...]:
    """Take back what a kill left half-way; returns what was taken back. Files edited since stay as they are."""
    place = _place(home)
    if not any(place.rglob(".*.tmp")) and not unfinished(home):
        return ()
    with _Locked(place):
        for litter in list(place.rglob(".*.tmp")):
            files.remove(litter)
        found = unfinished(home)
        for application in found:
            _restore(home, application)
    return found


def home_of(path: Path) -> Path:
    """The folder that keeps the journal for a file: that of the project around it, else its own."""
    folder = path.absolute() if path.is_dir() else path.absolute().parent
    marks = (FOLDER, Path("pyproject.toml"), Path(".git"))
    return next((p for p in (folder, *folder.parents) if any((p / m).exists() for m in marks)), folder)


class _Locked:
    """The journal belongs to one process at a time."""

    def __init__(self, place: Path) -> None:
        self._lock = files.Lock(place)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _intend(
    id: str, home: Path, contents: Mapping[Path, bytes], why: str, details: Mapping[str, Any]
) -> tuple[Application, dict[str, bytes]]:
    """The record of what is going to happen, and the old bytes by the name of their backup."""
    touched, backups = [], {}
    for i, (path, data) in enumerate(contents.items()):
        old = file_bytes(path) if path.exists() else None
        inside = path.relative_to(home.resolve()).as_posix()
        name = f"{i:04d}-{path.name}" if old is not None else None
        if name is not None and old is not None:
            backups[name] = old
        touched.append(
            Touched(
                path=inside,
                old=None if old is None else _digest(old),
                new=_digest(data),
                backup=name,
                mode=None if old is None else path.stat().st_mode & 0o7777,
                linked=old is not None and path.stat().st_nlink > 1,
            )
        )
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    application = Application(id=id, time=now, why=why, files=tuple(touched), details=details)
    return application, backups


def _restore(home: Path, application: Application) -> None:
    """Old bytes back where new ones stand; begun and ended with a mark, so that a kill in between is continued."""
    folder = home / FOLDER / application.id
    files.write_atomic(folder / "undoing", b"")
    for touched in application.files:
        path = _inside(home, touched.path)
        for litter in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            files.remove(litter)
        now = _hash(path)
        torn = touched.linked and now is not None and now != touched.old and not _is(home, application, "applied")
        if touched.new == touched.old or (now != touched.new and not torn):
            continue
        if touched.backup is None:
            files.remove(path)
            continue
        if torn and now != touched.new:  # written in place, and killed half-way: or edited since, so it is kept
            files.write_atomic(folder / f"found-{touched.backup}", file_bytes(path))
        backup = file_bytes(folder / touched.backup)
        if _digest(backup) != touched.old:
            raise FormatError(f"{folder / touched.backup} is not what was saved", hint="nothing was written from it")
        _write(path, backup, touched, expected=now)
    files.write_atomic(folder / "undone", b"")


class _Changed(Exception):
    """A file is not what it was a moment ago."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path


def _write(path: Path, data: bytes, touched: Touched, *, expected: str | None) -> None:
    """New contents for a file that still has the expected ones, looked at right before they are replaced."""

    def check() -> None:
        if _hash(path) != expected:
            raise _Changed(path)

    if touched.linked and path.exists():  # a rename would part it from its other names
        check()
        files.write_in_place(path, data)
        return
    with files.atomic_file(path, check=check) as file:
        file.write(data)
        if touched.mode is not None:
            os.fchmod(file.fileno(), touched.mode)


def _choose(home: Path, id: str | None) -> Application:
    possible = applications(home)
    if id is None and possible:
        return possible[-1]
    for application in possible:
        if application.id == id:
            return application
    if id is not None and any(a.id == id for a in _entries(home)):
        raise UsageError(f"{id} is undone already", hint="nothing is left to do")
    what = "there is nothing to undo" if id is None else f"there is no change {id!r} to undo"
    known = ", ".join(a.id for a in possible[-3:])
    raise UsageError(f"{what} in {home}", hint=f"choose from {known}" if known else "run it where the fix was applied")


def _place(home: Path) -> Path:
    """Where the journal lies: in the project itself, not where a link points."""
    for folder in (home / FOLDER.parent, home / FOLDER):
        if folder.is_symlink():
            raise UsageError(f"{folder} is a symbolic link", hint="the journal stays in its project; remove the link")
    return home / FOLDER


def _entries(home: Path) -> list[Application]:
    place = _place(home)
    found = []
    for folder in sorted(p for p in place.glob("[0-9]*") if p.is_dir()):
        try:
            data = json.loads(file_bytes(folder / "entry.json"))
        except (OSError, ValueError, RecursionError):
            raise FormatError(f"{folder} is not a journal entry", hint="move it away") from None
        version = data.get("version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise FormatError(f"{folder} was written by a newer nanproof", hint="update nanproof")
        try:
            application = from_json(Application, data)
        except FormatError as error:
            raise FormatError(f"{folder} is not a journal entry: {error.message}", hint="move it away") from None
        _check(home, folder, application)
        found.append(application)
    return found


_HASH = re.compile(r"[0-9a-f]{64}")


def _check(home: Path, folder: Path, application: Application) -> None:
    """An entry that could reach beyond the project, or whose fields make no sense, is refused as a whole."""
    if application.id != folder.name or not application.id.isdigit() or folder.is_symlink():
        raise FormatError(f"{folder} calls itself {application.id[:20]!r}", hint="move it away")
    for touched in application.files:
        name = touched.backup
        hashes = all(_HASH.fullmatch(h) for h in (touched.new, touched.old) if h is not None)
        if not hashes or (name is None) != (touched.old is None) or not 0 <= (touched.mode or 0) <= 0o7777:
            raise FormatError(
                f"{folder} has an entry for {touched.path[:80]!r} that makes no sense", hint="move it away"
            )
        if name is not None and (name != Path(name).name or name.startswith(".") or (folder / name).is_symlink()):
            raise FormatError(f"{folder} keeps a backup outside of itself", hint="move it away")
        _inside(home, touched.path)


def _is(home: Path, application: Application, mark: str) -> bool:
    return (home / FOLDER / application.id / mark).exists()


def _inside(home: Path, path: Path | str) -> Path:
    """A path with all links followed: replacing a link by a file would leave what it points to as it was.

    It must lie in the project, and not in the journal itself.
    """
    root = home.resolve()
    found = (root / path).resolve()
    if not found.is_relative_to(root) or found.is_relative_to(root / FOLDER):
        hint = "it is changed only from within its own project; nothing was written"
        raise UsageError(f"{path} lies outside of the project {root}", hint=hint)
    return found


def _refuse_read_only(contents: Mapping[Path, bytes], home: Path) -> None:
    for path in contents:
        place = path if path.exists() else path.parent
        for one in {path.parent, place}:
            if not one.exists():
                raise UsageError(f"{one} does not exist; nothing was changed", hint="create the folder first")
            if not os.access(one, os.W_OK) or not one.stat().st_mode & 0o222:
                raise UsageError(f"{one} is read-only; nothing was changed", hint="make it writable, then run again")
    if not os.access(home, os.W_OK) or not home.stat().st_mode & 0o222:
        raise UsageError(
            f"{home} is read-only; nothing was changed", hint="the journal is kept there; make it writable"
        )


def _keep_out_of_git(home: Path) -> None:
    mark = home / FOLDER / ".gitignore"
    if not mark.exists():
        files.write_atomic(mark, "*\n")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hash(path: Path) -> str | None:
    with suppress(FileNotFoundError):
        return _digest(file_bytes(path))
    return None

"""The cure as the user takes it: a command, a config beside the original, a diff; applied with undo if asked for."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import files, journal
from ..config.edits import set_value
from ..config.overrides import plain
from ..config.source import Source
from ..errors import NanproofError, UsageError
from ..files import file_bytes
from .change import Change, Edit, edited
from .scratch import with_edits
from .surface import Surface

WHY = "cure --apply"
DIFF = "cure.diff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change, ready to be used."""

    command: str
    """The training command with it; the files below must be in place first."""
    contents: dict[Path, bytes]
    """New contents of the user's files."""
    project: Path

    @property
    def diff(self) -> str:
        """The difference of the files in unified form."""
        parts: list[str] = []
        for path, new in self.contents.items():
            name = _short(path, self.project)
            old = file_bytes(path).decode(errors="replace").splitlines(keepends=True)
            parts += difflib.unified_diff(old, new.decode(errors="replace").splitlines(keepends=True), name, name)
        return "".join(parts)


def remedy_of(change: Change, surface: Surface) -> Remedy:
    """The change as edits of files where it has some, and as the command for the rest."""
    command, options = with_edits(surface.command, change.edits)
    variables = [f"{e.name}={shlex.quote(e.text or '')}" for e in change.edits if e.route == "variable"]
    shown = command.guarded(options) if options else command.shown
    return Remedy(command=" ".join([*variables, shown]), contents=_contents(change.edits), project=surface.folder)


def _contents(edits: Iterable[Edit]) -> dict[Path, bytes]:
    found: dict[Path, list[Edit]] = {}
    for edit in edits:
        if edit.route == "file":
            found.setdefault(Path(edit.name), []).append(edit)
    return {path: edited(file_bytes(path), own) for path, own in found.items()}


def in_files(change: Change, surface: Surface) -> Remedy:
    """The same with everything in files: overrides of a config become edits of the config.

    Raises `UsageError` when part of it lives on the command line only.
    """
    contents = _contents(change.edits)
    for edit in change.edits:
        if edit.route == "file":
            continue
        held = surface.settings.get(edit.setting) if edit.route == "word" else None
        if held is None or not held.path:
            words = remedy_of(change, surface).command
            raise UsageError(f"{change.name} is no change of a file", hint=f"run: {words}")
        path = (surface.folder / held.path).resolve()
        source = Source(str(path), contents.get(path, file_bytes(path)).decode())
        contents[path] = set_value(source, held.label, plain(edit.text or "")).whole.encode()
    return Remedy(command=surface.command.shown, contents=contents, project=surface.folder)


def is_in_files(change: Change, surface: Surface) -> bool:
    """Whether `apply` can make all of it."""
    try:
        paths = in_files(change, surface).contents
    except NanproofError:
        return False
    return all(p.resolve().is_relative_to(surface.folder.resolve()) for p in paths)


def apply(change: Change, surface: Surface) -> tuple[Path, ...]:
    """Make the change in the user's files; `journal.undo` takes it back."""
    remedy = in_files(change, surface)
    paths = list(remedy.contents)
    if outside := [p for p in paths if not p.resolve().is_relative_to(surface.folder.resolve())]:
        words = remedy_of(change, surface).command
        raise UsageError(f"{outside[0]} is not in {surface.folder}", hint=f"change it there, or run: {words}")
    seen = {p: surface.read[p.resolve()] for p in paths if p.resolve() in surface.read}
    home = journal.home_of(surface.folder)
    journal.apply(remedy.contents, home=home, why=WHY, details={"change": change.name}, seen=seen)
    return tuple(paths)


def write_beside(change: Change, surface: Surface, out: Path) -> tuple[Path, ...]:
    """What can be taken as it is: ``cure.diff``, and ``NAME_cured.yaml`` beside a config that it changes."""
    written: list[Path] = []
    try:
        remedy = in_files(change, surface)
    except NanproofError:
        remedy = remedy_of(change, surface)
    if remedy.contents:
        files.write_atomic(out / DIFF, remedy.diff)
        written.append(out / DIFF)
    for path, new in remedy.contents.items():
        inside = path.resolve().is_relative_to(surface.folder.resolve())
        if path.suffix != ".py" and inside:
            beside = path.with_name(f"{path.stem}_cured{path.suffix}")
            if not beside.exists() or file_bytes(beside) == new:
                files.write_atomic(beside, new)
                written.append(beside)
    return tuple(written)


def _short(path: Path, project: Path) -> str:
    resolved, root = path.resolve(), project.resolve()
    return str(resolved.relative_to(root)) if resolved.is_relative_to(root) else str(path)

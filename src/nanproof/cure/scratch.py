"""A scratch copy of the project, in which one trial runs: what it writes stays there, the user's files untouched.

    place = make_scratch(project, Path("runs/cure-a/trials/lr-2/project"), command, edits)
    subprocess.run(place.words, cwd=place.folder, env=place.environment)

Files up to 32 MB are copied; larger ones, and folders of thousands of files, are linked. Folders that hold the results
of other runs are left out, unless the command names them.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import files
from ..config.project import TOOLS
from ..files import file_bytes
from .change import Edit, edited
from .command import Command

_OUT = re.compile(r"\b(out|output|save|log|logging|results?|run|ckpt|checkpoint|tb)([_-]?(dir|path|folder|root|to))?$")
_SOURCES = {".py", ".ipynb", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".sh"}
LARGE = 32 << 20
MANY = 2000
_LOGS = {"wandb", "mlruns", "lightning_logs", "logs", "tb_logs", "multirun"}
_OUTPUTS = {"runs", "outputs", "output", "checkpoints", "results"} | _LOGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Where a trial runs, and what runs there."""

    folder: Path
    command: Command
    options: tuple[str, ...]
    """For ``nanproof run``."""
    environment: dict[str, str] = field(default_factory=dict)


def make_scratch(project: Path, folder: Path, command: Command, edits: Iterable[Edit]) -> Scratch:
    """Copy the project and make the edits: in the copy, on the command line, in the environment."""
    project = project.resolve()
    edits = tuple(edits)
    if folder.exists():
        files.remove(folder)
    _copy(project, files.make_folder(folder), _named(command, project), {folder.resolve(), _above(folder, project)})
    changed, options = with_edits(command, edits)
    environment = {e.name: e.text or "" for e in edits if e.route == "variable"}
    inside, outside = _files(edits, project)
    for path, own in inside.items():
        target = folder / path.relative_to(project)
        files.make_folder(target.parent)
        files.write_atomic(target, edited(file_bytes(path), own))
    if outside:  # a module of an installed package: the whole package is copied, and found first
        environment["PYTHONPATH"] = os.pathsep.join([str(_packages(folder, outside)), *_paths()])
    pairs = zip(changed.arguments, _values(changed.arguments), strict=True)
    arguments = tuple(_inside(word, project, folder, goes_out) for word, (_, goes_out) in pairs)
    return Scratch(
        folder=folder, command=replace(changed, arguments=arguments), options=options, environment=environment
    )


def with_edits(command: Command, edits: Iterable[Edit]) -> tuple[Command, tuple[str, ...]]:
    """The command with its words and flags changed, and the options of ``nanproof run``."""
    options: list[str] = []
    for edit in edits:
        match edit.route:
            case "word":
                command = command.with_word(edit.name, edit.text or "")
            case "flag":
                command = command.without_flag(edit.name) if edit.remove else command.with_flag(edit.name, edit.text)
            case "option":
                options += [edit.name] if edit.text is None else [f"{edit.name}={edit.text}"]
            case _:
                pass
    return command, tuple(options)


def _paths() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def _above(folder: Path, project: Path) -> Path:
    """The part of the project that holds the trials themselves."""
    inside = folder.resolve()
    return project / inside.relative_to(project).parts[0] if inside.is_relative_to(project) else inside


def _named(command: Command, project: Path) -> set[Path]:
    words = [w for w, goes_out in _values(command.arguments) if w and not goes_out]
    return {path for w in words if (path := (project / w)).exists() and path != project}


def _values(arguments: tuple[str, ...]) -> list[tuple[str, bool]]:
    """The values on the command line, each with whether it names a place to write to.

    >>> _values(("--out", "runs/a", "data.csv", "--log-dir=logs"))
    [('--out', False), ('runs/a', True), ('data.csv', False), ('logs', True)]
    """
    found = []
    for before, word in zip(("", *arguments), arguments, strict=False):
        name, equals, value = word.rpartition("=")
        flag = name if equals else before if before.startswith("-") and "=" not in before else ""
        found.append((value, bool(_OUT.search(flag))))
    return found


def _copy(source: Path, target: Path, named: set[Path], leave: set[Path]) -> None:
    if any(m.is_relative_to(source) for m in leave) and source in leave and source not in named:
        return
    entries = sorted(os.scandir(source), key=lambda e: e.name)
    for entry in entries:
        path = Path(entry.path)
        wanted = any(n == path or path.is_relative_to(n) or n.is_relative_to(path) for n in named)
        if entry.is_dir(follow_symlinks=False):
            if entry.name in TOOLS or path in leave or (entry.name in _OUTPUTS and not wanted):
                continue
            if _count(path) > MANY:
                files.link(str(path), target / entry.name)
            else:
                _copy(path, files.make_folder(target / entry.name), named, leave)
        elif entry.is_symlink():
            files.link(str(path.resolve()), target / entry.name)
        elif entry.is_file():
            if entry.stat().st_size > LARGE:
                files.link(str(path), target / entry.name)
            else:
                files.copy(path, target / entry.name)


def fingerprint(project: Path) -> str:
    """A hash of the project's code and configs: trials of other code say nothing about this one."""
    found = hashlib.sha256()
    for place, folders, names in os.walk(project):
        folders[:] = sorted(f for f in folders if f not in TOOLS | _OUTPUTS)
        for name in sorted(names):
            path = Path(place, name)
            if path.suffix in _SOURCES and not path.stem.endswith("_cured") and path.stat().st_size <= LARGE:
                found.update(f"{path.relative_to(project)}\0".encode(errors="surrogateescape") + file_bytes(path))
    return found.hexdigest()


def _count(folder: Path) -> int:
    found = 0
    for _, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in TOOLS]
        found += len(names)
        if found > MANY:
            break
    return found


def _files(edits: tuple[Edit, ...], project: Path) -> tuple[dict[Path, list[Edit]], dict[Path, list[Edit]]]:
    """The edits by file: those inside of the project, and those outside."""
    inside: dict[Path, list[Edit]] = {}
    outside: dict[Path, list[Edit]] = {}
    for edit in edits:
        if edit.route == "file":
            path = Path(edit.name).resolve()
            home = inside if path.is_relative_to(project) else outside
            home.setdefault(path, []).append(edit)
    return inside, outside


def _packages(folder: Path, changed: dict[Path, list[Edit]]) -> Path:
    """A folder with a copy of every package that has a changed file."""
    place = files.make_folder(folder / ".packages")
    for path, own in changed.items():
        top = path.parent
        while (top.parent / "__init__.py").is_file():
            top = top.parent
        if not (place / top.name).exists():
            _copy(top, files.make_folder(place / top.name), set(), set())
        files.write_atomic(place / top.name / path.relative_to(top), edited(file_bytes(path), own))
    return place


def _inside(word: str, project: Path, folder: Path, goes_out: bool) -> str:
    """A word that names a place in the project by its absolute path names the copy instead; outputs always do."""
    name, equals, value = word.rpartition("=")
    path = Path(value)
    if path.is_absolute() and path.is_relative_to(project):
        value = str(folder.absolute() / path.relative_to(project))
    elif path.is_absolute() and goes_out:
        value = str(folder.absolute() / ".outputs" / path.name)
    return f"{name}{equals}{value}"


def python_path() -> str:
    """What a trial needs to find this nanproof, wherever it was imported from."""
    here = str(Path(__file__).parents[2])
    return os.pathsep.join(dict.fromkeys([here, *_paths()])) if here not in sys.path[1:] or _paths() else ""

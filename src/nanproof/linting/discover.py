"""Which files to lint: Python, notebooks and configs below the named folders, each file once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..errors import missing
from .gitignore import Ignored
from .names import word_set
from .settings import Settings

SUFFIXES = (".py", ".ipynb")
CONFIGS = (".yaml", ".yml", ".json", ".toml", ".sh", ".bash", ".slurm", ".sbatch")
SKIPPED = word_set(
    """.git .hg .svn .venv venv .env node_modules __pycache__ site-packages .tox .nox .eggs .mypy_cache
        .ruff_cache .pytest_cache .ipynb_checkpoints .nanproof"""
)


def find_files(
    paths: Iterable[Path], settings: Settings, suffixes: tuple[str, ...] = SUFFIXES, *, gitignore: bool = True
) -> list[Path]:
    """The files to lint, in the order of their names; a file that is named is linted whatever it is called.

    What `.gitignore` leaves out, and folders that hold other people's code, are passed over unless they are named
    themselves. Links to folders are not followed, so that a loop of links ends; a file that is reached twice counts
    once.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            ignored = Ignored(path) if gitignore else _nothing
            for file in _walk(path, settings, suffixes, ignored):
                found.setdefault(_identity(file), file)
        elif os.path.lexists(path):
            if not settings.excludes(path):
                found.setdefault(_identity(path), path)
        else:
            raise missing(path, "name a file or a folder, or - for standard input")
    return list(found.values())


def _identity(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return path.absolute()


def _nothing(path: Path, *, folder: bool) -> bool:
    return False


def _walk(folder: Path, settings: Settings, suffixes: tuple[str, ...], ignored: Callable[..., bool]) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = sorted(
            f
            for f in folders
            if f not in SKIPPED
            and not (settings.exclude and settings.excludes(here / f))
            and not ignored(here / f, folder=True)
        )
        for name in sorted(names):
            file = here / name
            if not name.endswith(suffixes) or (settings.exclude and settings.excludes(file)):
                continue
            if not ignored(file, folder=False):
                yield file

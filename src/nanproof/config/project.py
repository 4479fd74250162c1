"""The code around a config: its files, parsed once, and what else is known of the run.

>>> code = Code.parse("train.py", "scaler = GradScaler()\\nloss = step(cfg.grad_clip)\\n")
>>> project = Project(codes=(code,), facts={"gpu": "V100"})
>>> [call.name for call in project.calls], "grad_clip" in project.reads.mentioned
(['GradScaler'], True)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ..errors import FormatError, UsageError
from ..files import file_text
from .calls import Call, find_calls
from .code import Code
from .reads import Reads

MAX_FILES = 5_000
MAX_BYTES = 30 << 20
_MARKS = (".git", "pyproject.toml", "setup.py", "requirements.txt")
_CACHES = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".nanproof", ".idea", ".vscode"}
_PACKAGES = {".venv", "venv", "env", "node_modules", "site-packages", "build", "dist", ".tox", ".eggs"}
TOOLS = frozenset({".git", ".hg"} | _CACHES | _PACKAGES)
"""Folders that hold nothing of the project itself."""
SKIPPED = TOOLS | {"wandb", "outputs", "runs"}


@dataclass(frozen=True, kw_only=True)
class Project:
    """Code and facts. Without code, checks that need it stay silent."""

    codes: tuple[Code, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    """What was learnt elsewhere: ``gpu``, ``checkpoint_lr``, ``checkpoint``, …"""
    words: frozenset[str] = frozenset()
    """The words of files that do not parse: what they name may be read there."""
    complete: bool = True
    """False when there was more code than is read; then nothing is said to be read by no code."""
    same_code: Project | None = field(default=None, repr=False, compare=False)
    """The project that has this code with other facts: it is looked through once for both."""

    @classmethod
    def read(
        cls,
        *paths: str | Path,
        facts: Mapping[str, object] | None = None,
        depth: int = 100,
        known: Iterable[Code] = (),
    ) -> Project:
        """The Python files at and below these paths; those that are known already are not read again."""
        parsed = {os.path.abspath(code.path): code for code in known}  # noqa: PTH100 - a Path for each of thousands
        codes: list[Code] = []
        words: set[str] = set()
        size = 0
        for path in python_files(paths, depth):
            try:
                size += path.stat().st_size
                if size > MAX_BYTES or len(codes) >= MAX_FILES:
                    return cls(codes=tuple(codes), facts=facts or {}, words=frozenset(words), complete=False)
                codes.append(parsed.get(os.path.abspath(path)) or Code.read(path))  # noqa: PTH100
            except FormatError:
                words.update(re.findall(r"[A-Za-z_]\w*", file_text(path, errors="replace")))
            except (OSError, UsageError):
                continue
        return cls(codes=tuple(codes), facts=facts or {}, words=frozenset(words))

    @classmethod
    def around(cls, config: Path, known: Iterable[Code] = ()) -> Project:
        """The project that a config belongs to; without a mark of one, only the code that lies near."""
        root = root_of(config)
        marked = any((root / mark).exists() for mark in _MARKS)
        return cls.read(root, depth=100 if marked else 1, known=known)

    def with_codes(self, codes: Iterable[Code]) -> Project:
        """The same project with more files; one that is there already is not taken twice."""
        known = {os.path.realpath(c.path) for c in self.codes}
        more = tuple(c for c in codes if os.path.realpath(c.path) not in known)
        return replace(self, codes=(*self.codes, *more), same_code=None) if more else self

    def with_facts(self, facts: Mapping[str, object]) -> Project:
        """The same project with more known of the run; what was worked out from its code is kept."""
        return replace(self, facts={**self.facts, **facts}, same_code=self.same_code or self)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        if self.same_code is not None:
            return self.same_code.calls
        return tuple(call for code in self.codes for call in find_calls(code))

    @cached_property
    def reads(self) -> Reads:
        if self.same_code is not None:
            return self.same_code.reads
        return Reads.of(self.codes, self.words)

    def called(self, *names: str) -> list[Call]:
        return [c for c in self.calls if c.name in names]

    def fact(self, name: str) -> str:
        """A fact as lower-case words; '' when it is not known."""
        value = self.facts.get(name)
        return "" if value is None else str(value).lower()


def python_files(paths: Iterable[str | Path], depth: int = 100) -> Iterator[Path]:
    """Python files below folders, without environments, builds and caches."""
    for path in map(Path, paths):
        if path.is_file():
            yield path
            continue
        for folder, folders, names in os.walk(path):
            deep = len(Path(folder).relative_to(path).parts) >= depth
            folders[:] = [] if deep else sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def root_of(path: Path) -> Path:
    """The project that a config belongs to: the nearest folder above with code or a mark of a project.

    A relative path gives a relative folder, so that places are shown as the user wrote them.
    """
    folder = path.absolute().parent
    found = [p for p in (folder, *folder.parents) if any((p / mark).exists() for mark in _MARKS)]
    found += [p for p in (folder, *list(folder.parents)[:2]) if any(p.glob("*.py"))]
    root = found[0] if found else folder
    return root if path.is_absolute() else Path(os.path.relpath(root))

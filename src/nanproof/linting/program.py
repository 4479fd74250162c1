"""Which files make up one program, told by their imports, and what is in play in it.

A repository often holds many programs: the gradient scaler of one example must not decide for the next. A file
belongs with the files that import it, and with everything that those import.
"""

from __future__ import annotations

import ast
import codecs
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .document import Unreadable, open_document, read_bytes
from .project import HINTS, NOTHING, FileFacts, ProjectFacts, facts_of, joined_facts
from .source import Module

_IMPORT = re.compile(rb"[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|[^\r\n]*)|import[ \t]+([^\r\n]+))")
_WORD = re.compile(r"[\w.]+")

KEPT = 64
"""How many trees wait for their own turn to be linted."""


class Program:
    """The files linted together; nothing is read before a rule asks for a fact."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = {str(f.absolute()): f for f in files}
        self._own: dict[tuple[str, str], Any] = {}  # facts of files that were linted already
        self._facts: dict[str, FileFacts] = {}
        self._hints: dict[str, frozenset[bytes]] = {}
        self._parsed: dict[str, tuple[bytes, ast.Module]] = {}
        self._trained: dict[tuple[str, str], bool | None] = {}
        self._modules_read: dict[str, Module | None] = {}
        self._known: dict[tuple[frozenset[str], str], Any] = {}

    def facts(self, path: Path, own: FileFacts) -> ProjectFacts:
        """The facts of all files that run together with this one, whose own facts are given."""
        here = str(path.absolute())

        def look(name: str) -> Any:
            value = self._own[here, name] = getattr(own, name)
            return value if value is True else value | self._fact(self._together(here), name)

        return joined_facts(look)

    def _fact(self, files: frozenset[str], name: str) -> Any:
        """One fact of files that run together; they are read only as far as is needed."""
        if (files, name) not in self._known:
            value = getattr(NOTHING, name)
            for file in sorted(files):
                value = value | self._fact_of(file, name)
                if value is True:
                    break
            self._known[files, name] = value
        return self._known[files, name]

    def _fact_of(self, file: str, name: str) -> Any:
        if (file, name) in self._own:
            return self._own[file, name]
        if file not in self._facts:
            if file not in self._hints:
                self._hints[file] = _hints_in(self._files[file])
            if not self._hints[file].intersection(HINTS[name]):
                return getattr(NOTHING, name)
            self._facts[file] = self._read_facts(file)
        return getattr(self._facts[file], name)

    def _read_facts(self, file: str) -> FileFacts:
        try:
            document = open_document(str(self._files[file]), read_bytes(self._files[file]))
            tree = document.parse()
        except Unreadable:
            return NOTHING
        while len(self._parsed) >= KEPT:
            self._parsed.pop(next(iter(self._parsed)))
        self._parsed[file] = (document.data, tree)
        return facts_of(Module(document.text, tree, document.path))

    def trains(self, path: Path, name: str) -> bool | None:
        """Whether a file that imports this one calls its function where it trains; None when none calls it."""
        from .purpose import called_in_training

        here = str(path.absolute())
        if len(self._files) < 2 or here not in self._files:
            return None
        if (here, name) not in self._trained:
            found: bool | None = None
            word = name.encode()
            for file in sorted(self.importers(here) | self.importers(str(path.absolute().parent / "__init__.py"))):
                module = self._module(file) if file != here and word in read_bytes(self._files[file]) else None
                answer = called_in_training(name, module) if module is not None else None
                found = answer if found is None else found
                if answer:
                    found = True
                    break
            self._trained[here, name] = found
        return self._trained[here, name]

    def _module(self, file: str) -> Module | None:
        if file not in self._modules_read:
            while len(self._modules_read) >= KEPT:
                self._modules_read.pop(next(iter(self._modules_read)))
            try:
                document = open_document(str(self._files[file]), read_bytes(self._files[file]))
                self._modules_read[file] = Module(document.text, document.parse(), document.path)
            except Unreadable:
                self._modules_read[file] = None
        return self._modules_read[file]

    def parsed(self, path: Path, data: bytes) -> ast.Module | None:
        """The tree of a file that was parsed for its facts a short while ago."""
        known, tree = self._parsed.pop(str(path.absolute()), (None, None))
        return tree if known == data else None

    def importers(self, name: str) -> set[str]:
        """The files that import this one directly; by absolute path."""
        return self._importers.get(name, set())

    def reached_from(self, *starts: Path) -> set[Path]:
        """The files that these import, directly or not, and these themselves; by absolute path.

        Python runs the ``__init__.py`` of every package on the way, so these belong to them.
        """
        found: set[str] = set()
        more = {str(s.absolute()) for s in starts} & set(self._files)
        while more - found:
            found |= _reach(more, self._imports)
            packages = {f"{folder}/__init__.py" for name in found for folder in Path(name).parents}
            more = packages & set(self._files)
        return {Path(name) for name in found}

    def _together(self, here: str) -> frozenset[str]:
        if len(self._files) < 2 or here not in self._files:
            return frozenset()
        found = frozenset(_reach(_reach({here}, self._importers), self._imports))
        return self._groups.setdefault(found, found)

    @functools.cached_property
    def _groups(self) -> dict[frozenset[str], frozenset[str]]:
        """Files of one program mostly have the same company: kept once, hashed once."""
        return {}

    @functools.cached_property
    def _stems(self) -> set[str]:
        """Every name that a file or a folder has: an absolute import of anything else leads out of the program."""
        parts = {part for name in self._files for part in name.split("/")}
        return {part.removesuffix(".py") for part in parts}

    @functools.cached_property
    def _imports(self) -> dict[str, set[str]]:
        return {name: self._imported(name) for name in self._files}

    @functools.cached_property
    def _importers(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {name: set() for name in self._files}
        for name, targets in self._imports.items():
            for target in targets:
                found[target].add(name)
        return found

    def _imported(self, name: str) -> set[str]:
        """The files of the program that this one imports."""
        return {found for words in self._imports_in(name) for found in self.resolve(name, *words)} - {name}

    def _imports_in(self, name: str) -> Iterator[tuple[str, list[str]]]:
        try:
            data = read_bytes(self._files[name])
            if name.endswith(".ipynb"):
                data = open_document(name, data).text.encode(errors="replace")
        except Unreadable:
            return
        yield from imports(data)

    def may_import_more(self, path: Path) -> bool:
        """Whether this file imports something that is named like a file of the program but was not found there.

        It lies on a path that is set elsewhere: ``src/``, or what ``sys.path`` is given.
        """
        name = str(path)
        absolute = ((base, names) for base, names in self._imports_in(name) if not base.startswith("."))
        return any(
            base.partition(".")[0] in self._stems and not any(self.resolve(name, base, names))
            for base, names in absolute
        )

    def resolve(self, importer: str, base: str, names: Sequence[str]) -> Iterator[str]:
        """The files behind ``from base import names`` (or ``import base``) in the file ``importer``."""
        level = len(base) - len(base.lstrip("."))
        inside = base[level:].replace(".", "/")
        folder = importer.rpartition("/")[0]
        if level:
            for _ in range(level - 1):
                folder = folder.rpartition("/")[0]
            yield from self._modules(folder, inside, names)
            return
        if inside.partition("/")[0] not in self._stems:
            return
        while folder:  # absolute: from whichever folder above that the program is started in
            if found := list(self._modules(folder, inside, names)):
                yield from found
                return
            folder = folder.rpartition("/")[0]

    def _modules(self, folder: str, inside: str, names: Sequence[str]) -> Iterator[str]:
        stem = f"{folder}/{inside}" if inside else folder
        wanted = [f"{stem}.py", f"{stem}/__init__.py"] if inside else []
        for name in names:
            wanted += [f"{stem}/{name}.py", f"{stem}/{name}/__init__.py"]
        yield from (w for w in wanted if w in self._files)


def _reach(start: set[str], edges: dict[str, set[str]]) -> set[str]:
    found, waiting = set(start), list(start)
    while waiting:
        for one in edges[waiting.pop()] - found:
            found.add(one)
            waiting.append(one)
    return found


_WORDS = frozenset(word for words in HINTS.values() for word in words)


def _hints_in(path: Path) -> frozenset[bytes]:
    try:
        data = read_bytes(path)
    except Unreadable:
        return frozenset()
    return frozenset(word for word in _WORDS if word in data)


def imports(data: bytes) -> Iterator[tuple[str, list[str]]]:
    """What a file imports, read without parsing it: pairs of module and the names taken from it.

    >>> list(imports(b"import os, a.b as c\\nfrom . import x, y as z\\nfrom .m import (\\n  f,\\n)"))
    [('os', []), ('a.b', []), ('.', ['x', 'y']), ('.m', ['f'])]
    """
    at = data.find(b"import")
    while at >= 0:
        start = max(data.rfind(b"\n", 0, at), data.rfind(b"\r", 0, at)) + 1
        found = _IMPORT.match(data, start + (3 if data.startswith(codecs.BOM_UTF8, start) else 0))
        if found and found[1]:
            yield found[1].decode(), _names(found[2])
        elif found:
            for name in _names(found[3]):
                yield name, []
        at = data.find(b"import", max(at + 6, found.end() if found else 0))


def _names(text: bytes) -> list[str]:
    plain = text.partition(b"#")[0] if not text.startswith(b"(") else text
    found: Iterable[str] = (part.split(" as ")[0] for part in plain.decode(errors="replace").strip("() \t").split(","))
    return [match.group() for part in found if (match := _WORD.search(part))]

"""A repaired copy beside the untouched original: `train.py` → `train_stable.py`, so that both can be run and compared.

Files that import a repaired file are copied as well, unless they are tests, and imports among the copies lead to the
copies, in relative and in absolute form.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..records import Edit
from .document import Document, Unreadable, open_document, read_bytes
from .fix import apply_edits
from .names import dotted
from .program import Program
from .rule import Change
from .source import Module

SUFFIX = "_stable"
_FROM = re.compile(r"from[ \t\\\r\n]*([.\w]+)")


def beside(path: Path) -> Path:
    """Where the copy goes.

    >>> str(beside(Path("pkg/train.py")))
    'pkg/train_stable.py'
    """
    return path.with_name(f"{path.stem}{SUFFIX}{path.suffix}")


def copies(fixed: Mapping[Path, bytes], files: Sequence[Path]) -> dict[Path, bytes]:
    """The copies to write, by their path: of the repaired files, given with their new contents, and their importers."""
    program = Program(files)
    names = {str(p.absolute()): p for p in (*files, *fixed)}
    chosen = {str(p.absolute()) for p in fixed}
    waiting = list(chosen)
    while waiting:
        for importer in program.importers(waiting.pop()) - chosen:
            if not Module("", ast.Module([], []), importer).is_test:
                chosen.add(importer)
                waiting.append(importer)
    new = {}
    for name in sorted(chosen):
        path = names[name]
        data = fixed[path] if path in fixed else read_bytes(path)
        new[beside(path)] = redirect(name, data, program, chosen)
    return new


def redirect(name: str, data: bytes, program: Program, copied: set[str]) -> bytes:
    """A file with its imports of copied files leading to the copies."""
    try:
        document = open_document(name, data)
        module = Module(document.text, document.parse(), name)
    except Unreadable:
        return data
    changes = list(_Redirection(module, name, program, copied).changes())
    return apply_edits(data, _edits(document, changes), document.encoding)


def _edits(document: Document, changes: list[Change]) -> Iterator[Edit]:
    for change in changes:
        edit = document.edit(change.start, change.end, change.text)
        if edit is not None:
            yield edit


class _Redirection:
    """The changes to the imports of one file."""

    def __init__(self, module: Module, name: str, program: Program, copied: set[str]) -> None:
        self._module, self._name, self._program, self._copied = module, name, program, copied

    def changes(self) -> Iterator[Change]:
        for plain in self._module.nodes(ast.Import):
            for alias in plain.names:
                yield from self._import(alias)
        for source in self._module.nodes(ast.ImportFrom):
            yield from self._import_from(source)

    def _copy_of(self, module: str) -> str:
        """The name of the copy of a module as this file writes it, or "" if there is none."""
        for found in self._program.resolve(self._name, module, []):
            if found not in self._copied:
                return ""
            stem = beside(Path(found)).stem
            if Path(found).name == "__init__.py":
                return f"{module}{stem}" if module.endswith(".") else f"{module}.{stem}"
            head, dot, _ = module.rpartition(".")
            return head + dot + stem
        return ""

    def _import(self, alias: ast.alias) -> Iterator[Change]:
        new = self._copy_of(alias.name)
        if not new:
            return
        if alias.asname or "." not in alias.name:
            yield self._module.replace(alias, f"{new} as {alias.asname or alias.name}")
            return
        yield self._module.replace(alias, new)  # binds the package: what stands behind the dots changes its name
        for use in self._module.nodes(ast.Attribute):
            if dotted(use) == alias.name:
                yield self._module.replace(use, new)

    def _import_from(self, node: ast.ImportFrom) -> Iterator[Change]:
        base = "." * node.level + (node.module or "")
        inside = {a: self._copy_of(f"{base}{a.name}" if base.endswith(".") else f"{base}.{a.name}") for a in node.names}
        new_base = self._copy_of(base) if node.module else self._copy_of_package(base)
        others = [a for a in node.names if not inside[a]]
        if any(inside.values()) and new_base and others:
            yield self._module.replace(node, self._split(base, new_base, inside))
            return
        for alias, new in inside.items():
            if new:
                yield self._module.replace(alias, f"{new.rpartition('.')[2]} as {alias.asname or alias.name}")
        if new_base and others:
            match = _FROM.match(self._module.text, self._module.span(node)[0])
            if match:
                yield Change(start=match.start(1), end=match.end(1), text=new_base)

    def _copy_of_package(self, dots: str) -> str:
        folder = Path(self._name).parents[len(dots) - 1]
        package = str(folder / "__init__.py")
        return f"{dots}{beside(Path(package)).stem}" if package in self._copied else ""

    def _split(self, base: str, new_base: str, inside: Mapping[ast.alias, str]) -> str:
        def words(alias: ast.alias, new: str) -> str:
            name = new.rpartition(".")[2] or alias.name
            bound = alias.asname or alias.name
            return f"{name} as {bound}" if name != bound else name

        first = ", ".join(words(a, new) for a, new in inside.items() if new)
        second = ", ".join(words(a, "") for a, new in inside.items() if not new)
        return f"from {base} import {first}; from {new_base} import {second}"

"""Lint, and repair in memory, code that nobody here wrote: `python scripts/lint_wild.py PATH …`.

Nothing may crash; a repair must compile if the original did, and repairing twice is repairing once; replacing a piece
of text by itself must give the same bytes, whatever the encoding and the line ends. Files without torch are linted too.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from nanproof.linting.discover import find_files
from nanproof.linting.document import Unreadable, open_document, read_bytes
from nanproof.linting.engine import Linter
from nanproof.linting.fix import apply_edits, fix
from nanproof.linting.settings import Settings, choose_rules
from nanproof.linting.source import Module

EVERY = 50
"""Of every file, about this many nodes are replaced by themselves."""


def check(paths: Iterable[Path]) -> tuple[Counter[str], list[str]]:
    """What was counted over the files, and everything that went wrong."""
    files = list(paths)
    linter = Linter(files, choose_rules(["ALL"], []), Settings())
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for path in files:
        counts["files"] += 1
        try:
            data = read_bytes(path)
            module = _module(path, data)
        except Unreadable:
            counts["not linted"] += 1
            continue
        counts["lines"] += len(module.starts)
        wrong += [f"{path}: {words}" for words in _identity(path, data, module)]
        fixed = fix(linter, path, data, unsafe=True)
        counts["repaired files"] += fixed.changed
        counts["repairs"] += len(fixed.repaired)
        counts["findings left"] += len(fixed.after.problems)
        wrong += [f"{path}: {p.finding.message}" for p in fixed.after.problems if p.finding.code == "NP002"]
        if fixed.changed:
            wrong += [f"{path}: {words}" for words in _repaired(linter, path, data, fixed.new)]
    return counts, wrong


def _module(path: Path, data: bytes) -> Module:
    document = open_document(str(path), data)
    return Module(document.text, document.parse(), str(path))


def _identity(path: Path, data: bytes, module: Module) -> list[str]:
    document = open_document(str(path), data)
    nodes = [n for kind in (ast.Call, ast.BinOp, ast.Name, ast.Return) for n in module.nodes(kind)]
    nodes = [n for n in nodes if not module.in_string(n) and isinstance(getattr(n, "ctx", None), ast.Load | None)]
    for node in nodes[:: max(1, len(nodes) // EVERY)]:
        start, end = module.span(node)
        edit = document.edit(start, end, module.text[start:end])
        if edit is not None and apply_edits(data, [edit], document.encoding) != data:
            return [f"an edit that changes nothing changes bytes at line {getattr(node, 'lineno', 0)}"]
        part = module.source(node)
        if isinstance(node, ast.expr) and ast.dump(ast.parse(f"({part}\n)", mode="eval").body) != ast.dump(node):
            return [f"the text of a node is not its text at line {node.lineno}"]
    return []


def _repaired(linter: Linter, path: Path, old: bytes, new: bytes) -> list[str]:
    wrong = []
    if open_document(str(path), old).compiles() and not open_document(str(path), new).compiles():
        wrong.append("the repaired text does not compile")
    if fix(linter, path, new, unsafe=True).new != new:
        wrong.append("a second repair changes it again")
    return wrong


def main(arguments: list[str]) -> int:
    files = list(find_files([Path(a) for a in arguments], Settings()))
    cores = os.cpu_count() or 1
    with multiprocessing.Pool(cores) as pool:
        results = pool.map(check, [files[i::cores] for i in range(cores)])
    counts = sum((found for found, _ in results), Counter())
    wrong = [words for _, some in results for words in some]
    print(", ".join(f"{name} {count:,}" for name, count in counts.items()))
    for words in wrong:
        print(words)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

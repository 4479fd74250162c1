"""`Tree`: the text of one file and its syntax tree, and the way from one to the other."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, count
from operator import add
from typing import TypeVar, cast

from .index import Kinds, Parents, walk

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module
N = TypeVar("N", bound=ast.AST)

_NEWLINES = re.compile(r"\r\n|\r|\n")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)


def line_starts(text: str) -> list[int]:
    """Where each line begins; lines end as Python's do, not at form feeds or Unicode separators.

    >>> line_starts("a\\r\\nb\\fc\\n")
    [0, 3, 7]
    """
    if "\r" in text:
        return [0, *(m.end() for m in _NEWLINES.finditer(text))]
    lengths = map(len, text.split("\n")[:-1])
    return [0, *map(add, accumulate(lengths), count(1))]


class Tree:
    """A parsed file: who is whose parent, and where each node stands."""

    def __init__(self, text: str, tree: ast.Module, path: str = "<text>") -> None:
        self.text = text
        self.tree = tree
        self.path = path
        self._functions: dict[ast.AST, Scope] = {}  # by the parent of what stands in it: siblings share it

    @cached_property
    def _index(self) -> tuple[Parents, Kinds]:
        return walk(self.tree)

    def nodes(self, kind: type[N]) -> list[N]:
        """All nodes of exactly this type, in source order."""
        return cast("list[N]", self._index[1].get(kind, []))

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._index[0].get(node)

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """The ancestors, innermost first."""
        above = self._index[0]
        at = above.get(node)
        while at is not None:
            yield at
            at = above.get(at)

    def function(self, node: ast.AST) -> Scope:
        """The function, lambda or module that this node stands in (a function is not in itself)."""
        above = self._index[0]
        at = outer = above.get(node)
        if at is None:
            return self.tree
        found = self._functions.get(at)
        if found is None:
            while outer is not None and not isinstance(outer, _SCOPES):
                outer = above.get(outer)
            found = self._functions[at] = outer or self.tree
        return found

    def klass(self, node: ast.AST) -> ast.ClassDef | None:
        """The class that this node stands in."""
        return next((p for p in self.parents(node) if isinstance(p, ast.ClassDef)), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that this node is, or is part of."""
        at: ast.AST | None = node
        while at is not None and not isinstance(at, ast.stmt):
            at = self.parent(at)
        return at if at is not None else self.tree.body[0]

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements that this one stands among, itself included."""
        parent = self.parent(statement)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if isinstance(block, list) and any(s is statement for s in block):
                return cast("list[ast.stmt]", block)
        return [statement]

    # --- the text -------------------------------------------------------------------------------------------------

    @cached_property
    def starts(self) -> list[int]:
        """Where each line begins."""
        return line_starts(self.text)

    def line(self, number: int) -> str:
        """The text of a line (from 1) with its end; "" where there is none."""
        if not 1 <= number <= len(self.starts):
            return ""
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[self.starts[number - 1] : end]

    @cached_property
    def newline(self) -> str:
        found = _NEWLINES.search(self.text)
        return found.group() if found else "\n"

    @cached_property
    def _ascii(self) -> bool:
        return self.text.isascii()

    def offset(self, line: int, column: int) -> int:
        """The index into the text of a place of the syntax tree, whose columns count UTF-8 bytes."""
        start = self.starts[line - 1]
        if self._ascii:
            return start + column
        end = self.starts[line] if line < len(self.starts) else len(self.text)
        return start + len(self.text[start:end].encode()[:column].decode(errors="ignore"))

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1, of an index into the text."""
        line = bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends in the text."""
        line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
        last, end = node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return self.offset(line, column), self.offset(last, end)

    def in_string(self, node: ast.AST) -> bool:
        """Whether a node stands in an f-string, where Python before 3.12 does not tell places."""
        return ast.JoinedStr in self._index[1] and any(isinstance(p, ast.JoinedStr) for p in self.parents(node))

    def source(self, node: ast.AST) -> str:
        """The exact text of a node, "" for nodes without a place."""
        if not hasattr(node, "lineno"):
            return ""
        start, end = self.span(node)
        return self.text[start:end]

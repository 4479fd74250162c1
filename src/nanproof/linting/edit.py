"""Making changes to a source text: replaced expressions keep their parentheses, new lines their indentation."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from .names import imported
from .rule import Change

if TYPE_CHECKING:
    from .source import Module

# How tightly expressions hold together; what is not named here holds tightest.
_POWERS: dict[type[ast.AST], int] = {
    ast.NamedExpr: 0,
    ast.Yield: 0,
    ast.YieldFrom: 0,
    ast.Tuple: 0,
    ast.Starred: 0,
    ast.Lambda: 1,
    ast.IfExp: 2,
    ast.Or: 3,
    ast.And: 4,
    ast.Not: 5,
    ast.Compare: 6,
    ast.BitOr: 7,
    ast.BitXor: 8,
    ast.BitAnd: 9,
    ast.LShift: 10,
    ast.RShift: 10,
    ast.Add: 11,
    ast.Sub: 11,
    ast.Mult: 12,
    ast.Div: 12,
    ast.FloorDiv: 12,
    ast.Mod: 12,
    ast.MatMult: 12,
    ast.USub: 13,
    ast.UAdd: 13,
    ast.Invert: 13,
    ast.Pow: 14,
    ast.Await: 15,
}
_TIGHTEST = 16
IMPOSSIBLE = Change(start=-1, end=-1, text="")
"""Stands for a change that cannot be made; a finding with one has no fix."""


def power(node: ast.AST) -> int:
    """How tightly an expression holds together.

    >>> [power(ast.parse(s, mode="eval").body) for s in ("a or b", "a + b", "a * b", "-a", "a ** b", "f(a)")]
    [3, 11, 12, 13, 14, 16]
    """
    kind = type(node.op) if isinstance(node, ast.BinOp | ast.UnaryOp | ast.BoolOp) else type(node)
    return _POWERS.get(kind, _TIGHTEST)


def needed(parent: ast.AST | None, node: ast.AST) -> int:
    """How tightly an expression must hold together to stand in the place of ``node``; 0 between brackets or commas."""
    if isinstance(parent, ast.BinOp):
        if isinstance(parent.op, ast.Pow):
            return 15 if node is parent.left else 13
        return power(parent) + (node is parent.right)
    if isinstance(parent, ast.UnaryOp):
        return power(parent)
    if isinstance(parent, ast.BoolOp | ast.Compare):
        return power(parent) + 1
    if isinstance(parent, ast.IfExp):
        return 1 if node is parent.orelse else 3
    if isinstance(parent, ast.Starred):
        return 7
    held = isinstance(parent, ast.Attribute | ast.Subscript | ast.Await) and node is parent.value
    return _TIGHTEST if held or (isinstance(parent, ast.Call) and node is parent.func) else 0


def replace(module: Module, node: ast.AST, text: str) -> Change:
    """Put a text in the place of a node; an expression gets parentheses if its surroundings would tear it apart."""
    if module.in_string(node):
        return IMPOSSIBLE
    start, end = module.span(node)
    if isinstance(node, ast.expr) and _torn(module, node, text, start, end):
        text = f"({text})"
    return Change(start=start, end=end, text=text)


def _torn(module: Module, node: ast.expr, text: str, start: int, end: int) -> bool:
    parent = module.parent(node)
    if needed(parent, node) == 0:
        return False
    try:
        new = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return True
    if isinstance(new, ast.Tuple | ast.GeneratorExp) and text.startswith("("):
        return False
    if isinstance(parent, ast.Attribute) and isinstance(new, ast.Constant) and isinstance(new.value, int):
        return True
    if power(new) >= needed(parent, node) or (text.startswith("(") and text.count("(") == 1 and text.endswith(")")):
        return False
    held = isinstance(parent, ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare | ast.Attribute | ast.IfExp)
    before, after = module.text[:start].rstrip(), module.text[end:].lstrip()
    return not (held and before.endswith("(") and after.startswith(")"))  # else it has parentheses already


def line_span(module: Module, statement: ast.stmt) -> tuple[int, int, int, int]:
    """Start of the first line, start and end of the statement with its decorators, end of the last line."""
    start, end = module.span(statement)
    for decorator in getattr(statement, "decorator_list", []):
        start = min(start, module.text.rindex("@", 0, module.span(decorator)[0]))
    text = module.text
    first = max(text.rfind("\n", 0, start), text.rfind("\r", 0, start)) + 1
    match = re.compile(r"[^\r\n]*").match(text, end)
    assert match is not None
    return first, start, end, match.end()


def _lines(module: Module, text: str, indent: str) -> str:
    return (module.newline + indent).join(text.splitlines())


def insert_before(module: Module, statement: ast.stmt, text: str) -> Change:
    """A new line before a statement, indented like it; on a line that is shared, before it with a semicolon."""
    first, start, _, _ = line_span(module, statement)
    indent = module.text[first:start]
    if indent.strip():
        return Change(start=start, end=start, text=f"{text}; ")
    return Change(start=start, end=start, text=_lines(module, text, indent) + module.newline + indent)


def insert_after(module: Module, statement: ast.stmt, text: str) -> Change:
    """A new line after a statement, indented like it; on a line that is shared, after it with a semicolon."""
    first, start, end, last = line_span(module, statement)
    indent = module.text[first:start]
    rest = module.text[end:last].strip()
    if indent.strip() or (rest and not rest.startswith("#")):
        return Change(start=end, end=end, text=f"; {text}")
    return Change(start=last, end=last, text=module.newline + indent + _lines(module, text, indent))


def remove(module: Module, statement: ast.stmt) -> Change:
    """Take a statement out: with its line if it stands alone; `pass` remains where a block would be empty."""
    first, start, end, last = line_span(module, statement)
    if len(module.block(statement)) == 1:
        return Change(start=start, end=end, text="pass")
    before, after = module.text[first:start], module.text[end:last]
    if before.strip():
        return Change(start=first + len(before.rstrip().rstrip(";").rstrip()), end=end, text="")
    if after.strip().startswith(";"):
        return Change(start=start, end=end + len(after) - len(after.lstrip().removeprefix(";").lstrip()), text="")
    if after.strip():
        return Change(start=start, end=end + len(after) - len(after.lstrip()), text="")
    newline = re.compile(r"\r\n|\r|\n|").match(module.text, last)
    assert newline is not None
    return Change(start=first, end=newline.end(), text="")


def import_line(module: Module, line: str) -> Change:
    """Add an import after those at the top of the file; nothing to do if all its names are there already."""
    wanted = ast.parse(line).body[0]
    assert isinstance(wanted, ast.Import | ast.ImportFrom)
    there = imported(module.top_imports)[0]
    if all(there.get(name) == meaning for name, meaning in imported([wanted])[0].items()):
        return Change(start=0, end=0, text="", shared=True)
    last: ast.stmt | None = None
    for i, statement in enumerate(module.tree.body):
        if isinstance(statement, _BODIES):
            break  # an import further down would come too late for what stands above it
        if isinstance(statement, ast.Import | ast.ImportFrom) or (i == 0 and _is_docstring(statement)):
            last = statement
    if last is not None:
        return _shared(insert_after(module, last, line))
    if module.tree.body:
        return _shared(insert_before(module, module.tree.body[0], line))
    return Change(start=0, end=0, text=line + module.newline, shared=True)


_BODIES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)


def _is_docstring(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _shared(change: Change) -> Change:
    return Change(start=change.start, end=change.end, text=change.text, shared=True)


def spell(module: Module, name: str) -> tuple[str, tuple[Change, ...]]:
    """The shortest way to write a dotted name with what the file imports at its top, else with an import added."""
    found = [
        local + name[len(meaning) :]
        for local, meaning in imported(module.top_imports)[0].items()
        if name == meaning or name.startswith(f"{meaning}.")
    ]
    if found:
        return min(found, key=lambda s: (s.count("."), len(s))), ()
    if name.startswith("torch.nn.functional."):
        return f"F.{name.rpartition('.')[2]}", (import_line(module, "import torch.nn.functional as F"),)
    return name, (import_line(module, f"import {name.partition('.')[0]}"),)

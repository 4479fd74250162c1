"""A Python file as data: parsed, never imported; what its expressions are, as far as that can be told.

>>> code = Code.parse("a.py", "import torch as th\\nBASE = 2e-4\\nlr = BASE * 2\\ndtype = th.float16\\n")
>>> code.constants
{'BASE': 0.0002, 'lr': 0.0004, 'dtype': 'float16'}
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import FormatError, UsageError
from ..files import file_bytes
from ..floats import find_format
from .value import Origin, Plain, Value

MAX_BYTES = 2 << 20
_FOLD_DEPTH = 30
AUTOCAST: dict[object, str] = {"cuda": "float16", "cpu": "bfloat16"}
"""What autocast computes in on a device unless it is told otherwise."""

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class NotConstant(Exception):
    """Only running the code would tell."""


class Code:
    """One parsed file."""

    def __init__(self, path: str, data: bytes, tree: ast.Module, editable: bool = True) -> None:
        self.path, self.tree, self.editable = path, tree, editable
        self._data = data.removeprefix(b"\xef\xbb\xbf")
        self._shift = len(data) - len(self._data)

    @classmethod
    def parse(cls, path: str, text: str | bytes, tree: ast.Module | None = None) -> Code:
        """Parse a source, or take the tree that someone else has parsed from it."""
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        try:
            data.decode("utf-8")
            editable = True
        except UnicodeDecodeError:
            editable = False
        if tree is None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # invalid escapes are the author's business
                    tree = ast.parse(data)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                line = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
                words = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
                raise FormatError(f"{path} is not Python: {words}{line}", hint="correct it") from None
        return cls(path, data, tree, editable)

    @classmethod
    def read(cls, path: str | Path) -> Code:
        """Read and parse a file."""
        try:
            if Path(path).stat().st_size > MAX_BYTES:
                raise UsageError(f"{path} is too large for a config", hint="give the config file of the run")
            data = file_bytes(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}", hint="give a readable file") from None
        return cls.parse(str(path), data)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes in the order of `ast.walk`; the tree is walked once, whoever looks through it."""
        found: list[ast.AST] = [self.tree]
        for node in found:  # it grows while it is read
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    found.extend(item for item in value if isinstance(item, ast.AST))
                elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                    found.append(value)
        return found

    @cached_property
    def memory(self) -> dict[str, Any]:
        """What others have worked out from this file."""
        return {}

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(m.end() for m in re.finditer(rb"\r\n|\r|\n", self._data))]

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def mentions(self, pattern: re.Pattern[bytes]) -> bool:
        """Whether the text has a word at all; cheaper than looking through the tree."""
        return pattern.search(self._data) is not None

    def span(self, node: ast.expr) -> tuple[int, int] | None:
        """The bytes of an expression in the file."""
        if not self.editable or node.end_lineno is None or node.end_col_offset is None:
            return None
        start, end = self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)
        return start + self._shift, end + self._shift

    def text(self, node: ast.expr) -> str:
        """The source of an expression."""
        found = self.span(node)
        if found is None:
            return ast.unparse(node)
        return self._data[found[0] - self._shift : found[1] - self._shift].decode(errors="replace")

    @cached_property
    def imports(self) -> dict[str, str]:
        """What each imported name stands for: ``F`` is ``torch.nn.functional``; ``.x`` is in the same package."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for name in node.names:
                    found[name.asname or name.name.partition(".")[0]] = (
                        name.name if name.asname else name.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                for name in node.names:
                    whole = f"{node.module}.{name.name}" if node.module else name.name
                    found[name.asname or name.name] = f".{whole}" if node.level else whole
        return found

    def dotted(self, node: ast.expr) -> str:
        """``torch.cuda.amp.autocast`` for an expression that names it, whatever it was imported as; else ''."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imports.get(node.id, node.id), *reversed(parts)])

    @cached_property
    def constants(self) -> dict[str, Plain]:
        """Module-level names that are assigned one constant."""
        found: dict[str, Plain] = {}
        self.__dict__["constants"] = found  # what stands above is known while what stands below is folded
        twice: set[str] = set()
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            for target in targets:
                if not isinstance(target, ast.Name):
                    continue
                if target.id in found:
                    twice.add(target.id)
                try:
                    assert isinstance(node, ast.Assign | ast.AnnAssign)
                    found[target.id] = self.fold(node.value)  # type: ignore[arg-type]
                except NotConstant:
                    twice.add(target.id)
        for name in twice:
            found.pop(name, None)
        return found

    def setting(self, key: str, node: ast.expr, origin: Origin) -> Value:
        """An expression as the value of a setting; unknown when it is no constant."""
        try:
            value, known = self.fold(node), True
        except NotConstant:
            value, known = None, False
        return Value(
            key=key,
            value=value,
            path=self.path,
            line=node.lineno,
            column=node.col_offset + 1,
            text=self.text(node),
            origin=origin,
            span=self.span(node),
            known=known,
        )

    def fold(self, node: ast.expr, depth: int = 0) -> Plain:
        """The constant behind an expression: literals, arithmetic on them, module constants, torch dtypes."""
        if depth > _FOLD_DEPTH:
            raise NotConstant
        match node:
            case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
                return value
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                return tuple(self.fold(item, depth + 1) for item in items)
            case ast.UnaryOp(op=op, operand=operand):
                inner = self.fold(operand, depth + 1)
                if isinstance(op, ast.Not):
                    return not inner
                if isinstance(inner, int | float) and isinstance(op, ast.USub | ast.UAdd):
                    return -inner if isinstance(op, ast.USub) else inner
            case ast.BinOp(left=left, op=symbol, right=right):
                return _compute(symbol, self.fold(left, depth + 1), self.fold(right, depth + 1))
            case ast.Name(id=name) if name in self.constants:
                return self.constants[name]
            case ast.Call(func=ast.Name(id="float" | "int" as kind), args=[item], keywords=[]):
                inner = self.fold(item, depth + 1)
                if isinstance(inner, int | float | str) and len(str(inner)) < 100:
                    try:
                        return float(inner) if kind == "float" else int(inner)
                    except (ValueError, OverflowError):
                        raise NotConstant from None
            case ast.Call(func=func, args=[ast.Constant(value=device)], keywords=[]) if (
                self.dotted(func) == "torch.get_autocast_dtype" and device in AUTOCAST
            ):
                return AUTOCAST[device]
            case ast.Name() | ast.Attribute():
                name = self.dotted(node)
                form = find_format(name) if name.startswith("torch.") else None
                if form is not None:
                    return form.name
        raise NotConstant


def _compute(op: ast.operator, left: Plain, right: Plain) -> Plain:
    if isinstance(left, bool | str | tuple | None) or isinstance(right, bool | str | tuple | None):
        raise NotConstant
    try:
        if isinstance(op, ast.Pow):
            value: Any = float(left) ** right if abs(right) < 1100 else None
            if value is not None and isinstance(left, int) and isinstance(right, int) and 0 <= right < 64:
                value = left**right if abs(left) < 1000 else value
        else:
            value = _ARITHMETIC[type(op)](left, right) if max(abs(left), abs(right)) < 1e300 else None
    except (ArithmeticError, KeyError, TypeError, ValueError):
        raise NotConstant from None
    if not isinstance(value, int | float):
        raise NotConstant
    return value

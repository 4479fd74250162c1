"""Smaller initial weights, where their spread is written in a config or in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ...config.proposals import nice
from ..change import Change, Edit
from ..evidence import Evidence
from ..surface import Surface

_KEY = re.compile(r"(^|\.)(init(ializer)?_(std|range|gain)|weight_std|init_gain)$")
_CALLS = {
    "normal_": ("std", 2),
    "trunc_normal_": ("std", 2),
    "xavier_normal_": ("gain", 1),
    "xavier_uniform_": ("gain", 1),
    "orthogonal_": ("gain", 1),
}


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    for value in surface.settings:
        if value.known and value.number and _KEY.search(value.key):
            after = nice(value.number / 10)
            edit = surface.edit(value, after)
            if edit is not None:
                yield _change(f"{value.name}={after:g}", value.number, (edit,))
    for code in surface.codes:
        edits = []
        before = 0.0
        for node in ast.walk(code.tree):
            found = _spread(node) if isinstance(node, ast.Call) else None
            span = code.span(found) if found is not None else None
            if found is not None and span is not None:
                before = float(found.value)  # type: ignore[arg-type]
                edits.append(
                    Edit(
                        route="file",
                        name=code.path,
                        text=f"{nice(before / 10):g}",
                        start=span[0],
                        end=span[1],
                        setting=f"initialization at line {found.lineno}",
                        before=f"{before:g}",
                    )
                )
        if edits:
            yield _change("init/10", before, tuple(edits))


def _change(name: str, before: float, edits: tuple[Edit, ...]) -> Change:
    return Change(
        name=name,
        kind="initialization",
        size=1.2,
        edits=edits,
        why=f"initial weights of spread {before:g} make large activations from the first step",
    )


def _spread(node: ast.Call) -> ast.Constant | None:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in _CALLS:
        return None
    keyword, position = _CALLS[name]
    values = [k.value for k in node.keywords if k.arg == keyword] or node.args[position : position + 1]
    value = values[0] if values else None
    number = isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value >= 0.1
    return value if number and isinstance(value, ast.Constant) else None

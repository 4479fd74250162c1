"""A smaller learning rate, of all parameters or of one group; the floor of the schedule keeps its ratio to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ...config.code import Code
from ...config.proposals import nice
from ..change import Change, Edit
from ..evidence import Evidence
from ..surface import Surface

_GROUP = re.compile(r"(^|[._])lr_(scale|mult|multiplier|factor)$", re.I)
FACTORS = ((2, 1.0), (5, 1.5), (10, 2.0), (100, 3.0))


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    yield from _groups(surface)
    held = next((v for v in surface.meaning.all("lr") if v.known and v.number), None)
    groups = list(_of_groups(surface))
    low = next((v for v in surface.meaning.all("min_lr") if v.known and v.number and "ratio" not in v.name), None)
    for by, size in FACTORS:
        edits = [surface.edit(held, nice(held.number / by))] if held is not None and held.number else []
        edits += [_divided(code, node, by) for code, node in groups]
        if low is not None and low.number is not None:
            edits.append(surface.edit(low, nice(low.number / by)))
        if edits and all(edits):
            said = (
                f"{held.label} {held.number:g} → {nice(held.number / by):g}" if held is not None and held.number else ""
            )
            yield Change(
                name=f"lr/{by}",
                kind="learning rate",
                size=size,
                edits=tuple(e for e in edits if e),
                why=f"shorter steps: {said or f'the learning rate of each group / {by}'}",
            )


def _of_groups(surface: Surface) -> Iterator[tuple[Code, ast.Constant]]:
    """Learning rates of parameter groups: ``{"params": …, "lr": 1e-3}`` in the code."""
    for code in surface.codes:
        for node in ast.walk(code.tree):
            if isinstance(node, ast.Dict):
                named = {k.value: v for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)}
                rate = named.get("lr")
                if "params" in named and isinstance(rate, ast.Constant) and isinstance(rate.value, float):
                    yield code, rate


def _divided(code: Code, node: ast.Constant, by: int) -> Edit | None:
    span, before = code.span(node), float(node.value)  # type: ignore[arg-type]
    if span is None:
        return None
    after = f"{nice(before / by):g}"
    name = f"lr at line {node.lineno}"
    return Edit(
        route="file", name=code.path, start=span[0], end=span[1], text=after, setting=name, before=f"{before:g}"
    )


def _groups(surface: Surface) -> Iterator[Change]:
    """A group of parameters that learns many times faster than the others."""
    for held in surface.settings:
        if held.known and held.number is not None and held.number > 1 and _GROUP.search(held.key):
            for after, size in ((nice(held.number / 10), 0.8), (1.0, 1.0)):
                edit = surface.edit(held, after)
                if edit is not None and after >= 1:
                    yield Change(
                        name=f"{held.name}={after:g}",
                        kind="group rate",
                        size=size,
                        edits=(edit,),
                        why=f"one group of parameters takes steps {held.number:g} times as long as the others",
                    )

"""The repair of the code that lint proposes: at the located line first, then elsewhere in the project."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ...errors import NanproofError
from ...linting import lint
from ...records import Finding
from ..change import Change, Edit
from ..evidence import Evidence
from ..surface import Surface

MOST = 6


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    yield from _scores(evidence, surface)
    paths = [c.path for c in surface.codes]
    if not paths:
        return
    try:
        found = [f for f in lint(paths, info=True) if f.edits]
    except NanproofError:
        return
    for finding in sorted(found, key=lambda f: _distance(f, evidence))[:MOST]:
        yield Change(
            name=f"{finding.code} {Path(finding.path).name}:{finding.line}",
            kind="code",
            size=0.6 if _distance(finding, evidence) < 20 else 0.9,
            why=finding.message,
            edits=tuple(
                Edit(
                    route="file",
                    name=str(Path(e.path).absolute()),
                    text=e.text,
                    start=e.start,
                    end=e.end,
                    setting=f"{finding.code} line {finding.line} byte {e.start}",
                )
                for e in finding.edits
            ),
        )


def _scores(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    """Attention scores as the textbook has them: q·k grows with the width of a head, q·k/√d does not."""
    for code in surface.codes:
        if code.path != evidence.file or "overflow" not in evidence.mechanism:
            continue
        for node in ast.walk(code.tree):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.MatMult):
                continue
            turned = re.search(r"\.(transpose|permute|swapaxes)\(|\.(mT|T)$", code.text(node.right))
            span = code.span(node.left)
            if not turned or span is None or not node.lineno <= evidence.line <= (node.end_lineno or 0):
                continue
            left = (
                code.text(node.left) if isinstance(node.left, ast.Name | ast.Attribute) else f"({code.text(node.left)})"
            )
            edit = Edit(
                route="file",
                name=code.path,
                start=span[0],
                end=span[1],
                setting=f"scores at line {node.lineno}",
                text=f"({left} * {left}.shape[-1] ** -0.5)",
                before=code.text(node.left),
            )
            yield Change(
                name=f"scores/√d at line {node.lineno}",
                kind="code",
                size=0.7,
                edits=(edit,),
                why="scores without 1/√d grow with the width of a head, and with the weights",
            )


def _distance(finding: Finding, evidence: Evidence) -> int:
    if not evidence.file or Path(finding.path).absolute() != Path(evidence.file):
        return 10_000
    return abs(finding.line - evidence.line)

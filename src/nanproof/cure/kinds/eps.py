"""An eps that does not vanish: in the optimizer, in norms, and wherever a tiny constant is written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ...config.calls import OPTIMIZERS
from ..change import Change, Edit
from ..evidence import Evidence
from ..surface import Surface
from .precision import stores_half

TINY = 1e-7
FLOORS = (1e-6, 1e-4)
HALF_FLOORS = (3e-3, 1e-2)
"""For float16 weights: there Adam's v is 0 for gradients below 8e-3, and a smaller eps makes their updates many times
longer than the learning rate."""
_EPS = re.compile(r"(^|[._])eps(ilon)?$", re.I)
_OF_NORM = re.compile(r"norm", re.I)
_ADAMS = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax"}


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    half = stores_half(surface)
    for held in surface.settings:
        if not held.known or not _EPS.search(held.key) or held.number is None or not 0 <= held.number < TINY:
            continue
        for after in HALF_FLOORS if half and not _OF_NORM.search(held.key) else FLOORS:
            edit = surface.edit(held, after)
            if edit is not None:
                yield Change(
                    name=f"{held.name}={after:g}",
                    kind="eps",
                    size=0.5 if after < 1e-5 else 0.7,
                    edits=(edit,),
                    why=f"{held.label} {held.number:g} is lost beside what it is added to",
                )
    yield from _optimizer(surface, HALF_FLOORS if half else FLOORS[1:])
    yield from _written(evidence, surface)


def _optimizer(surface: Surface, floors: tuple[float, ...]) -> Iterator[Change]:
    """Adam's default of 1e-8 is 0 in half precision, and too small where gradients vanish."""
    for code in surface.codes:
        for node in ast.walk(code.tree):
            if not isinstance(node, ast.Call) or code.dotted(node.func).rpartition(".")[2] not in _ADAMS & OPTIMIZERS:
                continue
            if any(k.arg in ("eps", None) for k in node.keywords):  # a number is read as a setting, above
                continue
            last = node.keywords[-1].value if node.keywords else node.args[-1] if node.args else None
            span = code.span(last) if last is not None else None
            for eps in floors if span is not None else ():
                assert span is not None
                edit = Edit(
                    route="file",
                    name=code.path,
                    text=f", eps={eps:g}",
                    start=span[1],
                    end=span[1],
                    setting="Adam.eps",
                    before="1e-08",
                )
                yield Change(
                    name=f"Adam eps={eps:g}",
                    kind="eps",
                    size=0.7,
                    edits=(edit,),
                    why="1e-8, Adam's default, is 0 in half precision, and no floor where gradients vanish",
                )
            if span is not None:
                return


def _written(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    """Constants below 1e-7 in the located function: ``x / (norm + 1e-12)``, ``clamp(min=1e-20)``."""
    for code in surface.codes:
        if not evidence.file or code.path != evidence.file:
            continue
        near = _function(code.tree, evidence.line)
        for node in ast.walk(near) if near is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < TINY:
                span = code.span(node)
                if span is not None:
                    edit = Edit(
                        route="file",
                        name=code.path,
                        text="1e-5",
                        start=span[0],
                        end=span[1],
                        setting=f"constant at line {node.lineno}",
                        before=f"{node.value:g}",
                    )
                    yield Change(
                        name=f"{node.value:g} → 1e-5 at line {node.lineno}",
                        kind="eps",
                        size=0.6,
                        edits=(edit,),
                        why=f"{node.value:g} is no floor for what is computed there",
                    )


def _function(tree: ast.Module, line: int) -> ast.AST | None:
    around = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.lineno <= line <= (n.end_lineno or 0)
    ]
    return min(around, key=lambda n: (n.end_lineno or 0) - n.lineno, default=None)

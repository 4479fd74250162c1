"""A floor under what is divided by, or what a logarithm or a square root is taken of, where that was 0."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...config.code import Code
from ..change import Change, Edit
from ..evidence import Evidence
from ..surface import Surface

FLOOR = "1e-6"
MOST = 8
"""More places are not changed together."""
_ROOTS = {"log": {"log", "log2", "log10"}, "sqrt": {"sqrt", "rsqrt"}, "rsqrt": {"sqrt", "rsqrt"}, "div": set[str]()}


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    """At the located line; all over the project where the line is that of ``backward``."""
    op = str(evidence.location.get("op", "")).partition(".")[0].rstrip("_").removesuffix("Backward0").lower()
    if op not in _ROOTS or evidence.mechanism not in ("pole", "invalid", "where-gradient"):
        return
    here = [(c, n) for c in surface.codes for n in _arguments(c, op) if c.path == evidence.file]
    found = [(c, n) for c, n in here if _statement(c, n)[0] <= evidence.line <= _statement(c, n)[1]]
    if not found and op != "div":
        found = [(c, n) for c in surface.codes for n in _arguments(c, op)]
    texts = {c.text(n) for c, n in found}
    # what had to be kept from 0 is divided by elsewhere, too: log(var) + d / (2 * var)
    divisors = [
        (c, n) for c in {c.path: c for c, _ in found}.values() for m in _arguments(c, "div") for n in ast.walk(m)
    ]
    found += [(c, n) for c, n in divisors if isinstance(n, ast.expr) and c.text(n) in texts]
    if not found or len(found) > MOST:
        return
    below = evidence.mechanism == "invalid"
    edits = [_floored(code, node, below) for code, node in dict.fromkeys(found)]
    if all(edits):
        yield Change(
            name=f"floor under {op}",
            kind="code",
            size=0.65,
            edits=tuple(dict.fromkeys(e for e in edits if e)),
            why=f"{op} has no finite value or gradient at 0: {FLOOR} keeps its argument away from it",
        )


def _arguments(code: Code, op: str) -> Iterator[ast.expr]:
    """What an operation is applied to, for each of its places in a file; of a division the divisor."""
    for node in ast.walk(code.tree):
        if op == "div" and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if not isinstance(node.right, ast.Constant):
                yield node.right
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ROOTS[op]:
            if code.dotted(node.func).startswith("torch."):
                yield from node.args[:1]
            elif not node.args:  # x.log(), and not self.log("loss", loss)
                yield node.func.value


def _statement(code: Code, node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _floored(code: Code, node: ast.expr, below: bool) -> Edit | None:
    span, text = code.span(node), code.text(node)
    if span is None:
        return None
    whole = text if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({text})"
    return Edit(
        route="file",
        name=code.path,
        text=f"{whole}.clamp_min({FLOOR})" if below else f"({whole} + {FLOOR})",
        start=span[0],
        end=span[1],
        setting=f"floor at line {node.lineno} byte {span[0]}",
        before=text,
    )

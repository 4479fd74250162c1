"""Write the table of docs/ops.md: where each textbook formula breaks, and what `nanproof.ops` gives there.

    python scripts/ops_table.py            # run every formula and write the table
    python scripts/ops_table.py --check    # exit 1 when the page holds another table than the run gives

Each formula is run on the inputs listed with it, in order, until its value or a gradient is not finite, or its
value is wrong: more than 1 % from what float64 gives. That input is the row. The formulas are evaluated from the
text that the table shows, so text and numbers cannot differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanproof import ops

PAGE = Path(__file__).parents[1] / "docs" / "ops.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
DTYPES = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A textbook formula, ours, and the inputs to try, mild ones first: the text of each variable."""

    name: str
    textbook: str
    ours: str
    tries: list[dict[str, str]]


def sweep(*values: str) -> list[dict[str, str]]:
    return [{"x": value} for value in values]


ROWS = [
    Row(
        name="masked_mean",
        textbook="(x * mask).sum() / mask.sum()",
        ours="masked_mean(x, mask)",
        tries=[{"x": "[1, 2]", "mask": mask} for mask in ("[1, 1]", "[1, 0]", "[0, 0]")],
    ),
    Row(
        name="safe_div",
        textbook="a / b",
        ours="safe_div(a, b)",
        tries=[{"a": "[1]", "b": b} for b in ("[1]", "[1e-3]", "[0]")],
    ),
    Row(name="safe_log", textbook="x.log()", ours="safe_log(x)", tries=sweep("[1]", "[1e-3]", "[0]")),
    Row(name="safe_sqrt", textbook="x.sqrt()", ours="safe_sqrt(x)", tries=sweep("[1]", "[1e-3]", "[0]")),
    Row(
        name="safe_norm",
        textbook="x.square().sum().sqrt()",
        ours="safe_norm(x)",
        tries=sweep("[3, 4]", "[300, 400]", "[3e20, 4e20]", "[0, 0]"),
    ),
    Row(
        name="normalize",
        textbook="x / (x.square().sum().sqrt() + 1e-8)",
        ours="normalize(x)",
        tries=sweep("[3, 4]", "[300, 400]", "[0, 0]"),
    ),
    Row(
        name="rms_norm",
        textbook="x / (x.square().mean() + 1e-8).sqrt()",
        ours="rms_norm(x)",
        tries=sweep("[3, 4]", "[300, 400]", "[0, 0]", "[3e20, 4e20]"),
    ),
    Row(
        name="masked_softmax",
        textbook="x.masked_fill(mask == 0, -torch.inf).softmax(-1)",
        ours="masked_softmax(x, mask)",
        tries=[{"x": "[1, 2]", "mask": mask} for mask in ("[1, 1]", "[1, 0]", "[0, 0]")],
    ),
    Row(
        name="masked_cross_entropy",
        textbook="F.cross_entropy(x, y)",
        ours="masked_cross_entropy(x, y)",
        tries=[{"x": "[[1, 2]]", "y": y} for y in ("[1]", "[-100]")],
    ),
    Row(
        name="normalized_mse",
        textbook="(x - t).square().mean() / t.var(correction=0)",
        ours="normalized_mse(x, t)",
        tries=[{"x": "[1, 2]", "t": t} for t in ("[1, 3]", "[2, 2]")],
    ),
    Row(
        name="log_sinkhorn",
        textbook="(x.exp() / x.exp().sum(0) / (x.exp() / x.exp().sum(0)).sum(1, keepdim=True)).log()",
        ours="log_sinkhorn(x, iterations=1)",
        tries=sweep("[[0, 1], [1, 0]]", "[[0, 20], [20, 0]]", "[[0, 200], [200, 0]]"),
    ),
    Row(
        name="sinkhorn",
        textbook="x.exp() / x.exp().sum(0) / (x.exp() / x.exp().sum(0)).sum(1, keepdim=True)",
        ours="sinkhorn(x, iterations=1)",
        tries=sweep("[[0, 1], [1, 0]]", "[[0, 20], [20, 0]]", "[[0, 200], [200, 0]]"),
    ),
    Row(
        name="select",
        textbook="torch.where(x > 0, x.log(), 0)",
        ours="select(x > 0, torch.log, 0.0, x)",
        tries=sweep("[1]", "[0]"),
    ),
]


def evaluate(formula: str, given: dict[str, str], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The value of a formula and the gradients of its floating inputs, from an upstream gradient of ones."""
    tensors = {
        name: torch.tensor(eval(text), dtype=torch.long if name in ("mask", "y") else dtype)
        for name, text in given.items()
    }
    leaves = [t.requires_grad_() for name, t in tensors.items() if t.is_floating_point() and name != "t"]
    names: dict[str, Any] = {"torch": torch, "F": F, **{name: getattr(ops, name) for name in ops.__all__}}
    out = eval(formula, names, tensors)
    return out.detach(), list(torch.autograd.grad(out, leaves, torch.ones_like(out)))


def broken(formula: str, given: dict[str, str], dtype: torch.dtype) -> bool:
    value, grads = evaluate(formula, given, dtype)
    if not all(bool(t.isfinite().all()) for t in (value, *grads)):
        return True
    exact = evaluate(formula, given, torch.float64)[0]
    return not bool(((value.double() - exact).abs() <= 0.01 * exact.abs() + 0.01).all())


def show(values: Any) -> str:
    if isinstance(values, list):
        return f"[{', '.join(show(v) for v in values)}]"
    return {"nan": "**NaN**", "inf": "**Inf**", "-inf": "**-Inf**"}.get(str(values), f"{values:.4g}")


def lines() -> Iterator[str]:
    yield "| operation | textbook | dtype | first input that breaks it | textbook: value; gradient | ours |"
    yield "|---|---|---|---|---|---|"
    for row in ROWS:
        for dtype_name, dtype in DTYPES.items():
            given = next((g for g in row.tries if broken(row.textbook, g, dtype)), None)
            if given is None:
                raise SystemExit(f"{row.name}: no listed input breaks the textbook in {dtype_name}; list a harder one")
            mine = evaluate(row.ours, given, dtype)
            inputs = ", ".join(f"{name} = {text}" for name, text in given.items())
            cells = [
                "; ".join(show(t.tolist()) for t in (value, *grads))
                for value, grads in (evaluate(row.textbook, given, dtype), mine)
            ]
            yield f"| `{row.name}` | `{row.textbook}` | {dtype_name} | {inputs} | {cells[0]} | {cells[1]} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the table of docs/ops.md.")
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 when the page is out of date")
    check = parser.parse_args(arguments).check
    torch.set_num_threads(1)
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    fresh = f"{before}{BEGIN}\n" + "\n".join(lines()) + f"\n{END}{after}"
    if fresh == page:
        return 0
    if check:
        print("docs/ops.md is out of date. Next: python scripts/ops_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

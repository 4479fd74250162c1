"""Leave out the samples that arrived broken: the dataset of the loader, without their indices."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..change import Change, Edit
from ..evidence import Evidence
from ..surface import Surface


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    if not evidence.bad_batch or not evidence.samples:
        return
    out = sorted(set(evidence.samples))
    for code in surface.codes:
        for node in ast.walk(code.tree):
            if not isinstance(node, ast.Call) or code.dotted(node.func).rpartition(".")[2] != "DataLoader":
                continue
            first = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "dataset"), None)
            span = code.span(first) if first is not None else None
            if first is None or span is None:
                continue
            held = code.text(first)
            kept = f"[i for i in range(len({held})) if i not in {set(out)!r}]"
            edit = Edit(
                route="file",
                name=code.path,
                start=span[0],
                end=span[1],
                setting="dataset",
                before=held,
                text=f"__import__('torch').utils.data.Subset({held}, {kept})",
            )
            yield Change(
                name=f"without sample{_these(out)}",
                kind="data",
                size=0.6,
                edits=(edit,),
                why=f"the batch of step {evidence.step} was not finite when it arrived",
            )
            return


def _these(indices: list[int]) -> str:
    if len(indices) == 1:
        return f" {indices[0]}"
    return f"s {', '.join(map(str, indices[:3]))}{' …' if len(indices) > 3 else ''}"

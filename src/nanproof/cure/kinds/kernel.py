"""Another kernel for the same mathematics: attention without a fused kernel, eager instead of compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...config.meaning import is_on
from ..change import Change, Edit
from ..evidence import Evidence
from ..surface import Surface

_ATTENTION = re.compile(r"(^|\.)_?(attn|attention)_(implementation|impl|backend|type)$")
_COMPILE = re.compile(r"(^|\.)(torch_)?compile(_model)?$|(^|\.)use_compile$")
_COMPILES = re.compile(rb"torch\.compile\(|\b(model|net|module)\.compile\(|@torch\.compile")


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    for value in surface.settings:
        if not value.known:
            continue
        if _ATTENTION.search(value.key) and str(value.value).startswith(("sdpa", "flash")):
            edit = surface.edit(value, "eager")
            if edit is not None:
                yield Change(
                    name=f"{value.name}=eager",
                    kind="kernel",
                    size=0.8,
                    edits=(edit,),
                    why=f"{value.value} is one fused kernel, whose gradients differ where rows are masked",
                )
        if _COMPILE.search(value.key) and is_on(value) and (edit := surface.edit(value, False)) is not None:
            yield Change(
                name=f"{value.name}=false", kind="kernel", size=0.8, edits=(edit,), why="eager instead of compiled"
            )
    if any(code.mentions(_COMPILES) for code in surface.codes):
        yield Change(
            name="not compiled",
            kind="kernel",
            size=0.8,
            edits=(Edit(route="variable", name="TORCHDYNAMO_DISABLE", text="1"),),
            why="eager instead of compiled",
        )

"""Clipped gradients: a tenth of the norm in force, or a norm of 1 where nothing clips."""

from __future__ import annotations

from collections.abc import Iterator

from ...config.proposals import nice
from ..change import Change, Edit
from ..evidence import Evidence
from ..surface import Surface


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    held = next((v for v in surface.meaning.all("clip_norm") if v.known and v.number is not None), None)
    if held is not None and held.number:
        edit = surface.edit(held, nice(held.number / 10))
        if edit is not None:
            yield Change(
                name="clip/10",
                kind="clipping",
                size=0.9,
                edits=(edit,),
                why=f"one large gradient moves the weights less: {held.label} {held.number:g} → {held.number / 10:g}",
            )
    elif not any(v.known is False for v in surface.meaning.all("clip_norm")):
        for norm in (1.0, 0.1):
            yield Change(
                name=f"clip {norm:g}",
                kind="clipping",
                size=0.8 if norm == 1.0 else 1.0,
                edits=(Edit(route="option", name="--max-norm", text=f"{norm:g}", setting="max_norm"),),
                why=f"nothing clips the gradients: the guard clips their norm at {norm:g}",
            )

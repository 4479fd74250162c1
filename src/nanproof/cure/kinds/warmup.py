"""A longer warm-up, where the program has one."""

from __future__ import annotations

from collections.abc import Iterator

from ..change import Change
from ..evidence import Evidence
from ..surface import Surface


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    total = surface.schedule()
    for concept in ("warmup_steps", "warmup_ratio"):
        held = next((v for v in surface.meaning.all(concept) if v.known and v.number is not None), None)
        if held is None or held.number is None or (concept == "warmup_steps" and not total):
            continue
        after = max(int(held.number) * 2, (total or 0) // 5) if concept == "warmup_steps" else max(0.2, held.number)
        edit = surface.edit(held, after)
        if edit is not None and after != held.number:
            yield Change(
                name=f"{held.name}={after:g}",
                kind="warm-up",
                size=1.0,
                edits=(edit,),
                why=f"the first steps are shorter: {held.label} {held.number:g} → {after:g}",
            )

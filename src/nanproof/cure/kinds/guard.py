"""The program as it is under the guard, which skips bad steps; and with islands, where a range is left."""

from __future__ import annotations

from collections.abc import Iterator

from ..change import Change, Edit
from ..evidence import Evidence
from ..surface import Surface

NARROW = ("float16", "bfloat16")
"""What a float32 island is wider than."""


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    range_left = evidence.mechanism == "range-overflow" and evidence.dtype in ("", *NARROW)
    unknown = evidence.step is not None and not evidence.mechanism and not evidence.what.endswith("input")
    if range_left or unknown:
        where = str(evidence.location.get("module", "")) or "the located line"
        yield Change(
            name="island",
            kind="guard",
            size=0.4,
            edits=(Edit(route="option", name="--heal"),),
            why=f"{where} computes in float32 from the step in which it overflows",
        )
    yield Change(
        name="guard",
        kind="guard",
        size=0.5,
        edits=(Edit(route="option", name="--policy", text="default"),),
        why="bad steps are skipped before they reach the weights",
    )

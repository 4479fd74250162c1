"""Candidates, one kind per file: each looks at the evidence and at what can be changed, and proposes.

A kind is a function ``propose(evidence, surface)`` that yields `Change` records; it is listed in ``KINDS``, the
likeliest first. A candidate that no evidence speaks for is still tried where it is cheap: the trial decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..change import Change
from ..evidence import Evidence
from ..surface import Surface
from . import clipping, code, data, eps, floor, guard, initialization, kernel, precision, rate, warmup

Propose = Callable[[Evidence, Surface], Iterator[Change]]

KINDS: dict[str, Propose] = {
    "guard": guard.propose,
    "data": data.propose,
    "code": code.propose,
    "floor": floor.propose,
    "precision": precision.propose,
    "eps": eps.propose,
    "learning rate": rate.propose,
    "clipping": clipping.propose,
    "warm-up": warmup.propose,
    "initialization": initialization.propose,
    "kernel": kernel.propose,
}


def propose(evidence: Evidence, surface: Surface) -> list[Change]:
    """Every single change worth a trial; of two with the same edits the first is kept."""
    found: dict[frozenset[tuple[str, str | None, int]], Change] = {}
    for kind in KINDS.values():
        for change in kind(evidence, surface):
            found.setdefault(frozenset((e.key, e.text, e.start) for e in change.edits), change)
    names: dict[str, Change] = {}
    for change in found.values():
        names.setdefault(change.name, change)
    return list(names.values())

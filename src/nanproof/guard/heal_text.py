"""What a search for a repair has come to, in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ..locating import Location
from ..records import Repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing:
    """What a search has come to."""

    repairs: tuple[Repair, ...]
    opened: bool
    committed: bool
    """Whether the bad step was run again with the repair, and its gradients are in place."""
    location: Location | None = None
    """Where the step failed."""

    @property
    def reason(self) -> str:
        if self.committed:
            return f"{in_words(self.repairs)}: run again, the step is finite"
        if self.opened:
            return f"{in_words(self.repairs)} from now on; this batch is left out"
        return f"it is finite if {in_words(self.repairs)}"


def in_words(repairs: Sequence[Repair]) -> str:
    """What is repaired, and how.

    >>> one = Repair(path="layers.0.mlp", kind="float32", step=12)
    >>> in_words([one])
    'layers.0.mlp computes in float32'
    >>> in_words([one, Repair(path="loss.py:31", kind="float32", step=12)])
    'layers.0.mlp and loss.py:31 compute in float32'
    """
    said = []
    for does in dict.fromkeys(r.does for r in repairs):
        *first, last = [r.name for r in repairs if r.does == does]
        verb, _, rest = does.partition(" ")
        said.append(f"{', '.join(first)} and {last} {verb.removesuffix('s')} {rest}" if first else f"{last} {does}")
    return " and ".join(said)


def told(healing: Healing, number: int) -> list[str]:
    """What was found, why, what it costs, what it does not do, and how to make it permanent."""
    first, words = healing.repairs[0], in_words(healing.repairs)
    place = healing.location
    where = f"{place.op} at {place.place} " if place is not None and place.line else ""
    why = f"{where}left the range of {first.was}, {first.why}" if first.kind == "float32" else f"{where}{first.why}"
    share = sum(r.share for r in healing.repairs)
    size = f" ({share:.0%} of the parameters)" if first.kind != "eps" else ""
    does = f"{words} from step {number:,} on" if healing.opened else f"step {number:,} is finite if {words}"
    lines = [f"nanproof: {does}{size}: {why}", f"  proof: {first.proof}"]
    if first.kind == "float32":
        lines.append(
            "  this removes the overflow, not the growth that led to it"
            + (f": the largest value that leaves it is {first.largest:.3g}" if first.largest else "")
        )
    forms = list(dict.fromkeys(_in_code(r.kind, healing.repairs) for r in healing.repairs))
    if healing.opened:
        also = "" if first.kind == "eps" else ", also for evaluation"
        return [*lines, *(f"  to make it permanent{also}: {form}" for form in forms)]
    opened = '  nothing was changed; to open it: nanproof run --heal (Guard(heal="open")), or in the script '
    return [*lines, *(opened + form for form in forms)]


def _in_code(kind: str, repairs: Sequence[Repair]) -> str:
    """How a script has the repair from its start."""
    mine = [r for r in repairs if r.kind == kind]
    paths = ", ".join(json.dumps(r.path) for r in mine)
    if kind == "eps":
        return f"{mine[0].path}(..., eps={mine[0].value:g}); better: float32 weights, which keep eps as it is"
    how = "" if kind == "float32" else f", kind={json.dumps(kind)}"
    return f"nanproof.islands.open(model, {paths}{how})"

"""One case: all that is known of a run, from files, facts and a description, put before the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..errors import UsageError
from .data.facts import facts_of
from .data.report import DataReport
from .described import load_description, read_description
from .diagnosis import Diagnosis, conclude
from .evidence import Evidence
from .stated import read_facts


def diagnose_all(
    paths: Sequence[str | os.PathLike[str]], *, facts: Mapping[str, object],
    evidence: str | os.PathLike[str] | Mapping[str, object] | None = None, data: DataReport | None = None,
) -> Diagnosis:  # fmt: skip
    """The diagnosis of everything together. What the user states comes first, so that it is cited first."""
    if not paths and not facts and evidence is None and data is None:
        raise UsageError("nothing to diagnose was named", hint="nanproof diagnose DIR, --fact or --evidence FILE")
    stated = read_facts(facts)
    described, notes = _described(evidence)
    known = Evidence.of(*stated, *described, *(facts_of(data) if data is not None else ()))
    if not paths:
        return conclude(known, notes=notes)
    from .sources.places import SOUGHT  # the readers of all formats: facts alone do not need them
    from .wreck import order_moments, read_wreck

    wreck = read_wreck(paths, gpu=str(facts.get("gpu", "")))
    if wreck.places.empty:
        named = ", ".join(os.fspath(p) for p in paths)
        raise UsageError(f"nothing to diagnose was found in {named}", hint=f"looked for {SOUGHT}")
    part = wreck.part
    return conclude(
        known.plus(*part.facts), notes=(*notes, *part.notes), checklist=part.looked, tables=part.tables,
        timeline=order_moments(part.moments),
    )  # fmt: skip


def _described(evidence: str | os.PathLike[str] | Mapping[str, object] | None) -> tuple[Evidence, tuple[str, ...]]:
    if evidence is None:
        return Evidence.of(), ()
    return read_description(evidence) if isinstance(evidence, Mapping) else load_description(os.fspath(evidence))

"""One case: all that is known of a run, from files, facts and a description, put before the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UsageError
from .data.facts import facts_of
from .data.report import DataReport
from .described import load_description, read_description
from .diagnosis import Diagnosis, Held, conclude
from .evidence import Evidence
from .stated import read_facts


def diagnose_all(
    paths: Sequence[str | os.PathLike[str]],
    *,
    facts: Mapping[str, object],
    evidence: str | os.PathLike[str] | Mapping[str, object] | None = None,
    data: DataReport | None = None,
) -> Diagnosis:
    """The diagnosis of everything together. What the user states comes first, so that it is cited first."""
    if not paths and not facts and evidence is None and data is None:
        raise UsageError("no path given", hint="nanproof diagnose .")
    from .commands import Commands

    stated = read_facts(facts)
    told, notes = _described(evidence)
    known = Evidence.of(*stated, *told, *(facts_of(data) if data is not None else ()))
    described = None if evidence is None or isinstance(evidence, Mapping) else evidence
    if not paths:
        return conclude(known, notes=notes, commands=Commands(None, stated=facts, described=described))
    from .run import order_moments, read_run  # the readers of all formats: facts alone do not need them
    from .sources.places import SOUGHT

    for path in map(Path, paths):
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe
            raise UsageError(f"{path} is not a file", hint="write the log to a file and name that")
    run = read_run(paths, gpu=str(facts.get("gpu", "")))
    if run.places.empty:
        named = ", ".join(os.fspath(p) for p in paths)
        raise UsageError(f"found nothing to diagnose in {named}", hint=f"looked for {SOUGHT}")
    part = run.part
    held = tuple(Held(setting=name, value=value, clash=clash) for name, value, clash in run.in_force.rows())
    return conclude(
        known.plus(*part.facts),
        commands=Commands(run, paths, stated=facts, described=described),
        notes=(*notes, *part.notes),
        checklist=part.looked,
        tables=part.tables,
        timeline=order_moments(part.moments),
        in_force=held,
    )


def _described(evidence: str | os.PathLike[str] | Mapping[str, object] | None) -> tuple[Evidence, tuple[str, ...]]:
    if evidence is None:
        return Evidence.of(), ()
    return read_description(evidence) if isinstance(evidence, Mapping) else load_description(os.fspath(evidence))

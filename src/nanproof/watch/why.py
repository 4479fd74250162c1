"""Why a run is as it is: the first cause with its evidence, the repair and the next command, and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.value import show
from ..diagnosing import Diagnosis, diagnose
from ..diagnosing.sources.configs import Config, find_configs
from ..diagnosing.sources.places import find_places
from ..errors import NanproofError
from .runs import typed
from .state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What a page or a report says about the cause; empty texts where nothing is known."""

    cause: str = ""
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    repair: str = ""
    ask: str = ""
    """The fact that would decide, when no cause stands out."""
    command: str = ""
    commands: tuple[str, ...] = ()


def why(path: Path, state: RunState, incidents: Sequence[Mapping[str, Any]], diagnosis: Diagnosis | None = None) -> Why:
    """The cause of trouble in a run; nothing for a run that is healthy."""
    if state.healthy and not incidents:
        return Why()
    diagnosis = diagnosis or diagnosed(path)[0]
    located = next((i for i in incidents if i["where"]), None)
    known = located is not None and located["mechanism"] not in ("", "unknown")
    place = f"{located['mechanism']} at {located['where']}" if known and located else ""
    locate = f"nanproof locate {typed(path)}" if incidents else ""
    if diagnosis is None or not diagnosis.causes or diagnosis.benign:
        return Why(cause=place, command=locate, commands=(locate,) if locate else ())
    first = diagnosis.causes[0]
    question = diagnosis.missing[0] if diagnosis.missing else None
    asked = question.commands if question is not None else ()
    commands = tuple(c for c in dict.fromkeys([*first.commands, *asked, locate]) if c)
    sure = "" if first.confidence == "strong" else f" ({first.confidence})"
    return Why(
        cause=f"{place}; {first.title}{sure}" if place else f"{first.title}{sure}",
        evidence=first.evidence, against=first.against, repair=first.fix,
        ask=f"To decide: {question.asks}" if question is not None and not diagnosis.decided else "",
        command=commands[0] if commands else "", commands=commands,
    )  # fmt: skip


def facts_of(path: Path, state: RunState, incidents: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """What takes a second to find out: the cause, and the settings."""
    return {"why": why(path, state, incidents), "settings": settings_of(path)}


def diagnosed(path: Path) -> tuple[Diagnosis | None, str]:
    """The diagnosis of a run's files, or why there is none."""
    try:
        return diagnose(path), ""
    except (NanproofError, OSError) as error:
        return None, str(error)


def settings_of(path: Path) -> dict[str, str]:
    """The settings in the configs of a run's folder, as text."""
    return {v.key: show(v.value) for c in configs_of(path) for v in c.settings}


def configs_of(path: Path) -> list[Config]:
    """The project's own configs in a run's folder."""
    if not path.is_dir():
        return []
    try:
        places = find_places([path])
        inside = [p for p in places.configs if path in Path(p).parents]
        return [c for c in find_configs(tuple(inside), path) if c.kind == "own"]
    except NanproofError:
        return []

"""Why a run is as it is: the first cause with its evidence, the repair and the next command, and its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.value import show
from ..diagnosing import Diagnosis, diagnose
from ..diagnosing.sources.configs import Config, find_configs
from ..diagnosing.sources.places import find_places
from ..errors import NanproofError
from .alive import record_of
from .runs import typed
from .state import RunState

_OPTION = re.compile(
    r"(?:--?([A-Za-z][\w.-]*)(?:=(.*))?|\+*([A-Za-z_][\w.]*)=(.*))", re.S
)  # --lr 1, --lr=1, optim.lr=1

OWN_ERROR = "an error of the script, not of its numbers"


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
    """The cause of trouble in a run; nothing for one that is healthy, was ended from outside or never began."""
    if not in_trouble(state, incidents):
        return Why()
    if state.own_error and not incidents:
        return Why(cause=OWN_ERROR)
    diagnosis = diagnosis or diagnosed(path)[0]
    located = next((i for i in incidents if i["where"] and i["cause"]), None)
    place = f"{located['cause']} at {located['where']}" if located is not None else ""
    locate = f"nanproof locate {typed(path)}" if incidents else ""
    causes = diagnosis.causes if diagnosis is not None and not diagnosis.benign else ()
    # what the guard answered looks ordinary in the log; the incident knows better
    causes = tuple(c for c in causes if c.name != "benign") if incidents else causes
    if diagnosis is None or not causes:
        return Why(cause=place, command=locate, commands=(locate,) if locate else ())
    first = causes[0]
    question = diagnosis.missing[0] if diagnosis.missing else None
    asked = question.commands if question is not None else ()
    commands = tuple(c for c in dict.fromkeys([*first.commands, *asked, locate]) if c)
    sure = "" if first.confidence == "strong" else f" ({first.confidence})"
    return Why(
        cause=f"{place}; {first.title}{sure}" if place else f"{first.title}{sure}",
        evidence=tuple(map(nearer, first.evidence)),
        against=tuple(map(nearer, first.against)),
        repair=first.fix,
        ask=f"To decide: {question.asks}" if question is not None and not diagnosis.decided else "",
        command=commands[0] if commands else "",
        commands=commands,
    )


def in_trouble(state: RunState, incidents: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is something to diagnose."""
    return state.step is not None and bool(incidents or state.since is not None or state.kind in ("died", "stopped"))


def nearer(text: str) -> str:
    """A sentence whose paths begin here."""
    return text.replace(f"{Path.cwd()}/", "")


def facts_of(
    path: Path, state: RunState, incidents: Sequence[Mapping[str, Any]], known: Why | None = None
) -> dict[str, object]:
    """What takes a second to find out: the cause, if it is not ``known``, and the settings."""
    return {"why": known or why(path, state, incidents), "settings": settings_of(path)}


def diagnosed(path: Path) -> tuple[Diagnosis | None, str]:
    """The diagnosis of a run's files, or why there is none."""
    try:
        return diagnose(path), ""
    except (NanproofError, OSError) as error:
        return None, str(error)


def settings_of(path: Path) -> dict[str, str]:
    """The settings of a run, as text: its configs, and the options that its script was given."""
    told = {v.key: show(v.value) for c in configs_of(path) for v in c.settings}
    return told | options_in(command_of(path))


def configs_of(path: Path) -> list[Config]:
    """The project's own configs in a run's folder, or beside its log."""
    folder = path if path.is_dir() else path.parent
    try:
        found = find_places([folder]).configs
        inside = [p for p in found if (folder in Path(p).parents if path.is_dir() else folder == Path(p).parent)]
        return [c for c in find_configs(tuple(inside), folder) if c.kind == "own"]
    except NanproofError:
        return []


def command_of(path: Path) -> list[str]:
    """The command that `nanproof run` recorded."""
    command = record_of(path)[0].get("command")
    return [str(word) for word in command] if isinstance(command, list) else []


def torchrun_ranks(path: Path) -> str:
    """How many ranks torchrun had started; empty when it was not torchrun."""
    known = record_of(path)[0].get("environment")
    known = known if isinstance(known, dict) else {}
    return str(known.get("ranks", "1")) if known.get("launcher") == "torchrun" else ""


def script_in(command: Sequence[str]) -> list[str]:
    """The script behind `nanproof run` with its arguments; empty for a module or another program."""
    words = list(command[command.index("run") + 1 :]) if "run" in command else []
    return next((words[i:] for i, w in enumerate(words) if w.endswith(".py") or words[max(0, i - 1)] == "-m"), [])


def options_in(command: Sequence[str]) -> dict[str, str]:
    """What a command gives to the script behind `nanproof run`.

    >>> options_in(["python", "-m", "nanproof", "run", "--policy", "strict", "train.py", "--lr", "1e-3", "--fast"])
    {'lr': '1e-3', 'fast': 'true'}
    >>> options_in(["nanproof", "run", "-m", "my.train", "model.width=64", "--seeds", "1", "2"])
    {'model.width': '64', 'seeds': '1 2'}
    >>> options_in(["nanproof", "run", "train.py", "--resume", "", "--tag="])
    {'resume': "''", 'tag': "''"}
    """
    found: dict[str, list[str]] = {}
    key = ""
    for word in script_in(command)[1:]:
        if match := _OPTION.fullmatch(word):
            key, given = (match[1], match[2]) if match[1] else (match[3], match[4])
            found[key] = [given] if given is not None else []
        elif key:
            found[key].append(word)
    return {k: (" ".join(values) or "''") if values else "true" for k, values in found.items()}

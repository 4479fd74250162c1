"""A run as it is watched: its log, followed, and the incidents of its folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import NanproofError, UsageError
from ..forecast import CLOSER
from ..logs import Column, Follower, Series, find_logs
from ..logs.foresee import Outlook, joined
from ..records import Incident, to_json
from .alive import RUN_LOG, signs_of
from .history import about
from .state import RunState, Signs, state_of

LOOKS = 2.0  # seconds between two looks at who writes a log
EDITOR = "vscode://file/{path}:{line}"
NEWEST = 500  # incidents that are listed


class Run:
    """One run. ``id`` says nothing of its path: it may stand in an address."""

    def __init__(self, number: int, path: str | os.PathLike[str], name: str = "", log_run: str | None = None) -> None:
        self.id = f"r{number}"
        self.path = Path(path)
        self.name = name or self.path.name or str(self.path)
        self._follower = Follower(self.path, run=log_run)
        self._incidents: dict[str, tuple[Path, Incident]] = {}
        self._seen: set[str] = set()
        self._looked, self._signs = -LOOKS, Signs()
        self.outlook = Outlook()
        self._risks: list[Column] = []

    def poll(self) -> Series:
        """What is new in the log since the last time."""
        new = self._follower.poll()
        risk = self.outlook.take(new)
        self._risks += [risk] if risk is not None else []
        return new

    def foreseen(self, *, new: bool = False) -> list[Column]:
        """What the log itself does not hold: forecasts and, without a guard, the risk; ``new`` since the last poll."""
        drawn = self.outlook.drawn(self.series.rows)
        if not self._risks:
            return drawn
        parts = self._risks[-1:] if new else self._risks
        self._risks = [joined(self._risks)]
        shown = joined(parts)
        return [shown, *drawn] if (shown.values >= CLOSER).any() else drawn  # a curve of zeros tells nothing

    @property
    def series(self) -> Series:
        return self._follower.series

    def state(self) -> RunState:
        """How it stands, by what was read so far."""
        if time.monotonic() - self._looked > LOOKS:
            self._looked, self._signs = time.monotonic(), signs_of(self.path)
        return state_of(self.series, self._signs)

    def new_incidents(self) -> list[dict[str, Any]]:
        """Incidents that were not told yet, in short."""
        folder = self.path / "incidents"
        try:
            names = sorted(p.name for p in folder.iterdir() if p.name not in self._seen)
        except OSError:
            return []
        for name in names[-NEWEST:]:
            incident = _read(folder / name / "incident.json")
            if incident is not None:  # one that is being written is told the next time
                self._seen.add(name)
                self._incidents[f"{self.id}i{len(self._incidents)}"] = (folder / name, incident)
        told = [i for i, (path, _) in self._incidents.items() if path.name in names]
        return [short(i, self._incidents[i][1]) for i in told]

    def incidents(self) -> list[dict[str, Any]]:
        """All incidents that are known, in short."""
        self.new_incidents()
        return [short(i, incident) for i, (_, incident) in self._incidents.items()]

    def incident(self, key: str) -> dict[str, Any] | None:
        """Everything about one incident, with the command that shows it and the address that opens its line."""
        found = self._incidents.get(key)
        if found is None:
            return None
        folder, incident = found
        return {"id": key, "command": f"nanproof locate {typed(folder)}", **full(incident)}

    @property
    def guarded(self) -> bool:
        """Whether a guard wrote the log."""
        return (self.path / RUN_LOG).is_file()

    def told(self) -> dict[str, Any]:
        """What a page knows of a run besides its points."""
        return {
            "id": self.id, "name": self.name, "guarded": self.guarded, "incidents": self.incidents(),
            "state": state_json(self.state()), **about(self.series),
        }  # fmt: skip


def short(key: str, incident: Incident) -> dict[str, Any]:
    """What a list shows of an incident."""
    place = incident.location
    where = f"{Path(place.file).name}:{place.line}" if place is not None and place.file else ""
    return {
        "id": key, "step": incident.step, "time": incident.time, "verdict": str(incident.verdict),
        "kind": incident.verdict.kind, "action": incident.action.kind, "where": where,
        "mechanism": place.mechanism if place is not None else "", "rank": incident.rank,
    }  # fmt: skip


def full(incident: Incident) -> dict[str, Any]:
    """An incident with what its location says in words."""
    data: dict[str, Any] = to_json(incident)
    place = incident.location
    if place is not None:
        data["editor"] = editor_link(place.file, place.line)
        data["location"] |= {"advice": place.advice, "proof": place.proof}
    return data


def editor_link(file: str, line: int) -> str:
    """The address that opens a line in the editor; ``NANPROOF_EDITOR`` is its pattern, VS Code's unless set.

    >>> editor_link("no such file", 3)
    ''
    """
    pattern = os.environ.get("NANPROOF_EDITOR", EDITOR)
    place = Path(file)
    safe = re.match(r"[a-z][a-z0-9+.-]*://", pattern) and not pattern.startswith(("javascript:", "data:", "http:"))
    if not safe or not line or not place.is_file():
        return ""
    return pattern.format(path=quote(str(place.absolute()).lstrip("/")), line=line)


def state_json(state: RunState) -> dict[str, Any]:
    return {"kind": state.kind, "text": str(state), "headline": state.headline, "bad": state.bad, "since": state.since}


def typed(path: Path) -> str:
    """A path as one would type it here."""
    shown = os.path.relpath(path)
    return shlex.quote(shown if not shown.startswith("../..") else str(path.absolute()))


def _read(path: Path) -> Incident | None:
    try:
        return Incident.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, NanproofError):
        return None


def find_runs(paths: Sequence[str], *, empty: bool = True) -> list[Run]:
    """The runs behind some paths: each a run folder or a log; a folder that holds several gives them all.

    A folder without any log is a run that has not begun, unless ``empty`` is false.
    """
    runs: list[Run] = []
    for path in paths:
        place = Path(path)
        if place.is_dir() and not (place / "training_log.jsonl").exists():
            logs = find_logs(place)
            if not logs and not empty:
                raise UsageError(f"{path} holds no log", hint="give a run folder or a log of a training")
            if logs:
                names = _names([log.path for log in logs], place)
                runs += [Run(len(runs) + i, log.path, names[i], log.run or None) for i, log in enumerate(logs)]
                continue
        if not place.exists():
            raise UsageError(f"{path} does not exist", hint="give a run folder or a log; nanproof finds the newest one")
        runs.append(Run(len(runs), place, place.name))
    if not runs:
        raise UsageError("no run given", hint="nanproof watch runs/a; nanproof alone finds the newest run")
    return runs


def _names(paths: Iterable[str], root: Path) -> list[str]:
    return [os.path.relpath(p, root) for p in paths]

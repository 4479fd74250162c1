"""A run as it is watched: its log, followed, and the incidents of its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import NanproofError, UsageError
from ..logs import Follower, Series, find_logs
from ..records import Incident, to_json

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

    def poll(self) -> Series:
        """What is new in the log since the last time."""
        return self._follower.poll()

    @property
    def series(self) -> Series:
        return self._follower.series

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
        """Everything about one incident."""
        found = self._incidents.get(key)
        return None if found is None else {"id": key, **to_json(found[1])}


def short(key: str, incident: Incident) -> dict[str, Any]:
    """What a list shows of an incident."""
    place = incident.location or {}
    where = f"{Path(str(place['file'])).name}:{place.get('line')}" if place.get("file") else ""
    return {
        "id": key, "step": incident.step, "time": incident.time, "verdict": str(incident.verdict),
        "kind": incident.verdict.kind, "action": incident.action.kind, "where": where,
        "mechanism": str(place.get("mechanism", "")), "rank": incident.rank,
    }  # fmt: skip


def _read(path: Path) -> Incident | None:
    try:
        return Incident.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, NanproofError):
        return None


def find_runs(paths: Sequence[str]) -> list[Run]:
    """The runs behind some paths: each a run folder or a log; a folder that holds several gives them all."""
    runs: list[Run] = []
    for path in paths:
        place = Path(path)
        if place.is_dir() and not (place / "training_log.jsonl").exists():
            logs = find_logs(place)
            if logs:
                names = _names([log.path for log in logs], place)
                runs += [Run(len(runs) + i, log.path, names[i], log.run or None) for i, log in enumerate(logs)]
                continue
        if not place.exists() and not place.parent.is_dir():
            raise UsageError(f"{path} does not exist", hint="name a run folder or a log; it may be empty still")
        runs.append(Run(len(runs), place, place.name))
    if not runs:
        raise UsageError("nothing to watch was named", hint="nanproof watch runs/a")
    return runs


def _names(paths: Iterable[str], root: Path) -> list[str]:
    return [os.path.relpath(p, root) for p in paths]

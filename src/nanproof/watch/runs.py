"""A run as it is watched: its log, followed, and the incidents of its folder."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import NanproofError, UsageError, missing
from ..files import file_bytes, open_file
from ..forecast import CLOSER
from ..location import Location, call_name
from ..logs import Column, Event, Follower, LogFile, Series, find_logs
from ..logs.foresee import Outlook, joined
from ..records import Incident, to_json
from .alive import RUN_LOG, signs_of
from .history import about, events_of
from .state import RunState, Signs, state_of

RUNS_EVERY = 3.0  # seconds between two looks for new runs
ENTRIES = 2000  # of a folder that are looked at for records of runs
LOOKS = 2.0  # seconds between two looks at who writes a log
EDITOR = "vscode://file/{path}:{line}"
NEWEST = 500  # incidents that are listed
PRINTED = 1 << 16  # bytes at each end of a file of printed lines that are searched for the folder of its records
_RECORDS = re.compile(rb"^nanproof: .*; records in (\S+)", re.M)


class Run:
    """One run. ``id`` says nothing of its path: it may stand in an address."""

    def __init__(
        self,
        number: int,
        path: str | os.PathLike[str],
        name: str = "",
        log_run: str | None = None,
        home: Path | None = None,
    ) -> None:
        self.id = f"r{number}"
        self.path = Path(path)
        self.home = home or self.path
        self.name = name or self.path.name or str(self.path)
        self._follower = Follower(self.path, run=log_run)
        self._incidents: dict[str, tuple[Path, Incident]] = {}
        self._seen: set[str] = set()
        self._looked, self._signs = -LOOKS, Signs()
        self.outlook = Outlook()
        self._risks: list[Column] = []
        self._warned: list[Event] = []
        """Warnings that the log does not hold itself; the last `_new` came with the last poll."""
        self._new = 0

    def poll(self) -> Series:
        """What is new in the log since the last time."""
        new = self._follower.poll()
        known = len(self.outlook.warnings)
        risk = self.outlook.take(new)
        self._new = 0
        if risk is not None:
            self._risks.append(risk)
            warned = self.outlook.warnings[known:]
            self._new = len(warned)
            self._warned += [
                Event(kind="warning", name="forecast", text=str(w), row=self.series.rows, step=w.step) for w in warned
            ]
        return new

    def foretold(self, *, new: bool = False) -> list[dict[str, Any]]:
        """The warnings of a run that no guard wrote the log of; ``new`` since the last poll."""
        return events_of(self._warned[len(self._warned) - self._new :] if new else self._warned)

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
            self._looked, self._signs = time.monotonic(), signs_of(self.path, self.home)
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
                self._take(folder / name, incident)
        told = [i for i, (path, _) in self._incidents.items() if path.name in names]
        return [short(i, self._incidents[i][1]) for i in told]

    def _take(self, folder: Path, incident: Incident) -> None:
        """Ranks record the same bad step each; the record of the rank that it came from is told."""
        step = incident.step if incident.world_size > 1 else None
        for key, (_, other) in self._incidents.items():
            if other.step == step and other.rank != incident.rank and other.world_size > 1:
                if _knows_more(incident, other):
                    self._incidents[key] = (folder, incident)
                return
        self._incidents[f"{self.id}i{len(self._incidents)}"] = (folder, incident)

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
        known = about(self.series)
        return {
            "id": self.id,
            "name": self.name,
            "guarded": self.guarded,
            "incidents": self.incidents(),
            "state": state_json(self.state()),
            **known,
            "events": known["events"] + self.foretold(),
        }


def _knows_more(one: Incident, other: Incident) -> bool:
    return (one.location is not None, one.rank == one.verdict.rank) > (
        other.location is not None,
        other.rank == other.verdict.rank,
    )


def short(key: str, incident: Incident) -> dict[str, Any]:
    """What a list shows of an incident."""
    place = incident.location
    where = f"{Path(place.file).name}:{place.line}" if place is not None and place.file else ""
    return {
        "id": key,
        "step": incident.step,
        "time": incident.time,
        "verdict": str(incident.verdict),
        "kind": incident.verdict.kind,
        "action": incident.action.kind,
        "where": where,
        "cause": cause_of(place) if place is not None else "",
        "why": place.why if place is not None else "",
        "rank": incident.rank,
    }


def cause_of(place: Location) -> str:
    """What broke, in a few words; empty when the replay does not say.

    >>> cause_of(Location(reproduced=True, mechanism="pole", op="log")), cause_of(Location(reproduced=True))
    ('pole in log', '')
    """
    name = call_name(place.op) or place.leaf
    if place.mechanism == "bad-leaf":
        return f"{name or 'a value'} was already non-finite"
    return "" if place.mechanism == "unknown" else f"{place.mechanism} in {name}" if name else place.mechanism


def full(incident: Incident) -> dict[str, Any]:
    """An incident with what its location says in words."""
    data: dict[str, Any] = to_json(incident)
    place = incident.location
    if place is not None:
        data["editor"] = editor_link(place.file, place.line)
        where = f"{_near(Path(place.file))}:{place.line}" if place.line else ""
        data["location"] |= {"advice": place.advice, "proof": place.proof, "cause": cause_of(place), "where": where}
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
    plain: dict[str, Any] = {"kind": state.kind, "text": str(state), "headline": state.headline}
    return plain | {"bad": state.bad, "since": state.since, "repairs": list(state.repairs)}


def typed(path: Path) -> str:
    """A path as one would type it here."""
    return shlex.quote(_near(path))


def _near(path: Path) -> str:
    shown = os.path.relpath(path)
    return shown if not shown.startswith("../..") else str(path.absolute())


def _read(path: Path) -> Incident | None:
    try:
        return Incident.from_json(json.loads(file_bytes(path)))
    except (OSError, ValueError, NanproofError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run was found: its folder or its log, and its name within a store of several."""

    path: Path
    """What is followed."""
    home: Path
    """What is diagnosed: the folder, where it is the run's own."""
    name: str
    run: str = ""
    modified: float = 0.0


class Finder:
    """The runs behind some paths, and those that begin there later.

    Each path is a run folder or a log; a folder that holds several runs gives them all.
    """

    def __init__(self, paths: Sequence[str], *, wait: bool = True) -> None:
        """Find the runs that are there; without ``wait`` a folder without any is an error."""
        self.runs: list[Run] = []
        self._paths = list(paths)
        self._known: set[tuple[Path, str]] = set()
        if not paths:
            raise UsageError("no run given", hint="nanproof watch runs/a; nanproof alone finds the newest run")
        for path in paths:
            if not Path(path).exists():
                hint = "give a run folder or a log; nanproof finds the newest one"
                raise missing(path, hint)
            if not self._add(path) and not wait:
                raise UsageError(f"{path} holds no log", hint="give a run folder or a log of a training")
        self._again = time.monotonic() + RUNS_EVERY

    @property
    def waiting(self) -> str:
        """What is said as long as there is no run."""
        return "" if self.runs else f"no log yet in {', '.join(self._paths)}: a run that begins there appears by itself"

    def more(self) -> list[Run]:
        """Runs that were not there before; the folders are read again only now and then."""
        if time.monotonic() < self._again:
            return []
        before, began = len(self.runs), time.monotonic()
        for path in self._paths:
            self._add(path)
        spent = time.monotonic() - began
        every = RUNS_EVERY if self.runs else RUNS_EVERY / 3
        self._again = began + max(every, 20 * spent)  # a folder may be a whole disk
        return self.runs[before:]

    def _add(self, path: str) -> bool:
        place = Path(path)
        one = not place.is_dir() or (place / RUN_LOG).exists()
        found = [Place(path=place, home=place, name=place.absolute().name)] if one else runs_below(place)
        for new in found:
            if (new.path, new.run) not in self._known:
                self._known.add((new.path, new.run))
                self.runs.append(Run(len(self.runs), new.path, new.name, new.run or None, new.home))
        return bool(found)


def find_runs(paths: Sequence[str]) -> list[Run]:
    """The runs behind some paths, as they are now; a path without any values is an error."""
    runs = Finder(paths, wait=False).runs
    for run in runs:
        run.poll()
    if all(run.state().kind == "empty" for run in runs):
        raise UsageError(f"{runs[0].path} holds no values of a training", hint="give a run folder or a log with steps")
    return runs


def runs_below(root: Path) -> list[Place]:
    """The runs below a folder, the newest first: every log, and runs of `nanproof run` that never came to a step."""
    logs = _without_output([log for log in find_logs(root) if not _is_trial(log.path)])
    alone = Counter(Path(log.path).parent for log in logs)
    found = []
    for log in logs:
        path = Path(log.path)
        # a log that is alone in its folder is a run of that folder's name, with the configs beside it
        own = path.is_file() and alone[path.parent] == 1 and (path.parent != root or len(logs) == 1)
        home = path.parent if own else path
        found.append(Place(path=path, home=home, name=_name(home, root), run=log.run, modified=log.modified))
    logged = {p for log in logs for p in (Path(log.path), *Path(log.path).parents)}
    for record in _records(root):
        if record.parent not in logged and not _is_trial(str(record)):
            place = record.parent
            found.append(Place(path=place, home=place, name=_name(place, root), modified=record.stat().st_mtime))
    return sorted(found, key=lambda place: (-place.modified, place.path))


def _without_output(logs: Sequence[LogFile]) -> list[LogFile]:
    """Without what `nanproof run` printed into a file: that is no run beside the one that it recorded."""
    recorded = {Path(log.path).resolve() for log in logs if log.format == "nanproof"}
    if not recorded:
        return list(logs)
    return [log for log in logs if log.format != "text" or not recorded & set(_recorded_by(Path(log.path)))]


def _recorded_by(output: Path) -> Iterator[Path]:
    """The folders that a file of printed lines names, near its beginning or its end, as those of its records."""
    with suppress(OSError), open_file(output) as file:
        head = file.read(PRINTED)
        file.seek(max(len(head), file.seek(0, os.SEEK_END) - PRINTED))
        for found in _RECORDS.findall(head + file.read(PRINTED)):
            name = found.decode(errors="replace")
            yield from (place.resolve() for place in (Path(name), output.parent / name))


def _name(path: Path, root: Path) -> str:
    return os.path.relpath(path, root) if path != root else root.absolute().name


def _records(root: Path) -> Iterator[Path]:
    """The records that `nanproof run` writes when it begins, at most two folders below."""
    folders = [root]
    for _ in range(3):
        below: list[Path] = []
        for folder in folders:
            with suppress(OSError), os.scandir(folder) as entries:
                inside = [e for e in itertools.islice(entries, ENTRIES) if not e.name.startswith(".")]
                below += [Path(e.path) for e in inside if e.is_dir(follow_symlinks=False)]
                yield from (Path(e.path) for e in inside if e.name == "run.json" and e.is_file())
        folders = below[:ENTRIES]


def _is_trial(path: str) -> bool:
    """Whether it is one of the many short runs of `nanproof cure`."""
    parts = Path(path).parts
    return any(a.startswith("cure-") and b == "trials" for a, b in itertools.pairwise(parts))

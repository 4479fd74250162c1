"""The run's folder: its log, its incidents, its lock, and the summary at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import Lock, make_folder
from ..locating import Location
from ..records import Action, Incident, Reading, TensorFacts, Verdict
from .incident import IncidentFolder, environment, now
from .loggers import Loggers
from .moment import Moment
from .recorder import Recorder
from .tally import Tally
from .taps import Taps
from .trial import batch_facts

log = logging.getLogger("nanproof")


class RunDir:
    """Writes what happens; without a folder it only remembers."""

    def __init__(
        self, path: str | Path | None, rank: int, world: int, device: torch.device, log_every: int, incident_bytes: int,
        loggers: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self.path = Path(path) if path is not None else None
        self.tally = Tally()
        self._rank, self._world, self._device = rank, world, device
        self.closed = False
        self._lock: Lock | None = None
        self._incidents: IncidentFolder | None = None
        if self.path is not None:
            make_folder(self.path)
            self._incidents = IncidentFolder(self.path, max_bytes=incident_bytes)
            if rank == 0:
                self._lock = Lock(self.path)
                self._lock.acquire()
        self._recorder = Recorder(self.path if rank == 0 else None, every=log_every)
        self._loggers = Loggers(loggers if rank == 0 else ())

    def record(self, reading: Reading, verdict: Verdict, action: Action) -> None:
        """One step into the log and the counts."""
        self.tally.count(verdict, action)
        self._recorder.add(reading, verdict, action, self.tally.updates)
        self._loggers.step(reading, action)
        if not verdict.ok:
            self._recorder.flush()

    def event(self, **fields: Any) -> None:
        self._recorder.event(**fields)
        self._recorder.flush()

    def incident(
        self,
        verdict: Verdict,
        action: Action,
        facts: Sequence[TensorFacts],
        taps: Taps,
        batch: Any,
        moment: Moment,
        weights: dict[str, Tensor],
        location: Location | None,
        about: str = "",
    ) -> Incident:
        """Keep an incident: on the first rank and on the one it came from."""
        heard = taps.facts()
        looked = [*facts, *(batch_facts(batch) if batch is not None else [])]
        suffix = f"-r{self._rank}" if self._world > 1 else ""
        incident = Incident(
            id=f"{verdict.step:06d}{suffix}", step=verdict.step, time=now(), rank=self._rank, world_size=self._world,
            verdict=verdict, action=action, tensors=tuple(looked), taps=heard,
            readings=tuple(self._recorder.recent), environment=environment(self._device),
            location=location.to_json() if location is not None else None, notes=(about,) if about else (),
        )  # fmt: skip
        where = None
        if self._incidents is not None and self._rank in (0, verdict.rank):
            states = (moment.buffers(), moment.random) if moment.taken else ({}, {})
            where = self._incidents.write(incident, batch, *states, weights)
        self._loggers.incident(incident)
        if self._rank == 0:
            first = next((f for f in heard if f.bad), None)
            tapped = f"; first bad tap: {first}" if first else ""
            detail = f"; {looked[0]}" if looked else ""
            if location is not None:
                place = f"{location.file}:{location.line} {location.op}: " if location.file else ""
                detail = f"; {place}{location.why}"
            kept = f"; {where}" if where else ""
            named = f"; {about}" if about else ""
            said = f"{verdict} → {action.kind} ({action.reason}){detail}{named}{tapped}{kept}"
            log.warning("nanproof: %s", said)
        return incident

    def summary(self) -> str:
        return self.tally.summary(str(self._incidents.path) if self._incidents is not None else "")

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._recorder.flush()
        if self._rank == 0:
            log.log(logging.INFO if self.tally.clean else logging.WARNING, "%s", self.summary())
        if self._lock is not None:
            self._lock.release()

"""The run's folder: its log, its incidents, its lock, and the summary at the end."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..captured import CapturedState
from ..errors import UsageError
from ..files import Lock, file_text, make_folder, write_atomic
from ..locating import Location
from ..location import call_name, shown_path
from ..records import Action, Incident, Repair, TensorFacts, Verdict
from .examine import batch_facts
from .incident import IncidentFolder, environment, now
from .loggers import Loggers
from .observers import Observer
from .options import Records
from .recorder import Recorder
from .step import Pass
from .tally import Tally
from .taps import Taps

log = logging.getLogger("nanproof")
REPAIRS = "repairs.json"
FULL_LINES = 3
"""Bad steps in a row that are printed in full; what more of them would say is in their incidents."""


class RunDir:
    """Writes what happens; without a folder it only remembers."""

    def __init__(
        self, path: str | Path | None, records: Records, *, rank: int, world: int, device: torch.device
    ) -> None:
        self.path = Path(path) if path is not None else None
        self.tally = Tally()
        self._rank, self._world, self._device = rank, world, device
        self._records = records
        self._repairs: tuple[Repair, ...] = ()
        self._streak = (0, 0)
        """The last bad step that was printed, and how many came before it without a good one between."""
        self._alone = False
        self.closed = False
        self.says_summary = True
        """Whether the end is said here; `nanproof run` says it for the whole run."""
        self._lock: Lock | None = None
        self._incidents: IncidentFolder | None = None
        if self.path is not None:
            try:
                make_folder(self.path)
                self._incidents = IncidentFolder(self.path, max_bytes=records.incident_bytes)
                if rank == 0:
                    self._lock = Lock(self.path)
                    self._lock.acquire()
            except OSError as error:
                raise UsageError(
                    f"run_dir {self.path} cannot be written: {error.strerror or error}",
                    hint="give a folder that can be written",
                ) from error
        self.recorder = Recorder(self.path if rank == 0 else None, every=records.log_every)
        self.observers: list[Observer] = [self.recorder, Loggers(records.loggers if rank == 0 else ())]

    def go_alone(self) -> None:
        """This rank is guarded by itself: it keeps its own records, below the folder of the run."""
        if self._alone:
            return
        self._alone = True
        if self._rank and self.path is not None:
            self.path = make_folder(self.path / f"rank-{self._rank}")
            self._incidents = IncidentFolder(self.path, max_bytes=self._records.incident_bytes)
            recorder = Recorder(self.path, every=self._records.log_every)
            self.observers[self.observers.index(self.recorder)] = recorder
            self.recorder = recorder

    def incident(
        self,
        verdict: Verdict,
        action: Action,
        *,
        facts: Sequence[TensorFacts] = (),
        taps: Taps | None = None,
        culprit: Pass | None = None,
        before: CapturedState | None = None,
        weights: Mapping[str, Tensor] | None = None,
        location: Location | None = None,
        elsewhere: str = "",
        notes: Sequence[str] = (),
    ) -> Incident:
        """Keep an incident: on the first rank and on the one it came from.

        ``elsewhere`` is what the culprit's rank has to say, where that is another one.
        """
        batch = culprit.batch if culprit is not None else None
        heard = taps.facts() if taps is not None else ()
        looked = [*facts, *(batch_facts(batch) if batch is not None else [])]
        suffix = f"-r{self._rank}" if self._world > 1 else ""
        about = culprit.about if culprit is not None and not elsewhere else ""  # this rank's own batch is innocent
        said = tuple(n for n in (about, elsewhere, *notes) if n)
        incident = Incident(
            id=f"{verdict.step:06d}{suffix}",
            step=verdict.step,
            time=now(),
            rank=self._rank,
            world_size=self._world,
            verdict=verdict,
            action=action,
            tensors=tuple(looked),
            taps=heard,
            readings=tuple(self.recorder.recent),
            environment=environment(self._device),
            location=location,
            notes=said,
        )
        where = None
        if self._incidents is not None and (self._alone or self._rank in (0, verdict.rank)):
            taken = before is not None and before.taken
            buffers, random = (before.buffers(), before.random) if taken and before is not None else ({}, {})
            where = self._incidents.write(incident, batch, buffers, random, dict(weights or {}))
            incident = dataclasses.replace(incident, id=where.name) if where is not None else incident
        if self._rank == 0 or self._alone:
            detail = f"; {looked[0]}" if looked else ""
            if elsewhere:  # what this rank saw is only a consequence
                detail = ""
            elif location is not None:
                detail = f"; {_place(location)}"
            first = next((f for f in heard if f.bad), None)
            tapped = f"; first bad tap: {first}" if first else ""
            told = "".join(f"; {n}" for n in said)
            name = where.name if where is not None else ""
            if elsewhere and verdict.rank is not None:
                name = name.replace(suffix, f"-r{verdict.rank}", 1)
            kept = f"; {shown_path(str(where.with_name(name)))}" if where is not None else ""
            last, lines = self._streak
            self._streak = (verdict.step, lines + 1 if verdict.step == last + 1 else 1)
            if self._streak[1] > FULL_LINES and action.kind == "skip" and location is None:
                detail = told = tapped = ""
            log.warning(
                "nanproof: %s → %s (%s)%s", verdict, action.kind, action.reason, f"{detail}{told}{tapped}{kept}"
            )
        return incident

    def write_repairs(self, repairs: Sequence[Repair]) -> None:
        """The repairs in force, for a run that goes on from here."""
        self._repairs = tuple(repairs)
        if self.path is not None and self._rank == 0:
            write_atomic(self.path / REPAIRS, json.dumps([r.to_json() for r in repairs], indent=1) + "\n")

    def read_repairs(self) -> list[Repair]:
        """Those of an earlier run in this folder."""
        if self.path is None or not (self.path / REPAIRS).is_file():
            return []
        return [Repair.from_json(r) for r in json.loads(file_text(self.path / REPAIRS))]

    def summary(self) -> str:
        kept = self._incidents.path if self._incidents is not None else None
        return self.tally.summary(shown_path(str(kept)) if kept is not None and kept.is_dir() else "", self._repairs)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self.says_summary and (self._rank == 0 or self._alone):
            log.log(logging.INFO if self.tally.clean else logging.WARNING, "%s", self.summary())
        if self._lock is not None:
            self._lock.release()


def describe(
    location: Location | None, culprit: Pass | None, batch_is_bad: bool, facts: Sequence[TensorFacts] = ()
) -> str:
    """What this rank can say about a bad step, in a line that another rank prints."""
    parts: list[Any] = []
    if location is not None and location.reproduced:
        parts.append(_place(location))
    if culprit is not None and culprit.about and (batch_is_bad or parts):
        parts.append(culprit.about)
    if not parts and facts:
        parts.append(facts[0])
    return "; ".join(map(str, parts))


def _place(location: Location) -> str:
    """A location in a line: the place, the operation if it is one, and what happened there."""
    where = f"{location.place} {call_name(location.op)}".strip() if location.file else ""
    return ": ".join(p for p in (where, location.why) if p)

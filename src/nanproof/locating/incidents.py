"""The incidents of a run on disk; needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import FormatError, UsageError
from ..files import file_text
from ..records import Incident


def find_incident(path: Path) -> tuple[Path, str]:
    """The incident folder that a path means, and a remark when it is not the path itself.

    Of a run's folder the first incident; of a rank that only suffered, the incident of the rank it came from.
    """
    remark = ""
    incidents = path if path.name == "incidents" else path / "incidents"
    run = incidents.is_dir() or (path / "run.json").is_file()
    if not (path / "incident.json").is_file() and run:
        found = sorted(p for p in incidents.glob("*") if (p / "incident.json").is_file())
        if not found:
            raise UsageError(f"{path} holds no incident: nothing went wrong in that run, or it kept none")
        more = f" of {len(found)}" if len(found) > 1 else ""
        path, remark = found[0], f"the first incident{more}: {found[0]}"
    record = read_record(path)
    culprit = record.verdict.rank
    if culprit is not None and culprit != record.rank and record.id.endswith(f"-r{record.rank}"):
        other = path.parent / f"{record.id.removesuffix(f'-r{record.rank}')}-r{culprit}"
        if (other / "incident.json").is_file():
            path, remark = other, f"the bad value came from rank {culprit}: {other}"
    return path, remark


def read_record(folder: Path) -> Incident:
    """The record of an incident."""
    record = folder / "incident.json"
    if not record.is_file():
        raise UsageError(f"{folder} is not an incident folder", hint="give a run's folder, or one below its incidents/")
    try:
        return Incident.from_json(json.loads(file_text(record)))
    except ValueError as error:
        raise FormatError(f"{record} cannot be read: {error}") from error

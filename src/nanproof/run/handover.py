"""The end of a run in a few lines: what happened, why, which data, and the one command to go on with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import file_text
from ..location import call_name, shown_path

if TYPE_CHECKING:
    from .launcher import Outcome

_ENDED = {
    "interrupted": "interrupted",
    "terminated": "terminated (SIGTERM)",
    "stopped": "stopped by the guard",
    "failed": "the script failed",
}


def hand_over(outcome: Outcome) -> list[str]:
    """What is said at the end; every line but the indented ones begins with the program's name."""
    lines: list[str] = []
    for number, account in enumerate(outcome.guarded):
        lines += _account(outcome, account, last=number == len(outcome.guarded) - 1)
    not_guarded = dict(outcome.not_guarded)
    others = [p for p in outcome.processes if p.get("guarded")]
    if not outcome.guarded and outcome.state in ("interrupted", "terminated", "failed"):
        lines.append(f"nanproof: {_ended(outcome)}{'' if others else ' before a step was guarded'}")
        not_guarded.pop("the script", None)
    if others:
        folders = dict.fromkeys(shown_path(str(g["folder"])) for p in others for g in p["guarded"])
        shown = ", ".join(list(folders)[:4]) + (" …" if len(folders) > 4 else "")
        number = len({p.get("pid") for p in others})  # one that trains several models has a record for each
        count = "1 started process was" if number == 1 else f"{number} started processes were"
        lines.append(f"nanproof: {count} guarded; records in {shown}")
        bad = [f for f in folders if first_incident(Path(f)) is not None]
        if bad and not any(first_incident(Path(a["folder"])) for a in outcome.guarded):
            lines += _end(bad[0])
    lines += [f"nanproof: NOT GUARDED: {what}: {why}" for what, why in not_guarded.items()]
    if any(a.get("actions", {}).get("skip") for a in outcome.guarded):
        lines += [f"nanproof: moved on in skipped steps: {what}: {why}" for what, why in outcome.not_held.items()]
    return lines


def _ended(outcome: Outcome) -> str:
    code = f" (exit code {outcome.exit_code})" if outcome.state == "failed" else ""
    return f"{_ENDED[outcome.state]}{code}"


def _account(outcome: Outcome, account: Any, *, last: bool) -> list[str]:
    folder = str(account["folder"])
    first, *rest = str(account["summary"]).splitlines()
    if outcome.state != "finished" and last:
        first = first.removesuffix("; nothing went wrong").replace(
            "nanproof: ", f"nanproof: {_ended(outcome)} after ", 1
        )
    incident = first_incident(Path(folder))
    if incident is None:
        return [f"{first}; records in {folder}", *rest]
    rest = [line for line in rest if not line.startswith("  incidents: ")]
    return [first, *rest, *_end(folder)]


def _end(folder: str) -> list[str]:
    """The first incident in a folder, and the command to go on with."""
    incident = first_incident(Path(folder))
    return [*_told(incident), f"  next: nanproof diagnose {shlex.quote(folder)}"] if incident is not None else []


def first_incident(folder: Path) -> dict[str, Any] | None:
    """The first bad step that was located, or else the first one, as the rank that it came from has recorded it."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("incidents/*/incident.json"))[:50]:
        try:
            found.append({**json.loads(file_text(path)), "path": str(path.parent)})
        except (OSError, ValueError):
            continue
    own = [i for i in found if (i.get("verdict") or {}).get("rank") in (None, i.get("rank"))]
    return next((i for i in own if i.get("location")), next(iter(own or found), None))


def _told(incident: dict[str, Any]) -> list[str]:
    place = incident.get("location") or {}
    tensors = incident.get("tensors") or []
    lines = []
    if place.get("file"):
        where = f"{shown_path(place['file'])}:{place['line']} {call_name(place['op'])}".rstrip()
        lines.append(f"  cause: {where}: {place['why']}")
    elif place.get("why"):
        lines.append(f"  cause: {place['why']}")
    elif tensors:
        lines.append(f"  first bad: {tensors[0]['name']}")
    data = [n for n in incident.get("notes", []) if "batch" in n]
    if data:
        lines.append(f"  data: {data[0]}")
    return [*lines, f"  incident: {incident['path']}"]

"""Lines that `nanproof locate` has proved to be the origin of an incident: lint and locate speak of the same line.

Where a rule has found the line, its finding says so; where none has, the line is a finding of its own, NP003.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..files import file_text
from ..records import Finding
from .document import Unreadable, open_document, read_bytes
from .engine import Checked, Problem
from .tree import line_starts

CODE = "NP003"
_PLACES = ("incidents/*/incident.json", "*/incidents/*/incident.json", "*/*/incidents/*/incident.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One line that was located, and what happened there."""

    line: int
    mechanism: str
    why: str
    incident: str


def origins(folders: Iterable[Path]) -> dict[str, list[Origin]]:
    """The located lines of the incidents below these folders, by absolute path; files that changed are left out."""
    found: dict[str, list[Origin]] = {}
    records = {p for folder in folders if folder.is_dir() for place in _PLACES for p in folder.glob(place)}
    for record in sorted(records):
        try:
            location = json.loads(file_text(record)).get("location") or {}
        except (OSError, ValueError, AttributeError):
            continue  # other verbs say what is wrong with it
        file, line = str(location.get("file", "")), location.get("line")
        if location.get("reproduced") and file and isinstance(line, int) and _unchanged(Path(file), line, location):
            words = str(location.get("why", "")) or str(location.get("op", ""))
            origin = Origin(
                line=line, mechanism=str(location.get("mechanism", "unknown")), why=words, incident=str(record.parent)
            )
            found.setdefault(str(Path(file).absolute()), []).append(origin)
    return found


def _unchanged(file: Path, line: int, location: Mapping[str, Any]) -> bool:
    """Whether the line still reads as it did when the step was played again."""
    try:
        text = file_text(file).splitlines()[line - 1].strip()
    except (OSError, UnicodeDecodeError, IndexError):
        return False
    return any(text in str(shown) for shown in location.get("code", ())) if location.get("code") else True


def with_origins(checked: Checked, found: Mapping[str, list[Origin]], *, info: bool) -> Checked:
    """A file's findings with its located lines among them; infos stay only there, unless all are wanted."""
    here = {o.line: o for o in found.get(str(Path(checked.path).absolute()), [])}
    kept = tuple(p for p in checked.problems if info or not p.finding.info or p.finding.line in here)
    checked = replace(checked, problems=kept, document=checked.document if kept else None)
    for origin in here.values():
        checked = _with(checked, origin)
    return checked


def _with(checked: Checked, origin: Origin) -> Checked:
    told = f"located by replay at this line ({origin.mechanism}): {origin.incident}"
    if any(p.finding.line == origin.line for p in checked.problems):
        problems = tuple(
            replace(p, finding=replace(p.finding, help=f"{p.finding.help}; {told}".lstrip("; ")))
            if p.finding.line == origin.line
            else p
            for p in checked.problems
        )
        return replace(checked, problems=problems)
    try:
        document = open_document(checked.path, read_bytes(Path(checked.path)))
    except Unreadable:
        return checked
    starts = [*line_starts(document.text), len(document.text)]
    text = document.text[starts[origin.line - 1] : starts[origin.line]]
    begin = starts[origin.line - 1] + len(text) - len(text.lstrip())
    finding = Finding(
        code=CODE,
        path=checked.path,
        line=origin.line,
        column=len(text) - len(text.lstrip()) + 1,
        message=f"located by replay, no rule: {origin.why or origin.mechanism} ({origin.mechanism})",
        help=f"nanproof locate {origin.incident}",
    )
    problem = Problem(finding=finding, span=(begin, starts[origin.line - 1] + len(text.rstrip())))
    ordered = sorted([*checked.problems, problem], key=lambda p: (p.span, p.finding.code))
    return replace(checked, document=document, problems=tuple(ordered))

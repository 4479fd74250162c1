"""What is known of a death: the step, the operation, its mechanism, the batch; read from the run's own records."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..files import file_text

_FIRST = re.compile(r"first at \[(\d+)")
_INDICES = re.compile(r"dataset indices? ([\d–, -]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Why a run died, as far as the guard has seen it."""

    step: int | None = None
    """The first bad step; None when it never was bad."""
    what: str = ""
    """The verdict in words: nonfinite loss nan."""
    location: Mapping[str, Any] = field(default_factory=dict)
    """As `locate` writes it; empty when the operation was not found."""
    samples: tuple[int, ...] = ()
    """Dataset indices of the batch; only that of the bad row where it is known."""
    bad_batch: bool = False
    """The batch itself was not finite."""

    @property
    def mechanism(self) -> str:
        return str(self.location.get("mechanism", ""))

    @property
    def dtype(self) -> str:
        """The dtype of the located operation's result; empty when it is not known."""
        outputs: Sequence[Mapping[str, Any]] = self.location.get("outputs") or ({},)
        return str(outputs[0].get("dtype", ""))

    @property
    def file(self) -> str:
        return str(self.location.get("file", ""))

    @property
    def line(self) -> int:
        return int(self.location.get("line") or 0)

    def seen_from(self, scratch: Path, project: Path) -> Evidence:
        """The same with the located file in the user's project, where the run has seen it in a scratch copy."""
        path = Path(self.file)
        if not self.file or not path.is_relative_to(scratch.resolve()):
            return self
        file = str(project.resolve() / path.relative_to(scratch.resolve()))
        return replace(self, location={**self.location, "file": file})

    @property
    def told(self) -> str:
        """One sentence for the screen."""
        if not self.location.get("why"):
            return self.what
        place = f"{Path(self.file).name}:{self.line} {self.location.get('op', '')}: " if self.file else ""
        return f"{place}{self.location['why']}"


def read_evidence(run_dir: Path) -> Evidence:
    """The evidence in the folder of a guarded run; its first incident counts."""
    for path in sorted(run_dir.glob("incidents/*/incident.json")):
        try:
            told = json.loads(file_text(path))
        except (OSError, ValueError):
            continue
        verdict = told.get("verdict") or {}
        if verdict.get("kind") == "nonfinite":
            return _evidence(told, verdict)
    return Evidence()


def _evidence(told: dict[str, Any], verdict: dict[str, Any]) -> Evidence:
    location = told.get("location") or {}
    batch = [t for t in told.get("tensors", ()) if str(t.get("name", "")).startswith("batch")]
    bad_batch = any(t.get("nan") or t.get("posinf") or t.get("neginf") for t in batch)
    return Evidence(
        step=int(told["step"]),
        what=f"{verdict.get('kind')} {verdict.get('level') or ''}".strip(),
        location=location,
        samples=_blamed(_samples(" ".join(map(str, told.get("notes", ())))), batch, location),
        bad_batch=bad_batch or location.get("mechanism") == "bad-leaf",
    )


def _blamed(samples: tuple[int, ...], batch: list[dict[str, Any]], location: Mapping[str, Any]) -> tuple[int, ...]:
    """The one sample whose row of the batch is bad; all of them when that is not known."""
    rows = [t["first_bad"][0] for t in batch if t.get("first_bad")]
    if not rows and location.get("mechanism") == "bad-leaf" and (found := _FIRST.search(str(location.get("why", "")))):
        rows = [int(found[1])]
    return (samples[rows[0]],) if rows and rows[0] < len(samples) else samples


def _samples(text: str) -> tuple[int, ...]:
    """
    >>> _samples("DataLoader batch 45 (dataset indices 720–723, 9)")
    (720, 721, 722, 723, 9)
    """
    found = _INDICES.search(text)
    numbers: list[int] = []
    for part in re.split(r",\s*", found[1].strip()) if found else []:
        first, _, last = part.replace("–", "-").partition("-")
        if first.strip().isdigit():
            end = int(last) if last.strip().isdigit() else int(first)
            numbers += range(int(first), min(end, int(first) + 10_000) + 1)
    return tuple(numbers)

"""Two runs compared beyond their curves: the first step where they differ, and what was different around them.

>>> first_difference([(0, 2.0), (1, 1.5), (2, 1.2)], [(0, 2.0), (1, 1.5), (2, float("nan"))])
(2, 1.2, nan)
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import file_bytes, file_text
from ..logs.series import Series
from .glance import value
from .runs import Run
from .why import command_of, settings_of

Points = Sequence[tuple[int, float]]
Pair = tuple[Points, Points]
_SHOWN = ("loss", "grad_norm", "lr", "loss_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two runs do not share."""

    first: str
    """The first step where a logged value differs, in a sentence."""
    step: int | None = None
    settings: tuple[tuple[str, str, str], ...] = ()
    """Settings of configs and command lines that differ: name, first, second."""
    environment: tuple[tuple[str, str, str], ...] = ()
    """Versions, devices, environment variables, seeds: name, first, second."""
    command: tuple[str, str] | None = None


def compare(a: Run, b: Run) -> Comparison:
    """Where two runs part, and what was different around them."""
    for run in (a, b):
        run.poll()
    pairs = {role: (_points(a.series, role), _points(b.series, role)) for role in _SHOWN}
    pairs = {role: pair for role, pair in pairs.items() if all(pair)}
    shift = _shift(pairs)
    moved = {role: (mine, [(s - shift, v) for s, v in other]) for role, (mine, other) in pairs.items()}
    found = [(parted, role) for role, pair in moved.items() if (parted := first_difference(*pair)) is not None]
    step, words = None, _same(moved)
    if found:
        (step, x, y), role = min(found, key=lambda f: f[0][0])
        words = f"{role} first differs at step {step:,}: {value(x)} in {a.name}, {value(y)} in {b.name}"
    command = (shlex.join(command_of(a.path)), shlex.join(command_of(b.path)))
    return Comparison(
        first=words + _counted(shift, b),
        step=step,
        settings=_differing(settings_of(a.home), settings_of(b.home)),
        environment=_known_of_both(environment_of(a), environment_of(b)),
        command=command if command[0] != command[1] and all(command) else None,
    )


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    keys = sorted(a.keys() | b.keys()) if a and b else []
    return tuple((key, a.get(key, "–"), b.get(key, "–")) for key in keys if a.get(key) != b.get(key))


def _known_of_both(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    """Differences around two runs: what only one has recorded is none, unless it is an environment variable."""
    return tuple(row for row in _differing(a, b) if "–" not in row[1:] or row[0].isupper())


def first_difference(a: Sequence[tuple[int, float]], b: Sequence[tuple[int, float]]) -> tuple[int, float, float] | None:
    """The first step that both logged with different values; NaN equals NaN."""
    other = dict(b)
    for step, x in a:
        y = other.get(step)
        if y is not None and x != y and not (math.isnan(x) and math.isnan(y)):
            return step, x, y
    return None


def _points(series: Series, role: str) -> Points:
    column = getattr(series, role)
    return [] if column is None else list(zip(column.steps.tolist(), column.values.tolist(), strict=True))


def _shift(pairs: Mapping[str, Pair]) -> int:
    """How much later the second run counts its steps: a guard counts from 1 where a script counts from 0."""
    mine, other = next(iter(pairs.values()), ([], []))
    equal = {shift: _equal(mine, [(s - shift, v) for s, v in other]) for shift in (0, 1, -1)}
    best = max(equal, key=lambda shift: (len(equal[shift]), shift == 0))
    gained = len(equal[best]) - len(equal[0])
    # one value in full precision is no coincidence; of rounded ones it takes some
    return best if gained > 2 or (gained and not equal[0] and any(len(repr(v)) > 9 for v in equal[best])) else 0


def _equal(a: Points, b: Points) -> list[float]:
    """The values that two runs share from the beginning on."""
    other = dict(b)
    shared = [(v, other[s]) for s, v in a if s in other]
    return [x for x, y in itertools.takewhile(lambda pair: pair[0] == pair[1], shared)]


def _counted(shift: int, b: Run) -> str:
    return f" ({b.name} counts its steps {abs(shift)} {'later' if shift > 0 else 'earlier'})" if shift else ""


def _same(pairs: Mapping[str, Pair]) -> str:
    shared = max((len({s for s, _ in x} & {s for s, _ in y}) for x, y in pairs.values()), default=0)
    return f"the same values at all {shared:,} shared steps" if shared else "no step was logged by both"


def environment_of(run: Run) -> dict[str, str]:
    """What is recorded around a run: its incidents and run.json; W&B's and pip's files in its folder."""
    found: dict[str, str] = {}
    folder = run.home if run.home.is_dir() else run.home.parent
    for incident in run.incidents()[:1]:
        whole = run.incident(incident["id"])
        found |= {k: str(v) for k, v in (whole or {}).get("environment", {}).items()}
    record = _json(folder / "run.json")
    for key in ("environment", "seed", "variables"):
        part = record.get(key)
        found |= {str(k): str(v) for k, v in part.items()} if isinstance(part, Mapping) else {}
        found |= {key: str(part)} if isinstance(part, int | str) else {}
    for name in ("wandb-metadata.json", "environment.json"):
        data = _json(folder / name) or _json(folder / "files" / name)
        found |= {k: str(v) for k, v in data.items() if isinstance(v, str | int | float)}
    return found | _pinned(folder)


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(file_bytes(path))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _pinned(folder: Path) -> dict[str, str]:
    """Versions of a pip freeze beside the run."""
    found: dict[str, str] = {}
    for place in (folder / "requirements.txt", folder / "pip-freeze.txt", folder / "files" / "requirements.txt"):
        try:
            lines = file_text(place, errors="replace").splitlines()
        except OSError:
            continue
        found |= dict(line.strip().split("==", 1) for line in lines if line.count("==") == 1)
    return found

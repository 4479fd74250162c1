"""What the guard wrote down: verdicts, origins, and where a replay found the bad value."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import FormatError
from ...files import file_text
from ...location import call_name
from ...records import Incident
from ..bugs import read_versions
from ..diagnosis import Looked, Moment
from ..evidence import Fact
from ..machines import read_hardware
from .part import Part, name_in

MAX_INCIDENTS = 200
_ORIGINS = {"range": "fp32-fine", "data": "bad-batch", "state": "nan-weights", "scale": "loss-scale-halving-sparse"}


def read_incidents(paths: Sequence[Path], root: Path) -> Part:
    """The incidents of guarded runs, oldest first."""
    found: list[tuple[str, Incident]] = []
    looked: list[Looked] = []
    for path in sorted(paths)[:MAX_INCIDENTS]:
        name = _name(path, root)
        try:
            found.append((name, Incident.from_json(json.loads(file_text(path)))))
        except (OSError, ValueError, FormatError, RecursionError) as error:
            looked.append(Looked(mark="✗", what="incident", found=f"{name}: {error}"))
    if found:
        steps = [i.step for _, i in found]
        words = f"{len(found):,}, steps {min(steps):,} to {max(steps):,}"
        looked.append(Looked(mark="!", what="incidents", found=words))
    facts = [f for name, incident in found for f in _facts(name, incident)]
    return Part(facts=tuple(facts), looked=tuple(looked), moments=tuple(_moments(found)), notes=())


def _name(path: Path, root: Path) -> str:
    place = path.parent if path.name == "incident.json" else path
    return name_in(root, place)


def _facts(name: str, incident: Incident) -> Iterator[Fact]:
    where = f"incident {name}"
    verdict = incident.verdict
    if verdict.kind == "nonfinite":
        flag = {"gradient": "grad-nan", "parameter": "nan-weights", "buffer": "nan-weights"}.get(verdict.level or "")
        yield Fact(name=flag or "loss-nan", where=where, words=str(verdict))
        if verdict.level == "input":
            samples = next((n for n in incident.notes if "sample" in n or "batch" in n or "ind" in n), "")
            words = ": ".join(filter(None, ("input already contained NaN or Inf", ", ".join(verdict.names[:3]))))
            words += f"; {samples}" if samples else ""
            yield Fact(name="bad-leaf", value="input", where=where, words=words)
    if verdict.kind == "dead":
        yield Fact(name="no-learning", where=where, words=str(verdict))
    written = incident.location is not None and bool(incident.location.written_by)
    wide = incident.location is not None and bool(incident.location.outgrew)  # float32 was not enough, either
    if verdict.origin in _ORIGINS and not (
        written or (verdict.origin == "range" and wide)
    ):  # bad weights that an update has written were not loaded
        yield Fact(name=_ORIGINS[verdict.origin], where=where, words=f"a rerun found: {verdict.origin}")
    if verdict.origin == "transient":
        yield Fact(name="origin", value="transient", where=where, words="a rerun of the step was finite")
    yield from _location(incident, where)
    for package, version in incident.environment.items():
        yield from read_versions(f"{package} {version}", where=where)
    yield from read_hardware(incident.environment.get("device", ""), where=where)
    if incident.world_size > 1:
        yield Fact(name="several-gpus", where=where, words=f"{incident.world_size} ranks")


_EPS_IS_ZERO = re.compile(r"eps \S+ is 0 in")


def _location(incident: Incident, where: str) -> Iterator[Fact]:
    """What `nanproof locate` proved."""
    location = incident.location
    if location is None or not location.reproduced:
        return
    mechanism = location.mechanism
    words = f"{mechanism} in {call_name(location.op) or 'an operation'} at {location.place}: {location.why}"
    words = words.rstrip(": ")
    if mechanism == "bad-leaf":
        kind = "input" if location.leaf_kind in ("batch", "input") else "parameter"
        if location.written_by:
            kind = "eps" if _EPS_IS_ZERO.search(location.why) else "update"
        yield Fact(name="bad-leaf", value=kind, where=where, words=words)
    elif mechanism not in ("unknown", "outside-dispatcher") and call_name(location.op) != "ctc_loss":
        named = f"{location.outgrew}-overflow" if location.outgrew else mechanism
        yield Fact(name="mechanism", value=named, where=where, words=words)
    yield Fact(name="located-op", value=call_name(location.op), where=where, words=words)


def _moments(found: Sequence[tuple[str, Incident]]) -> Iterator[Moment]:
    if not found:
        return
    for name, incident in found[:5]:
        yield Moment(
            when=f"step {incident.step:,}", what=f"{incident.verdict}; {incident.action.kind} (incident {name})"
        )
    if len(found) > 5:
        kinds = Counter(str(i.verdict.kind) for _, i in found[5:])
        yield Moment(when="later", what=", ".join(f"{n:,} × {kind}" for kind, n in kinds.most_common(4)))

"""The training data that lies with a run, read when it is small enough: NaN, empty targets, labels out of range."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import NanproofError
from ..data.facts import facts_of
from ..data.scan import scan_data
from ..diagnosis import Looked
from ..evidence import Fact
from .part import Part, name_in


def read_data(paths: Sequence[Path], root: Path) -> Part:
    """What is wrong in the data files, each by its name; a clean part of the data clears nothing."""
    facts: list[Fact] = []
    looked: list[Looked] = []
    for path in paths:
        name = name_in(root, path)
        try:
            report = scan_data(path)
        except (NanproofError, OSError) as error:
            looked.append(Looked(mark="✗", what="data", found=f"{name}: {error}"))
            continue
        found = [f for f in facts_of(report) if f.name != "data-clean"]
        facts += [Fact(name=f.name, value=f.value, where=name, words=f.words) for f in found]
        facts += [Fact(name="data-file", value=name, where=name)] if found and not report.ok else []
        words = str(report.problems[0]) if report.problems else f"{report.rows:,} rows, no problems found"
        looked.append(Looked(mark="!" if report.problems else "✓", what="data", found=f"{name}: {words}"))
    return Part(facts=tuple(facts), looked=tuple(looked))

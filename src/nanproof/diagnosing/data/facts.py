"""What a look through the data says to the engine."""

from __future__ import annotations

from ..evidence import Fact
from .report import DataReport

FLAGS = {
    "nonfinite": "data-nonfinite",
    "label-out-of-range": "labels-out-of-range",
    "empty-target": "labels-all-masked",
    "ctc-infeasible": "ctc-lengths-infeasible",
    "degenerate-box": "data-degenerate",
    "constant": "data-constant",
    "unreadable": "data-nonfinite",
    "empty": "data-empty",
    "empty-text": "data-empty",
    "out-of-range": "data-absurd",
}


def facts_of(report: DataReport) -> tuple[Fact, ...]:
    """One fact for each kind of problem, with the first place it was seen at; or that the data is clean."""
    found: dict[str, Fact] = {}
    for problem in report.problems:
        flag = FLAGS.get(problem.kind)
        if flag and flag not in found:
            found[flag] = Fact(name=flag, where=report.path, words=str(problem))
    return tuple(found.values()) if found or not report.ok else (Fact(name="data-clean", where=report.path),)

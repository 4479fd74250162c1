"""What a look through the data says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "nonfinite",
    "empty",
    "constant",
    "out-of-range",
    "label-out-of-range",
    "ignored-label",
    "empty-target",
    "ctc-infeasible",
    "degenerate-box",
    "unreadable",
    "empty-text",
]
# kinds that stop a training, and the cause that each is evidence for
CAUSES: dict[Kind, str] = {
    "nonfinite": "bad-data",
    "unreadable": "bad-data",
    "label-out-of-range": "label-out-of-range",
    "empty-target": "empty-target-mean",
    "empty-text": "empty-target-mean",
    "ctc-infeasible": "ctc-infeasible",
    "degenerate-box": "bad-data",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something in the data that training may trip over."""

    kind: Kind
    file: str
    message: str
    column: str = ""
    row: int | None = None
    """The first row it was seen in, counted from 0."""
    count: int = 1

    @property
    def cause(self) -> str:
        """The cause that it is evidence for; empty when it is only worth a look."""
        return CAUSES.get(self.kind, "")

    def __str__(self) -> str:
        row = f" row {self.row:,}" if self.row is not None else ""
        column = f" {self.column}" if self.column else ""
        return f"{self.file}{row}{',' if row and column else ''}{column}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table, or one array: what its values are like."""

    file: str
    name: str
    rows: int
    numbers: int
    """How many numbers were looked at."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """The verdict on a folder of data. Unknown is never clean: what could not be read is a problem."""

    path: str
    files: int
    rows: int
    problems: tuple[Problem, ...] = ()
    columns: tuple[Column, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.files > 0 and not any(p.cause for p in self.problems)

"""`scan_data`: all files of data below a path, each read once, in pieces."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from ...checkpoint import scan as scan_checkpoint
from ...checkpoint.formats import EXTENSIONS
from ...errors import NanproofError, UsageError, missing
from .annotations import is_coco, is_yolo, read_coco, read_voc, read_yolo
from .arrays import read_npy, read_npz
from .images import SUFFIXES, read_image
from .meaning import Fault, Meaning
from .numbers import Tally
from .piece import Progress, Reader, Unreadable
from .report import Column, DataReport, Kind, Problem
from .tables import holds_rows, read_csv, read_json, read_jsonl, read_parquet

READERS: dict[str, Reader] = {
    ".npy": read_npy,
    ".npz": read_npz,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".parquet": read_parquet,
    ".xml": read_voc,
    **dict.fromkeys(SUFFIXES, read_image),
}
_KNOWN = f"{', '.join(sorted(READERS))} and torch or safetensors files"
LARGEST_HALF = 65504.0


def reader_of(file: Path) -> Reader | None:
    """Who reads a file, by its ending; JSON and text files only when they hold boxes."""
    suffix = file.suffix.lower()
    if suffix == ".json":
        return read_coco if is_coco(file) else read_json if holds_rows(file) else None
    if suffix == ".txt":
        return read_yolo if is_yolo(file) else None
    return READERS.get(suffix)


def scan_data(
    path: str | os.PathLike[str],
    *,
    classes: int | None = None,
    labels: tuple[str, ...] = (),
    downsample: int = 1,
    progress: Progress | None = None,
) -> DataReport:
    """Look through a file or a folder of data for NaN, Inf, empty targets, labels out of range and the like.

    ``classes`` is the number of classes that labels must stay below, ``labels`` names the columns that hold them
    (default: found by their names), ``downsample`` is how many input steps the model makes one of, for CTC.
    """
    root = Path(path)
    if not root.exists():
        raise missing(root, "give a file or a folder of training data")
    meaning = Meaning(classes=classes, labels=labels, downsample=downsample)
    report = _Report(root, meaning, progress or (lambda count: None))
    for file in _files(root):
        report.look(file)
    return report.result()


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(folder, name)


class _Report:
    """Gathers what the files say."""

    def __init__(self, root: Path, meaning: Meaning, progress: Progress) -> None:
        self._root, self._meaning, self._progress = root, meaning, progress
        self._problems: list[Problem] = []
        self._columns: list[Column] = []
        self._skipped: dict[str, int] = {}
        self._unchecked: list[str] = []
        self._files = self._rows = 0

    def look(self, file: Path) -> None:
        suffix = file.suffix.lower()
        name = str(file.relative_to(self._root)) if file != self._root else file.name
        try:
            if reader := reader_of(file):
                self._files += 1
                self._read(file, name, reader)
            elif suffix in EXTENSIONS:
                self._files += 1
                self._tensors(file, name)
            elif file == self._root:
                raise UsageError(
                    f"{file} is no data that nanproof reads", hint=f"it reads {', '.join(sorted(READERS))}"
                )
            else:
                self._skipped[suffix or "no extension"] = self._skipped.get(suffix or "no extension", 0) + 1
        except (Unreadable, OSError) as error:
            self._problems.append(Problem(kind="unreadable", file=name, message=str(error)))

    def _read(self, file: Path, name: str, reader: Reader) -> None:
        tallies: dict[str, Tally] = {}
        faults: dict[tuple[Kind, str], tuple[Fault, int]] = {}
        rows = 0
        for piece in reader(file, self._progress):
            for column, values in piece.columns.items():
                tally = tallies.setdefault(column, Tally())
                tally.add(piece.first, values)
                rows = max(rows, tally.rows)
            for fault in self._meaning.faults(piece):
                first, count = faults.get((fault.kind, fault.column), (fault, 0))
                faults[fault.kind, fault.column] = (first, count + 1)
        self._rows += rows
        if not rows and reader not in (read_voc, read_yolo):
            self._problems.append(Problem(kind="empty", file=name, message="it holds no rows"))
        for column, tally in tallies.items():
            self._judge(name, column, tally)
        for fault, count in faults.values():
            more = f" ({count:,} rows in all)" if count > 1 else ""
            self._add(fault.kind, name, fault.column, fault.words + more, row=fault.row, count=count)

    def _judge(self, name: str, column: str, tally: Tally) -> None:
        finite = tally.high >= tally.low
        low, high = (tally.low, tally.high) if finite else (None, None)
        self._columns.append(Column(file=name, name=column, rows=tally.rows, numbers=tally.numbers, low=low, high=high))
        if tally.bad:
            kinds = ", ".join(f"{n:,} {word}" for n, word in ((tally.nan, "NaN"), (tally.inf, "Inf")) if n)
            words = f"{kinds} of {tally.numbers:,} values, first in row {tally.first_bad:,}"
            self._add("nonfinite", name, column, words, row=tally.first_bad, count=tally.bad)
        if tally.missing and tally.numbers and not self._meaning.is_label(column):
            words = f"{tally.missing:,} empty of {tally.rows:,} cells in a column of numbers: NaN once loaded"
            self._add("nonfinite", name, column, words, row=tally.first_missing, count=tally.missing)
        count = tally.numbers - tally.bad
        if count > 1 and tally.low == tally.high and not column.startswith("bbox_"):
            self._add("constant", name, column, f"all {count:,} finite values are {tally.low:g}")
        largest = max(abs(tally.low), abs(tally.high)) if finite else 0.0
        if largest > LARGEST_HALF and not self._is_counter(column):
            self._add("out-of-range", name, column, f"values up to {largest:.4g}: infinite in fp16 (above 65504)")

    @staticmethod
    def _is_counter(column: str) -> bool:
        """Identifiers and times are large on purpose, and no model sees them."""
        return column.lower().endswith(("id", "ids", "index", "time", "timestamp", "date", "seed", "hash", "size"))

    def _add(self, kind: Kind, file: str, column: str, message: str, row: int | None = None, count: int = 1) -> None:
        self._problems.append(Problem(kind=kind, file=file, column=column, message=message, row=row, count=count))

    def _tensors(self, file: Path, name: str) -> None:
        """safetensors and torch files: the checkpoint scanner reads them, and executes nothing."""
        try:
            report = scan_checkpoint(file)
        except NanproofError as error:
            raise Unreadable(error.message) from None
        self._progress(report.bytes)
        if report.health in ("damaged", "unreadable", "refused"):
            raise Unreadable("; ".join(report.reasons[:2]) or report.health)
        if self._meaning.classes is not None and any(t.state == "not applicable" for t in report):
            self._unchecked.append(name)
        for tensor in report:
            self._rows += tensor.shape[0] if tensor.shape else 1
            if tensor.state == "nonfinite":
                facts = tensor.facts
                words = facts.census if facts else "it holds NaN or Inf"
                row = facts.first_bad[0] if facts and facts.first_bad else None
                self._add("nonfinite", name, tensor.name, words, row=row, count=facts.bad if facts else 1)
            if 0 in tensor.shape:
                self._add("empty", name, tensor.name, f"its shape is {list(tensor.shape)}")

    def result(self) -> DataReport:
        notes = [f"{count:,} files not read ({suffix})" for suffix, count in sorted(self._skipped.items())]
        if self._unchecked:
            notes.append(f"integers in {', '.join(self._unchecked[:3])} were not compared with the number of classes")
        names = sorted({c.name for c in self._columns})
        for label in self._meaning.labels if names else ():
            if label not in names:  # a typing error must not pass for a clean column
                close = difflib.get_close_matches(label, names, n=1)
                known = f"did you mean {close[0]}?" if close else f"the columns are {', '.join(names[:8])}"
                raise UsageError(f"no column {label!r} in {self._root}", hint=known)
        if not self._files:
            notes.append(f"no data found; it reads {_KNOWN}")
        order = sorted(self._problems, key=lambda p: (not p.cause, p.file, p.row or 0))
        return DataReport(
            path=str(self._root),
            files=self._files,
            rows=self._rows,
            problems=tuple(order),
            columns=tuple(self._columns),
            notes=tuple(notes),
        )

"""Tables: CSV, JSON lines and Parquet, some thousand rows at a time."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...files import open_file
from .piece import ROWS, Piece, Progress, Unreadable, columns_of

LINE = 16 << 20  # a longer line is no row of a table


def read_csv(path: Path, progress: Progress) -> Iterator[Piece]:
    csv.field_size_limit(LINE)
    with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", errors="replace", newline="") as stream:
        rows = csv.DictReader(stream, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        first = 0
        try:
            while batch := list(islice(rows, ROWS)):
                progress(sum(len(v or "") for row in batch for v in row.values() if isinstance(v, str)))
                yield Piece(first, columns_of([{k: _cell(v) for k, v in row.items() if k} for row in batch]))
                first += len(batch)
        except csv.Error as error:
            raise Unreadable(f"row {first + rows.line_num:,}: {error}") from None


def _cell(text: Any) -> Any:
    """A number where the cell is one, None where it is blank, else the text."""
    if not isinstance(text, str) or not text.strip():
        return None
    try:
        return int(text) if text.strip().lstrip("+-").isdigit() and len(text) < 18 else float(text)
    except ValueError:
        return text


def read_jsonl(path: Path, progress: Progress) -> Iterator[Piece]:
    import orjson

    first = 0
    batch: list[Mapping[str, Any]] = []
    with open_file(path) as stream:
        while line := stream.readline(LINE):
            progress(len(line))
            if len(line) == LINE:
                raise Unreadable(f"line {first + len(batch) + 1:,} is longer than {LINE >> 20} MB")
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = _lenient(line, first + len(batch) + 1)
            batch.append(row if isinstance(row, dict) else {"": row})
            if len(batch) == ROWS:
                yield Piece(first, columns_of(batch))
                first, batch = first + len(batch), []
    if batch:
        yield Piece(first, columns_of(batch))


LARGEST = 256 << 20
_ROWS = re.compile(rb"\s*(?:\[\s*\{|\{[^\n]+\}\s*\n\s*\{)")


def holds_rows(path: Path) -> bool:
    """Whether a JSON file is a list of objects, or one object in each line; a config is neither."""
    with open_file(path) as stream:
        return _ROWS.match(stream.read(1 << 16)) is not None


def read_json(path: Path, progress: Progress) -> Iterator[Piece]:
    """A list of objects; one object in each line, as the manifests of speech have them, is no document of JSON."""
    with open_file(path) as stream:
        if stream.read(64).lstrip()[:1] == b"{":
            yield from read_jsonl(path, progress)
            return
        stream.seek(0)
        data = stream.read(LARGEST + 1)
    progress(len(data))
    if len(data) > LARGEST:
        raise Unreadable(f"a list of more than {LARGEST >> 20} MB; write one object per line (.jsonl)")
    rows = _lenient(data, 1)
    rows = [row if isinstance(row, dict) else {"": row} for row in rows]
    for first in range(0, len(rows), ROWS):
        yield Piece(first, columns_of(rows[first : first + ROWS]))


def _lenient(line: bytes, number: int) -> Any:
    """Lines with bare NaN or Infinity, which are what we are looking for."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"line {number:,} is not JSON ({error})") from None


def read_parquet(path: Path, progress: Progress) -> Iterator[Piece]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UsageError("reading Parquet needs pyarrow", hint="pip install 'nanproof[data]'") from None
    first = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=ROWS):
                progress(batch.nbytes)
                yield Piece(first, {name: _plain(batch.column(i)) for i, name in enumerate(batch.schema.names)})
                first += batch.num_rows
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise Unreadable(f"not a readable Parquet file ({error})") from None


def _plain(column: Any) -> Any:
    import pyarrow

    if not column.null_count and (pyarrow.types.is_floating(column.type) or pyarrow.types.is_integer(column.type)):
        return column.to_numpy(zero_copy_only=False)
    values = column.to_pylist()
    if pyarrow.types.is_struct(column.type):
        return [v if isinstance(v, Mapping) else {} for v in values]
    return [None if isinstance(v, float) and math.isnan(v) and column.null_count == len(values) else v for v in values]

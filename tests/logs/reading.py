"""Short ways to read a text as a log and to look at what came out."""

from __future__ import annotations

import math

from nanproof.logs import Column, Series
from nanproof.logs.collect import Collector
from nanproof.logs.detect import HEAD, find_stream

NAN, INF = math.nan, math.inf
Points = list[tuple[int, float | str]]


def read_bytes(data: bytes, *, chunk: int | None = None) -> Series:
    """A log out of its bytes, perhaps in pieces."""
    collector = Collector(source="log", format="")
    collector.format, stream = find_stream(data[:HEAD])
    decoder = stream(collector)
    for start in range(0, len(data), chunk or max(1, len(data))):
        decoder.feed(data[start : start + (chunk or len(data))])
    decoder.settle()
    decoder.close()
    return collector.series()


def read_text(text: str, *, chunk: int | None = None) -> Series:
    return read_bytes(text.encode(), chunk=chunk)


def points(column: Column | None) -> Points:
    """Steps and values; NaN as a value that equals itself."""
    return [] if column is None else list(zip(column.steps.tolist(), map(plain, column.values.tolist()), strict=True))


def plain(value: float) -> float | str:
    return "nan" if math.isnan(value) else value


def as_plain(series: Series) -> dict[str, object]:
    """Everything that a series says, to be compared."""
    columns = {c.name: (c.role, c.rows.tolist(), points(c), c.total) for c in series.columns.values()}
    events = [(e.kind, e.name, e.text, e.step, e.line, dict(e.details)) for e in series.events]
    return {"columns": columns, "events": events, "segments": series.segments, "unit": series.unit, "rows": series.rows}

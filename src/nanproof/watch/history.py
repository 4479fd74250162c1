"""The history of a run as bytes for the page: few enough points for a screen, and every non-finite one.

A message is the length of a JSON header (4 bytes, little endian), the header, blanks up to a multiple of 8, and then
for each column of the header its steps and its values as float64.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..logs.points import keep
from ..logs.series import Column, Event, Series
from ..records import to_json

WIDTH = 1000  # a chart has about as many columns of pixels; each keeps a minimum and a maximum
LAYER_WIDTH = 100  # a heat map has fewer columns, and a model many layers
STRETCHES = 1000  # more bands than pixels tell nothing; the nearest ones are drawn as one
QUANTITIES = ("grad_norm", "weight_norm", "update_ratio", "headroom", "absmax", "param")
_LAYER = re.compile(rf"({'|'.join(QUANTITIES)})/(.+)")


def layer_of(name: str) -> tuple[str, str] | None:
    """The quantity and the layer of a column that a guard's watches wrote.

    >>> layer_of("absmax/blocks.0.attn"), layer_of("train/loss")
    (('absmax', 'blocks.0.attn'), None)
    """
    found = _LAYER.fullmatch(name)
    return (found[1], found[2]) if found else None


def encode(
    series: Series,
    low: float | None = None,
    high: float | None = None,
    width: int = WIDTH,
    more: Sequence[Column] = (),
) -> bytes:
    """All columns between two steps, thinned to ``2 · width`` finite points each, and ``more`` that no log holds."""
    header: list[dict[str, Any]] = []
    arrays: list[bytes] = []
    starts = np.array([s.first_row for s in series.segments] or [0])
    for column in (*series.columns.values(), *more):
        layer = layer_of(column.name)
        whole = between(column, low, high)
        part = thin(whole, min(width, LAYER_WIDTH) if layer else width)
        finite = np.isfinite(part.values)
        lengths = np.bincount(np.searchsorted(starts, part.rows[finite], side="right") - 1, minlength=len(starts))
        header.append(
            {
                "name": column.name,
                "role": column.role,
                "points": int(finite.sum()),
                "total": column.total,
                "lengths": lengths.tolist(),
                "bad": stretches(whole),
                "last": to_json(float(column.values[-1])),
                "last_step": int(column.steps[-1]),
                **({"layer": list(layer)} if layer else {}),
            }
        )
        arrays += [part.steps[finite].astype("<f8").tobytes(), part.values[finite].astype("<f8").tobytes()]
    text = json.dumps({"columns": header, "row": series.rows}, allow_nan=False).encode()
    text += b" " * (-(len(text) + 4) % 8)
    return struct.pack("<I", len(text)) + text + b"".join(arrays)


def between(column: Column, low: float | None, high: float | None) -> Column:
    """The points of a range of steps, and one more on each side, so that lines run to the edge."""
    if low is None and high is None:
        return column
    inside = np.ones(len(column), np.bool_)
    if low is not None:
        inside &= column.steps >= low
    if high is not None:
        inside &= column.steps <= high
    wide = inside.copy()
    wide[:-1] |= inside[1:]
    wide[1:] |= inside[:-1]
    return column.only(wide)


def thin(column: Column, width: int) -> Column:
    """At most ``2 · width`` finite points, the extremes of each stretch among them, and all others."""
    if len(column) <= 2 * width:
        return column
    mask = np.zeros(len(column), np.bool_)
    mask[keep(column.rows, column.values, 2 * width)] = True
    return column.only(mask)


def stretches(column: Column) -> list[list[int]]:
    """Where the non-finite points are: first step, last step, and how many NaN, Inf and -Inf of each unbroken row.

    >>> from nanproof.logs.collect import Collector
    >>> log = Collector(source="", format="")
    >>> log.records([{"step": s, "loss": v} for s, v in enumerate([1.0, float("nan"), float("inf"), 2.0])])
    >>> stretches(log.series().loss)
    [[1, 2, 1, 1, 0]]
    """
    at = np.flatnonzero(column.bad)
    if not len(at):
        return []
    gaps = np.diff(at)
    limit = max(1, int(np.sort(gaps)[-STRETCHES])) if len(gaps) >= STRETCHES else 1
    breaks = np.flatnonzero((gaps > limit) | (np.diff(column.steps[at]) < 0)) + 1
    found = []
    for part in np.split(at, breaks):
        values = column.values[part]
        counts = [int(np.isnan(values).sum()), int((values == np.inf).sum()), int((values == -np.inf).sum())]
        found.append([int(column.steps[part[0]]), int(column.steps[part[-1]]), *counts])
    return found


def events_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Events for the page."""
    return [
        {"kind": e.kind, "name": e.name, "text": e.text[:500], "step": e.step, "row": e.row, "line": e.line}
        for e in events
    ]


def delta(series: Series, more: Sequence[Column] = ()) -> dict[str, Any]:
    """What is new, as JSON: points by column, events, and the row that it reaches to."""
    columns = {}
    for column in (*series.columns.values(), *more):
        part = thin(column, WIDTH)
        finite = np.isfinite(part.values)
        columns[column.name] = {
            "role": column.role,
            "steps": part.steps[finite].tolist(),
            "values": part.values[finite].tolist(),
            "bad": stretches(column),
            "last": to_json(float(column.values[-1])),
            "last_step": int(column.steps[-1]),
            **({"layer": list(layer)} if (layer := layer_of(column.name)) else {}),
        }
    return {"columns": columns, "events": events_of(series.events), "row": series.rows}


def segments_of(series: Series) -> list[list[int]]:
    """First and last step of each stretch between resumes: what the axis of a chart must cover."""
    return [[s.first_step, s.last_step] for s in series.segments]


def about(series: Series) -> dict[str, Any]:
    """What a page needs to know of a run besides its points."""
    return {
        "format": series.format,
        "unit": series.unit,
        "max_steps": series.max_steps,
        "rows": series.rows,
        "segments": segments_of(series),
        "events": events_of(series.events),
        "counts": dict(series.counts),
        "notes": list(series.notes),
    }

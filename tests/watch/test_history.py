"""What the page gets: few points, the right extremes, and every non-finite one."""

from __future__ import annotations

import json
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanproof.logs.collect import Collector
from nanproof.logs.series import Series
from nanproof.watch.history import delta, encode


def series(values: list[float]) -> Series:
    log = Collector(source="x", format="test")
    log.records([{"step": i, "loss": v} for i, v in enumerate(values)])
    return log.series()


def decode(data: bytes) -> list[tuple[dict[str, object], np.ndarray, np.ndarray]]:
    size = struct.unpack("<I", data[:4])[0]
    header = json.loads(data[4 : 4 + size])
    at, found = 4 + size, []
    assert at % 8 == 0
    for column in header["columns"]:
        count = column["points"]
        steps, values = (np.frombuffer(data, "<f8", count, at + 8 * count * i) for i in (0, 1))
        at += 16 * count
        found.append((column, steps, values))
    assert at == len(data)
    return found


@given(st.lists(st.floats(width=32), min_size=1, max_size=400), st.integers(5, 60))
def test_nothing_bad_is_lost_and_extremes_are_exact(values: list[float], width: int) -> None:
    column, steps, kept = decode(encode(series(values), width=width))[0]
    whole = np.array(values)
    finite = whole[np.isfinite(whole)]
    assert np.isfinite(kept).all()
    assert len(kept) <= max(2 * width + 2, 0) + 2
    if len(finite):
        assert (kept.min(), kept.max()) == (finite.min(), finite.max())
    assert all(values[int(s)] == v for s, v in zip(steps, kept, strict=True))
    bad = {s for first, last, *_ in column["bad"] for s in range(first, last + 1)}
    assert bad == set(np.flatnonzero(~np.isfinite(whole)).tolist())
    assert sum(sum(counts) for _, _, *counts in column["bad"]) == (~np.isfinite(whole)).sum()


def test_a_range_holds_its_points_and_the_neighbours() -> None:
    _, steps, _ = decode(encode(series([float(i) for i in range(100)]), 10, 20))[0]
    assert steps.tolist() == list(range(9, 22))


def test_resumes_cut_a_curve() -> None:
    log = Collector(source="x", format="test")
    log.records([{"step": s, "loss": 1.0} for s in (1, 2, 3, 4, 2, 3, 4, 5)])
    column, _, _ = decode(encode(log.series()))[0]
    assert column["lengths"] == [4, 4]


def test_news_is_strict_json() -> None:
    told = delta(series([1.0, float("nan"), float("inf")]))
    json.dumps(told, allow_nan=False)
    assert told["columns"]["loss"]["bad"] == [[1, 2, 1, 1, 0]]
    assert told["columns"]["loss"]["last"] == "Infinity"

"""The model: columns, thinning, segments, roles, many records at once."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logs.reading import as_plain, points, read_text
from nanproof.logs import Series
from nanproof.logs.collect import BUDGET, COLUMNS, EVENTS, LIMIT, Collector
from nanproof.logs.points import Points


def collect(records: list[dict[str, object]]) -> Series:
    collector = Collector(source="", format="")
    collector.records(records)
    return collector.series()


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=3000),
    st.data(),
)
def test_thinning_keeps_what_matters(values: list[float], data: st.DataObject) -> None:
    limit = data.draw(st.integers(4, 200))
    thinned = Points()
    for row, value in enumerate(values):
        at = np.array([row])
        thinned.extend(at, at, np.array([value]))
        if len(thinned) > 2 * limit:
            thinned.thin(limit)
    thinned.thin(limit)
    rows, _, kept = thinned.arrays()
    array = np.array(values)
    finite = array[np.isfinite(array)]
    bad = np.flatnonzero(~np.isfinite(array))
    assert np.isfinite(kept).sum() <= limit + 2 + 2 * len(bad)
    assert rows[~np.isfinite(kept)].tolist() == bad.tolist(), "a NaN or Inf was lost"
    beside = {i for b in bad.tolist() for i in (b - 1, b + 1) if 0 <= i < len(values)}
    assert beside <= set(rows.tolist()), "the value before or after it was lost"
    assert (rows[0], rows[-1], thinned.total) == (0, len(values) - 1, len(values))
    assert (np.diff(rows) > 0).all()
    assert np.array_equal(kept, array[rows], equal_nan=True)
    if len(finite):
        left = kept[np.isfinite(kept)]
        assert (left.min(), left.max()) == (finite.min(), finite.max())


def test_how_often_it_is_thinned_does_not_matter() -> None:
    values = np.random.default_rng(0).normal(size=40_000)
    rows = np.arange(len(values))
    once, often = Points(), Points()
    once.extend(rows, rows, values)
    for start in range(0, len(values), 777):
        often.extend(rows[start : start + 777], rows[start : start + 777], values[start : start + 777])
        if len(often) > 2_000:
            often.thin(1_000)
    once.thin(1_000)
    often.thin(1_000)
    (a, _, _), (b, _, _) = once.arrays(), often.arrays()
    assert set(a.tolist()) <= set(b.tolist()), "an extreme was lost on the way"


def test_a_long_column_is_bounded_and_says_so() -> None:
    collector = Collector(source="", format="")
    steps = np.arange(5 * LIMIT)
    for block in np.array_split(steps, 50):
        collector.points(["loss"], np.zeros(len(block), np.int64), block, block * 1.0, block * 1.0)
    series = collector.series()
    assert series.loss is not None
    assert len(series.loss) <= LIMIT
    assert series.loss.total == 5 * LIMIT
    assert "thinned" in series.notes[0]


def test_very_many_columns_are_bounded() -> None:
    collector = Collector(source="", format="")
    for step in range(3):
        collector.record({"step": step, "loss": 1.0, **{f"histogram/{i}": 1.0 for i in range(COLUMNS + 500)}})
        collector.record({"step": step, "late_loss": 2.0})
    series = collector.series()
    assert len(series.columns) <= 2 * COLUMNS
    assert "late_loss" in series.columns, "a loss is always kept"
    assert "a column more than can be kept is left out" in series.notes[0]
    assert BUDGET // COLUMNS >= 1_000


def test_many_events_keep_the_first_and_the_last() -> None:
    series = read_text(
        "".join(f"iter {i}: loss 2.0\nGradient overflow. Skipping step {i}\n" for i in range(3 * EVENTS))
    )
    steps = [e.step for e in series.events]
    assert series.counts == {"overflow": 3 * EVENTS}
    assert steps == [*range(EVENTS), *range(2 * EVENTS, 3 * EVENTS)]


def rows_strategy() -> st.SearchStrategy[list[dict[str, object]]]:
    number = st.one_of(
        st.floats(), st.integers(-5, 5), st.sampled_from(["NaN", "1.5", "x", None, True, [0.5], {"a": 1}]), st.just(2.0)
    )
    record = st.fixed_dictionaries(
        {},
        optional={
            "step": st.integers(0, 30),
            "epoch": st.integers(0, 3),
            "loss": number,
            "lr": number,
            "verdict": st.just("ok"),
        },
    )
    return st.lists(record, max_size=40)


@settings(max_examples=200, deadline=None)
@given(rows_strategy())
@example([{"step": 1, "epoch": e, "loss": 2.0} for e in (0, 1)])
def test_many_at_once_is_the_same_as_one_by_one(records: list[dict[str, object]]) -> None:
    one_by_one = Collector(source="", format="")
    for record in records:
        one_by_one.record(record)
    assert as_plain(collect(records)) == as_plain(one_by_one.series())


def test_blocks_are_taken_column_by_column_when_they_can() -> None:
    records: list[dict[str, object]] = [
        {"step": s, "epoch": s / 10, "loss": 1.0, "note": "x", "lr": 1e-3} for s in range(100)
    ]
    records[50]["loss"] = "NaN"
    mixed = [*records, {"step": 100, "eval_loss": 2.0}, {"step": 101, "loss": 3.0}]
    series = collect(mixed)
    assert series.loss is not None
    assert series.loss.total == 101
    assert series.loss.steps[series.loss.bad].tolist() == [50]
    assert "note" not in series.columns


def test_segments_and_what_they_are_not() -> None:
    resumed = collect([{"step": s, "loss": 1.0} for s in (*range(10), *range(5, 15))])
    assert [(s.first_step, s.last_step) for s in resumed.segments] == [(0, 9), (5, 14)]
    assert [resumed.segment(int(r)) for r in resumed.columns["loss"].rows] == [0] * 10 + [1] * 10

    epochs = collect([{"epoch": e, "iter": i, "loss": 1.0} for e in range(3) for i in (50, 100, 150)])
    assert epochs.columns["loss"].steps.tolist() == [50, 100, 150, 200, 250, 300, 350, 400, 450]
    assert len(epochs.segments) == 1

    unnamed = collect([{"batch": i, "loss": 1.0} for _ in range(4) for i in range(5)])
    assert unnamed.columns["loss"].steps.tolist() == list(range(20))
    assert "restarts 3 times" in unnamed.notes[0]

    ranks = collect([{"step": s + (r == 1), "loss": 1.0} for s in range(100) for r in (1, 0)])
    assert len(ranks.segments) == 1
    assert "several processes" in ranks.notes[0]


def test_wandbs_own_counter_gives_way_to_a_better_one() -> None:
    series = collect(
        [
            {"_step": 0, "loss": 1.0},
            {"_step": 1, "train/global_step": 100, "loss": 1.0},
            {"_step": 2, "eval/loss": 2.0},
            {"_step": 3, "train/global_step": 200, "loss": 1.0},
        ]
    )
    assert points(series.loss) == [(0, 1.0), (100, 1.0), (200, 1.0)]
    assert points(series.columns["eval/loss"]) == [(100, 2.0)]
    assert len(series.segments) == 1


def test_which_column_speaks_for_the_loss() -> None:
    assert (collect([{"step": 1, "total_loss": 3.0, "loss_cls": 1.0, "nll_loss": 2.0}]).loss or 0).name == "total_loss"  # type: ignore[union-attr]
    only = collect([{"step": 1, "reconstruction_loss": 1.0}])
    assert only.loss is not None
    assert not only.components
    parts = collect([{"step": 1, "box_loss": 1.0, "cls_loss": 2.0}])
    assert parts.loss is None
    assert {c.name for c in parts.components} == {"box_loss", "cls_loss"}
    late = collect([*({"step": s, "train_loss_step": 1.0} for s in range(50)), {"step": 50, "loss": 1.0}])
    assert (late.loss or 0).name == "train_loss_step"  # type: ignore[union-attr]


def test_values_beside_each_other() -> None:
    series = collect(
        [
            {"step": 1, "loss": 1.0, "grad_norm": 5.0},
            {"step": 2, "loss": 2.0},
            {"step": 3, "loss": 3.0, "grad_norm": "NaN"},
            {"step": 2, "loss": 4.0, "grad_norm": 6.0},
        ]
    )
    loss, norm = series.columns["loss"], series.columns["grad_norm"]
    assert series.matched(loss, norm).tolist() == [True, False, True, True]
    assert series.beside(loss, norm).tolist() == pytest.approx([5.0, math.nan, math.nan, 6.0], nan_ok=True)


def test_times_and_numbers_of_every_kind() -> None:
    text = (
        '{"step": 1, "loss": 1e999, "timestamp": "2024-01-01T00:00:00+00:00", "big": 123456789012345678901234567890}\n'
        '{"step": 2.0, "loss": -Infinity, "timestamp": 1704067260000}\n'
        '{"step": "3", "loss": nan, "timestamp": 1704067320.5}\n'
    )
    series = read_text(text)
    assert points(series.loss) == [(1, math.inf), (2, -math.inf), (3, "nan")]
    assert series.time is not None
    assert np.diff(series.time.values).tolist() == [60.0, 60.5]


def test_json_that_only_looks_alike() -> None:
    text = (
        '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": "a: NaN"}\n'
        '{"step": 3, "loss": NaN, "x": "b: NaN, c"}\n{"step": 4, "loss"\n'
    )
    series = read_text(text)
    assert points(series.loss) == [(1, 1.0), (3, "nan")]
    assert series.rows == 3


def test_the_file_says_where(tmp_path_factory: pytest.TempPathFactory) -> None:
    lines = [json.dumps({"step": s, "loss": 1.0}) for s in range(5)]
    lines.insert(3, 'Traceback (most recent call last):\n  File "/a/b.py", line 7, in f\n    x\nValueError: bad\n')
    series = read_text("\n".join(lines))
    (event,) = series.events
    assert (event.line, event.step, event.details["where"], event.details["error"]) == (7, 2, "/a/b.py:7", "ValueError")

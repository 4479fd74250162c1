"""Files written by the real libraries, with NaN and Inf, read without them."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from logs.reading import points, read_text
from logs.writers import TRACKERS, TRAINERS, write_with
from nanproof.errors import UsageError
from nanproof.logs import Series, find_logs, follow, read
from nanproof.logs.timeline import timeline

pytestmark = pytest.mark.slow

STEPS = list(range(0, 100, 10))


@pytest.fixture(scope="module")
def trackers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trackers")
    write_with(TRACKERS, root)
    return root


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trainers")
    (root / "console.log").write_text(write_with(TRAINERS, root))
    return root


def check_run(series: Series) -> None:
    """What every writer of ``logs.writers.RUN`` has logged."""
    assert series.loss is not None
    assert series.grad_norm is not None
    assert series.lr is not None
    assert series.loss.steps.tolist() == STEPS
    assert [s for s, v in zip(STEPS, series.loss.values.tolist(), strict=True) if math.isnan(v)] == [40]
    assert [s for s, v in zip(STEPS, series.grad_norm.values.tolist(), strict=True) if v == math.inf] == [30]
    assert series.lr.values.tolist() == pytest.approx([1e-4] * 10)
    assert len(series.segments) == 1
    assert series.unit == "step"


def wandb_file(root: Path) -> Path:
    (file,) = root.glob("wandb/offline-run-*/run-*.wandb")
    return file


def test_wandb(trackers: Path) -> None:
    series = read(wandb_file(trackers))
    check_run(series)
    assert (series.format, series.run) == ("wandb", "only")
    assert points(series.columns["eval/loss"]) == [(50, 1.5)]  # logged without a global step: beside the last one
    assert set(series.columns["nested.low"].values.tolist()) == {-math.inf}
    assert [e.name for e in series.events if e.kind == "nan"] == ["loss-nonfinite"]
    assert [e.text for e in series.events if e.kind == "stop"] == ["the run ended with exit code 3"]


def test_trackio(trackers: Path) -> None:
    store = trackers / "trackio" / "p.db"
    before = sorted(p.name for p in store.parent.iterdir())
    series = read(store)
    check_run(series)
    assert (series.format, series.run, series.runs) == ("trackio", "second", ("first", "second"))
    assert set(series.columns["nested/low"].values.tolist()) == {-math.inf}
    assert read(store, run="first").run == "first"
    assert sorted(p.name for p in store.parent.iterdir()) == before, "reading left something behind"
    with pytest.raises(UsageError, match="no run third"):
        read(store, run="third")


def test_mlflow_database(trackers: Path) -> None:
    series = read(trackers / "mlflow.db")
    check_run(series)
    assert (series.format, series.run, len(series.runs)) == ("mlflow", "second", 2)
    assert set(series.columns["low"].values.tolist()) == {-math.inf}
    assert read(trackers / "mlflow.db", run="first").run == "first"


def test_mlflow_folder(trackers: Path) -> None:
    folders = [Path(log.path) for log in find_logs(trackers / "mlruns")]
    assert len(folders) == 2
    for folder in folders:
        check_run(read(folder))


def test_a_store_that_grows(trackers: Path, tmp_path: Path) -> None:
    store = tmp_path / "p.db"
    shutil.copy(trackers / "trackio" / "p.db", store)
    with follow(store) as follower:
        assert len(follower.poll().loss or ()) == 10
        assert follower.poll().empty
        with sqlite3.connect(store) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(
                "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) SELECT run_id, timestamp, run_name,"
                " 100, '{\"train/loss\": \"NaN\"}' FROM metrics WHERE run_name='second' LIMIT 1"
            )
            connection.commit()
            assert points(follower.poll().loss) == [(100, "nan")]  # still in the file beside the database
        connection.close()


def test_tensorboard(trainers: Path) -> None:
    series = read(trainers / "tb")
    check_run(series)
    assert points(series.columns["val/loss"])[-1] == (1, 1.0)
    assert series.time is not None
    assert not series.notes
    one = read(next((trainers / "tb").iterdir()))
    assert points(one.loss) == points(series.loss)


def test_a_second_event_file_is_a_resume(trainers: Path, tmp_path: Path) -> None:
    with follow(tmp_path) as follower:
        assert follower.poll().empty
        for file in sorted((trainers / "resumed").iterdir()):
            shutil.copy(file, tmp_path)
            assert len(follower.poll().loss or ()) == 8
        series = follower.close()
    assert [(s.first_step, s.last_step) for s in series.segments] == [(0, 7), (5, 12)]
    assert series.loss is not None
    assert series.lr is not None
    assert len(timeline(series).of("resume")) == 1


def test_trainer_state(trainers: Path) -> None:
    series = read(trainers / "hf" / "checkpoint-32" / "trainer_state.json")
    assert (series.format, series.max_steps, series.logging_steps) == ("trainer state", 32, 2)
    assert series.loss is not None
    assert series.loss.steps.tolist() == list(range(2, 33, 2))
    bad = series.loss.steps[series.loss.bad].tolist()
    assert bad[0] == 12
    assert bad[-1] == 32
    assert timeline(series).outcome == "dead"
    assert [Path(log.path).parent.name for log in find_logs(trainers / "hf") if log.format == "trainer state"] == [
        "checkpoint-32"
    ]


def test_the_console_of_the_trainer_tells_the_same_steps_as_its_state(trainers: Path) -> None:
    for name in ("hf", "hf-filtered"):
        console = (trainers / "console.log").read_text().split(f"=== {name}\n")[1].split("=== ")[0]
        said, state = read_text(console), read(trainers / name / "checkpoint-32" / "trainer_state.json")
        assert said.loss is not None
        assert state.loss is not None
        assert said.loss.steps.tolist() == state.loss.steps.tolist()
        assert said.loss.values == pytest.approx(state.loss.values, rel=1e-3, nan_ok=True)
        assert said.max_steps == 32
        assert [e.kind for e in said.events] == ["finished"]


def test_the_filter_of_the_trainer_is_seen_through(trainers: Path) -> None:
    story = timeline(read(trainers / "hf-filtered" / "checkpoint-32" / "trainer_state.json"))
    (hidden,) = story.of("hidden-nan")
    assert hidden.step <= 14
    assert "logging_nan_inf_filter" in hidden.text
    assert story.outcome == "dead"


def test_lightning_csv(trainers: Path) -> None:
    series = read(next(trainers.glob("csv/*/version_0/metrics.csv")))
    assert series.format == "csv"
    assert series.loss is not None
    assert series.loss.name == "train_loss_step"
    assert series.loss.steps[series.loss.bad][0] == 5
    assert series.lr is not None
    assert series.lr.values.tolist()[:2] == pytest.approx([1e-3, 1e-4])
    assert [c.name for c in series.evals] == ["val_loss"]


def test_the_guards_own_run_folder(trainers: Path) -> None:
    series = read(trainers / "guarded")
    assert series.format == "nanproof"
    assert series.loss is not None
    assert len(series.loss) == 40
    assert {c.name for c in series.components} == {"near", "far"}
    assert series.loss.steps[series.loss.bad].tolist() == [26]
    assert {(e.kind, e.step) for e in series.events} == {("skip", 26), ("incident", 26)}
    incident = next(e for e in series.events if e.kind == "incident")
    assert Path(incident.details["path"]).is_dir()
    assert timeline(series).outcome == "intermittent"


def test_everything_is_found(trainers: Path, trackers: Path) -> None:
    formats = [log.format for log in find_logs(trainers)]
    assert formats.count("nanproof") == 1
    assert formats.count("csv") == 1
    assert formats.count("trainer state") == 2
    assert formats.count("tensorboard") >= 1
    found = {(log.format, Path(log.path).name, log.run) for log in find_logs(trackers)}
    assert {("trackio", "p.db", "first"), ("trackio", "p.db", "second")} <= found
    assert sum(f == "mlflow" for f, _, _ in found) == 4
    assert sum(f == "wandb" for f, _, _ in found) == 1


def test_no_library_is_loaded_to_read_its_files(trainers: Path, trackers: Path) -> None:
    code = (
        "import sys\nfrom nanproof.logs import read\nfor p in sys.argv[1:]: assert read(p).loss is not None, p\n"
        "heavy = {'torch', 'tensorboard', 'wandb', 'mlflow', 'trackio', 'pandas', 'google'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    paths = [trainers / "tb", trainers / "guarded", wandb_file(trackers), trackers / "mlflow.db"]
    subprocess.run([sys.executable, "-c", code, *map(os.fspath, paths)], check=True, timeout=600)

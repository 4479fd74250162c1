"""Logs that grow, are cut, rotated, deleted and written again while they are followed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logs.reading import as_plain, points
from nanproof.errors import UsageError
from nanproof.logs import follow, read


def line(step: int, loss: object = 2.5) -> str:
    return f"iter {step}: loss {loss}, lr 1e-3\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_whole_lines_count_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with follow(path) as follower:
        assert follower.poll().empty
        append(path, line(1) + "iter 2: loss 1")
        assert points(follower.poll().loss) == [(1, 2.5)]
        append(path, "2.5, lr 1e-3\niter 3: loss na")
        assert points(follower.poll().loss) == [(2, 12.5)]
        append(path, "n")
        assert follower.poll().loss is None
        assert points(follower.close().loss) == [(1, 2.5), (2, 12.5), (3, "nan")]


def test_rotation_reads_the_old_file_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    append(path, line(1) + line(2))
    with follow(path) as follower:
        follower.poll()
        append(path, line(3))
        path.rename(tmp_path / "train.log.1")
        append(path, line(4))
        assert points(follower.poll().loss) == [(3, 2.5), (4, 2.5)]
        assert [e.name for e in follower.series.events] == ["starts-over"]
        assert len(follower.series.segments) == 1


def test_a_file_that_is_cut_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    append(path, "".join(line(s) for s in range(100)))
    with follow(path) as follower:
        follower.poll()
        path.write_text(line(1, 7.5))
        assert points(follower.poll().loss) == [(1, 7.5)]
        # cut, and grown beyond its old length before anybody looked
        path.write_text("".join(line(s, 8.5) for s in range(50)))
        assert len(follower.poll().loss or ()) == 50
        assert [(s.first_step, s.last_step) for s in follower.series.segments] == [(0, 99), (1, 1), (0, 49)]


def test_deletion_and_re_creation(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    append(path, line(1))
    with follow(path) as follower:
        follower.poll()
        path.unlink()
        assert follower.poll().empty
        append(path, '{"step": 2, "loss": NaN}\n')  # it need not even be the same format
        assert points(follower.poll().loss) == [(2, "nan")]
        append(path, '{"step": 3, "loss": 1.5}\n')
        assert points(follower.poll().loss) == [(3, 1.5)]


def test_a_state_that_is_written_again_brings_only_what_is_new(tmp_path: Path) -> None:
    path, temporary = tmp_path / "trainer_state.json", tmp_path / "new"
    with follow(path) as follower:
        for count in (3, 5):
            history = [{"step": s, "loss": 1.0 / (s + 1), "epoch": s / 10} for s in range(count)]
            temporary.write_text(json.dumps({"log_history": history, "max_steps": 9, "logging_steps": 1}, indent=2))
            temporary.replace(path)
            new = follower.poll()
        assert new.loss is not None
        assert new.loss.steps.tolist() == [3, 4]
        assert len(follower.series.loss or ()) == 5
        assert follower.series.max_steps == 9


def test_a_bar_that_never_ends_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bar.log"
    with follow(path) as follower:
        for step in range(1, 6):
            append(path, f"\rSteps:   1%|▏         | {step}/100 [00:01<01:40,  1.0s/it, step_loss={step}.5]")
            follower.poll()
        assert points(follower.series.columns.get("step_loss")) == [(s, s + 0.5) for s in range(1, 5)]
        assert len(follower.close().columns["step_loss"]) == 5


def test_the_run_folder_of_a_guard_that_starts_later(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with follow(run) as follower:
        assert follower.poll().empty
        run.mkdir()
        assert follower.poll().empty
        row = {"step": 1, "loss": 3.0, "near": 1.0, "far": 2.0, "grad_norm": 1.0, "verdict": "ok", "action": "commit"}
        append(run / "training_log.jsonl", json.dumps(row) + "\n")
        assert {c.name for c in follower.poll().components} == {"near", "far"}
        bad = row | {"step": 2, "loss": "NaN", "verdict": "nonfinite", "action": "skip"}
        append(
            run / "training_log.jsonl", json.dumps(bad) + "\n" + json.dumps({"event": "resume", "path": "a.pt"}) + "\n"
        )
        new = follower.poll()
        assert points(new.loss) == [(2, "nan")]
        assert [(e.kind, e.name, e.line) for e in new.events] == [("skip", "nonfinite", 2), ("resume", "", 3)]
        (run / "incidents" / "000002").mkdir(parents=True)
        (run / "incidents" / "000002" / "incident.json").write_text("{")
        assert follower.poll().notes == ("000002/incident.json cannot be read",)


def test_polling_many_times_is_the_same_as_reading_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with follow(path) as follower:
        seen: list[tuple[int, float]] = []
        for step in range(600):
            append(path, json.dumps({"step": step, "loss": step / 2}) + "\n")
            seen += points(follower.poll().loss)
        assert seen == [(s, s / 2) for s in range(600)]
        assert as_plain(follower.series) == as_plain(read(path))


def test_what_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read(tmp_path / "none.log")
    with pytest.raises(UsageError, match="no log was found"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a file"):
        read(tmp_path / "pipe")
    for name in ("a.log", "b.log"):
        append(tmp_path / name, line(1))
    with pytest.raises(UsageError, match="holds 2 logs"):
        read(tmp_path)
    append(tmp_path / "empty.log", "")
    assert read(tmp_path / "empty.log").empty


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.sampled_from(["jsonl", "csv", "text"]))
def test_growth_in_any_steps(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], form: str) -> None:
    rows = [(s, 1.0 / (s + 1), "NaN" if s % 5 == 3 else "2.0") for s in range(20)]
    text = {
        "jsonl": "".join(f'{{"step": {s}, "loss": {v}, "grad_norm": {g}}}\n' for s, v, g in rows),
        "csv": "step,loss,grad_norm\n" + "".join(f"{s},{v},{g}\n" for s, v, g in rows),
        "text": "".join(f"step {s}: loss {v}, grad_norm {g}\n" for s, v, g in rows),
    }[form]
    path = tmp_path_factory.mktemp("grow") / "log"
    with follow(path) as follower:
        place = 0
        for size in sizes:
            append(path, text[place : place + size])
            place += size
            follower.poll()
        append(path, text[place:])
        follower.poll()
        grown = follower.close()
    assert as_plain(grown) == as_plain(read(path))
    assert grown.format == form

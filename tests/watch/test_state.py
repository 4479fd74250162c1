"""How a run stands, told from its log and from outside."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanproof.logs.collect import Collector
from nanproof.records import Action, Incident, Verdict
from nanproof.watch.alive import signs_of
from nanproof.watch.runs import Finder, Run, runs_below
from nanproof.watch.state import Signs, state_of
from nanproof.watch.why import OWN_ERROR, Why, why
from support.pages import write_log


def run_of(path: Path) -> Run:
    run = Run(0, path)
    run.poll()
    return run


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        ("", "stale", "nothing was logged for"),
        ("Training completed. Do not forget to share your model\n", "finished", ""),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1, in f\nRuntimeError: CUDA out of memory\n',
            "died",
            "CUDA out of memory",
        ),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nKeyboardInterrupt\n',
            "interrupted",
            "KeyboardInterrupt",
        ),
        ("slurmstepd: error: *** JOB 1 ON a CANCELLED AT 2026-01-01 ***\n", "interrupted", "CANCELLED"),
        ("step 20 loss nan\nstep 21 loss nan\n", "died", "loss is NaN since step 20 (2 logged values"),
        (
            "step 20 loss inf\nstep 21 loss nan\nstep 22 loss nan\n",
            "died",
            "loss is Inf since step 20, NaN since step 21 (3 logged values",
        ),
        ("step 20 loss nan\nstep 21 loss inf\nstep 22 loss nan\n", "died", "loss is NaN or Inf since step 20 (3 "),
    ],
)
def test_what_a_log_says_of_its_end(tmp_path: Path, end: str, kind: str, words: str) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {s} loss {3 - s / 10}\n" for s in range(20)) + end)
    os.utime(log, (time.time() - 3600,) * 2)
    state = run_of(log).state()
    assert state.kind == kind, state
    assert words in str(state)


@pytest.mark.parametrize(("code", "kind"), [(0, "finished"), (66, "stopped"), (1, "died"), (130, "interrupted")])
def test_a_recorded_exit_code_decides(tmp_path: Path, code: int, kind: str) -> None:
    write_log(tmp_path / "training_log.jsonl", 10)
    (tmp_path / "run.json").write_text(json.dumps({"exit_code": code}))
    assert run_of(tmp_path).state().kind == kind


def test_a_bad_step_that_the_guard_skipped_is_no_death(tmp_path: Path) -> None:
    write_log(tmp_path / "training_log.jsonl", 10)
    with (tmp_path / "training_log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10, "loss": math.nan, "verdict": "nonfinite", "action": "skip"}) + "\n")
    state = state_of(run_of(tmp_path).series, Signs(exit_code=0))
    assert (state.kind, state.since) == ("finished", 10)


def test_a_held_lock_means_running_and_looking_never_takes_it(tmp_path: Path) -> None:
    write_log(tmp_path / "training_log.jsonl", 10)
    lock = tmp_path / ".lock"
    lock.write_text(f"process 1 on {socket.gethostname()}\n")
    os.utime(tmp_path / "training_log.jsonl", (time.time() - 3600,) * 2)
    assert signs_of(tmp_path).open is False
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert signs_of(tmp_path).open is True
        assert run_of(tmp_path).state().kind == "running"
    lock.write_text("process 1 on another-machine\n")
    assert signs_of(tmp_path).open is None


def test_a_run_that_still_loads_its_model_is_not_called_killed(tmp_path: Path) -> None:
    """`nanproof run` claims the folder and lets go of its lock until the guard's first step, which may be far away."""
    (tmp_path / "run.json").write_text(json.dumps({"state": "running", "exit_code": None}))
    lock = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        lock.write_text(f"process {owner.pid} on {socket.gethostname()}\n")
        assert str(run_of(tmp_path).state()) == "running: no values yet"
        os.utime(lock, (time.time() - 1e6,) * 2)  # written before that process began: its number was given out again
        assert run_of(tmp_path).state().kind == "interrupted"
        owner.communicate(b"\n")
    os.utime(lock)
    assert run_of(tmp_path).state().kind == "interrupted"


def test_a_process_that_has_the_log_open_for_writing_is_seen(tmp_path: Path) -> None:
    log = tmp_path / "train.jsonl"
    write_log(log, 10)
    os.utime(log, (time.time() - 3600,) * 2)
    code = "import sys, time; f = open(sys.argv[1], sys.argv[2]); print(flush=True); time.sleep(600)"
    for mode, seen in (("a", True), ("r", None)):
        child = subprocess.Popen([sys.executable, "-c", code, str(log), mode], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        try:
            assert signs_of(log).open is seen
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate(timeout=600)


@given(
    losses=st.lists(st.sampled_from([1.0, math.nan, math.inf]), min_size=1, max_size=30),
    signs=st.builds(
        Signs,
        open=st.sampled_from([True, False, None]),
        quiet=st.sampled_from([None, 0.0, 1e6]),
        exit_code=st.sampled_from([None, 0, 1, 66, 130]),
    ),
)
def test_a_loss_that_ends_non_finite_is_never_called_healthy(losses: list[float], signs: Signs) -> None:
    log = Collector(source="", format="")
    log.records([{"step": i, "loss": v} for i, v in enumerate(losses)])
    state = state_of(log.series(), signs)
    assert (state.kind == "died") or math.isfinite(losses[-1])
    assert state.healthy <= math.isfinite(losses[-1])
    assert str(state)


def test_what_a_run_printed_is_no_run_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "training_log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    lines = "".join(f"step {s} loss {2 - s / 50}\n" for s in range(30))
    told = "nanproof: guarding AdamW (2 tensors, 9 parameters) of Linear; records in {}\n"
    (tmp_path / "nohup.out").write_text(told.format("runs/a") + lines)
    (tmp_path / "other.out").write_text(told.format("runs/gone") + lines)
    assert sorted(place.name for place in runs_below(tmp_path)) == ["other.out", "runs/a"]


def test_the_last_words_of_a_log_count_at_once(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {s} loss {3 - s / 10}\n" for s in range(20)))
    assert run_of(log).state().kind == "running"  # written a moment ago
    with log.open("a") as file:
        file.write('Traceback (most recent call last):\n  File "a.py", line 1, in f\nRuntimeError: no\n')
    assert str(run_of(log).state()) == "died at step 19: RuntimeError: no"


def test_the_exception_that_ended_a_guarded_run_is_its_cause(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": 3 - s / 10, "verdict": "ok", "action": "commit"} for s in range(20)]
    lines.append({"event": "exception", "message": "torch.OutOfMemoryError: no memory", "where": "train.py:3"})
    (tmp_path / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text(json.dumps({"exit_code": 1, "state": "failed"}))
    run = run_of(tmp_path)
    assert str(run.state()) == "died at step 19: torch.OutOfMemoryError: no memory"
    (event,) = [e for e in run.series.events if e.kind == "exception"]
    assert event.details["where"] == "train.py:3"
    assert not run.state().own_error


def test_an_error_of_the_script_is_no_numerical_cause(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {s} loss {3 - s / 10} lr 0.5\n" for s in range(20)))
    with log.open("a") as file:
        file.write('Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 17\n')
    state = run_of(log).state()
    assert state.own_error
    assert why(log, state, []) == Why(cause=OWN_ERROR)


def test_a_run_that_begins_in_an_empty_folder_is_itself_and_not_the_folder(tmp_path: Path) -> None:
    finder = Finder([str(tmp_path)])
    assert (finder.runs, finder.waiting.startswith("no log yet in ")) == ([], True)
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"exit_code": 0, "state": "finished"}))
    for _ in range(2):  # its record comes first, its log later: one run
        finder._again = 0.0
        finder.more()
        write_log(run / "training_log.jsonl", 5)
    assert [(one.name, one.path) for one in finder.runs] == [("runs/a", run)]
    assert finder.waiting == ""


@pytest.mark.parametrize("first", [0, 1])
def test_a_bad_step_that_two_ranks_recorded_is_one_incident(tmp_path: Path, first: int) -> None:
    verdict = Verdict(kind="nonfinite", step=7, level="loss", rank=1)
    run = run_of(tmp_path)
    for rank in (first, 1 - first):
        incident = Incident(
            id=f"000007-r{rank}", step=7, time="", rank=rank, world_size=2, verdict=verdict, action=Action(kind="skip")
        )
        folder = tmp_path / "incidents" / incident.id
        folder.mkdir(parents=True)
        (folder / "incident.json").write_text(json.dumps(incident.to_json()))
        told = run.new_incidents()
    assert [i["id"] for i in run.incidents()] == ["r0i0"]
    assert told == (run.incidents() if first == 0 else [])  # what is known better is told again
    found = run.incident("r0i0")
    assert found is not None
    assert found["rank"] == 1

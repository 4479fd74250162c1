"""The command line as a person meets it."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from nanproof.cli.explain import _topics
from nanproof.cli.shell import _was_interrupted
from nanproof.text import _spelled

pytestmark = pytest.mark.slow


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanproof", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **env},
    )


def test_help_names_the_verbs_and_the_exit_codes() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "explain" in done.stdout
    assert "Exit codes: 0 clean, 1 findings, 2" in done.stdout


def test_version() -> None:
    assert run("--version").stdout == "nanproof 0.1.0\n"


def test_help_takes_well_under_300_ms_of_cpu() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run("--help")
    first = resource.getrusage(resource.RUSAGE_CHILDREN)
    run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = min(
        first.ru_utime + first.ru_stime - before.ru_utime - before.ru_stime,
        after.ru_utime + after.ru_stime - first.ru_utime - first.ru_stime,
    )
    assert spent < 0.3


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        (["explan"], "unknown command 'explan'", "did you mean nanproof explain?"),
        (["xyz"], "unknown command 'xyz'", "nanproof --help lists the commands"),
        (["explain", "--no-such-option"], "no such option", "nanproof explain"),
        (["--no-such-option"], "no such option", "nanproof --help"),
        (["report"], "missing argument 'RUN [RUN_B]'", "nanproof report runs/original"),
        (["watch", "a", "--port", "x"], "invalid value for '--port': 'x' is not a whole number", "nanproof watch"),
        (["watch", "--prot", "3"], "no such option '--prot'", "did you mean --port"),
        (["watch", "no such run"], "no such run does not exist", "give a run folder or a log"),
        (["explain", "fp17"], "fp17 is not a floating-point format", "use one of float64"),
    ],
)
def test_a_mistake_is_one_line_and_a_hint(arguments: list[str], words: str, hint: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {words}")
    assert second.startswith(f"  hint: {hint}")


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    done = here(tmp_path, "report", "log.jsonl", "-o", "no folder/a.html")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first == "error: no folder/a.html: No such file or directory"
    assert second == "  hint: create the folder first: mkdir -p 'no folder'"


def test_debug_shows_the_traceback() -> None:
    for done in (run("explain", "fp17", "--debug"), run("explain", "fp17", NANPROOF_DEBUG="1")):
        assert "Traceback" in done.stderr
        assert "UsageError" in done.stderr


def test_json_is_json_and_nothing_else() -> None:
    facts = json.loads(run("explain", "bf16", "--json").stdout)
    assert facts["format"] == "bfloat16"
    everything = json.loads(run("explain", "--json").stdout)
    assert len(everything["formats"]) == 10
    assert {"NP204", "NP701", "bad-data"} <= {t["name"] for t in everything["topics"]}


def test_explain_says_where_exp_overflows() -> None:
    assert "11.09" in run("explain", "fp16").stdout
    assert "88.7" in run("explain").stdout


FAULTY = "import torch\ndef f(x):\n    return torch.log(torch.sum(torch.exp(x), dim=1))\n"


@pytest.mark.parametrize(("source", "code", "said"), [("x = 1\n", 0, "nothing found"), (FAULTY, 1, "NP208")])
def test_a_verb_that_ends_at_once_still_says_everything_and_runs_what_waits_for_the_end(
    source: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(source)
    program = (
        "import atexit, sys; atexit.register(lambda: print('last words', file=sys.stderr))\n"
        f"sys.argv = {['nanproof', 'lint', str(tmp_path)]!r}\n"
        "from nanproof.cli import program; program()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code
    assert said in done.stdout
    assert done.stderr == "last words\n"


def test_output_that_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "nanproof", "lint", str(tmp_path)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode not in (0, 1)
    assert "No space left" in done.stderr


def here(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanproof", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def test_bare_nanproof_says_how_the_newest_run_stands_and_one_command_that_works(tmp_path: Path) -> None:
    nothing = here(tmp_path)
    assert nothing.returncode == 0
    assert len(nothing.stdout.splitlines()) == 3
    lines = [json.dumps({"step": s, "loss": 1.0 if s < 109 else float("nan")}) for s in range(300)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    told = here(tmp_path)
    assert len(told.stdout.splitlines()) <= 10
    assert "train.jsonl  died at step 109: loss is NaN since step 109" in told.stdout
    commands = [line.removeprefix("next: ") for line in told.stdout.splitlines() if line.startswith("next: ")]
    assert commands == ["nanproof diagnose ."]
    assert here(tmp_path, *commands[0].split()[1:]).returncode == 1
    data = json.loads(here(tmp_path, "--json").stdout)
    assert (data["kind"], data["next"]) == ("died", commands[0])


def test_plain_ascii_has_no_escapes_of_our_own_signs(tmp_path: Path) -> None:
    lines = [json.dumps({"step": s, "loss": 1.0 if s < 9 else float("nan")}) for s in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    for arguments in ((), ("watch", "train.jsonl"), ("diagnose", "."), ("scan", "train.jsonl")):
        command = [sys.executable, "-m", "nanproof", *arguments]
        env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False, env=env)
        assert "\\u" not in done.stdout + done.stderr, done.stdout
        assert "\\x1b" not in done.stdout


def test_every_page_of_explain_can_be_read_in_plain_ascii() -> None:
    left = {c for topic in _topics() for c in _spelled(topic.markdown()) if not c.isascii()}
    assert left == set()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_narrow_terminal_breaks_lines_between_words(tmp_path: Path, encoding: str) -> None:
    titles = here(tmp_path, "case").stdout
    assert max(map(len, titles.splitlines())) > 60  # in a pipe a line stays whole
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"PYTHONIOENCODING": encoding}
    with subprocess.Popen([sys.executable, "-m", "nanproof", "case"], stdout=slave, env=env) as process:
        assert process.wait(600) == 0
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    os.close(slave)
    assert max(map(len, shown.splitlines())) <= 60
    assert shown.split() == titles.split()


def test_bare_nanproof_keeps_runs_apart_and_shows_one_that_never_came_to_a_step(tmp_path: Path) -> None:
    def log(folder: Path, bad: int) -> None:
        folder.mkdir(parents=True)
        lines = [json.dumps({"step": s, "loss": 1.0 if s < bad else float("nan")}) for s in range(50)]
        (folder / "log.jsonl").write_text("\n".join(lines) + "\n")

    log(tmp_path / "runs" / "old", 99)
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "runs" / "old" / "model.safetensors")
    log(tmp_path / "runs" / "new", 20)
    for name, age in (("old", 200), ("new", 100)):
        os.utime(tmp_path / "runs" / name / "log.jsonl", (time.time() - age,) * 2)
    data = json.loads(here(tmp_path, "--json").stdout)
    assert (data["run"], data["next"]) == ("runs/new", "nanproof diagnose runs/new")
    assert "checkpoint" not in data  # the one there is belongs to another run
    assert data["cause"] != "not known"  # on a busy machine it may say that a second was not enough
    assert here(tmp_path, *data["next"].split()[1:]).returncode == 1
    (tmp_path / "train.py").write_text("raise ValueError('no data')\n")
    assert here(tmp_path, "run", "--run-dir", "runs/failed", "train.py").returncode == 1
    data = json.loads(here(tmp_path, "--json").stdout)
    assert (data["run"], data["kind"]) == ("runs/failed", "died")
    assert "before its first step" in data["state"]
    assert data["next"] == "nanproof run --run-dir runs/failed train.py"


def test_what_follows_from_an_interrupt_is_an_interrupt() -> None:
    error = RuntimeError("half loaded")
    assert not _was_interrupted(error)
    error.__context__ = KeyboardInterrupt()
    assert _was_interrupted(error)

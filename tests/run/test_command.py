"""A whole command behind `nanproof run`: what it starts is guarded, or that is said."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from nanproof.cure.command import read_run
from nanproof.errors import UsageError
from nanproof.run.command import Command, read_typed, run_command
from nanproof.run.options import Options
from nanproof.run.program import Program
from run.launch import nanproof

pytestmark = pytest.mark.slow

TRAIN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for i in range(6):
    x = torch.randn(8, 4)
    if i == 3:
        x[2, 1] = float("nan")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
finite = all(p.isfinite().all().item() for p in model.parameters())
sys.stdout.write(f"finite {finite} {sys.argv[1:]}\\n")  # in one write: two ranks print at once
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_a_shell_script_that_trains_twice(folder: Path) -> None:
    (folder / "train.sh").write_text("#!/bin/bash\nset -e\npython train.py --one\npython -u train.py --two\nexit 7\n")
    done = nanproof("run", "--run-dir", "runs/a", "bash", "train.sh", check=False, cwd=folder)
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["finite True ['--one']", "finite True ['--two']"]
    last = done.stderr[done.stderr.index("2 started processes were guarded") :]
    assert "records in runs/a, runs/a/pid-" in last
    assert "next: nanproof diagnose runs/a\n" in last
    record = json.loads((folder / "runs/a/run.json").read_text())
    assert (record["attached"], record["exit_code"], len(record["processes"])) == (True, 7, 2)
    assert len(list((folder / "runs/a/incidents").iterdir())) == 1
    assert read_run(folder / "runs/a")[0].shown == "python train.py --one"


def test_the_traceback_of_a_started_process_is_its_own(folder: Path) -> None:
    """As when Ctrl-C comes while the guard is at work."""
    source = TRAIN.replace("x[2, 1] =", "optimizer.register_step_pre_hook(lambda *_: 1 / 0); x[2, 1] =")
    (folder / "train.py").write_text(source.replace('float("nan")', "1.0"))
    done = nanproof("run", "--run-dir", "a", "python", "-u", "train.py", check=False, cwd=folder)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert f"nanproof{os.sep}run{os.sep}" not in done.stderr


def test_torchrun_and_its_ranks(folder: Path) -> None:
    start = "import torch.distributed as d; d.init_process_group('gloo')\n"
    wrapped = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))"
    (folder / "train.py").write_text(start + TRAIN.replace("model = torch.nn.Linear(4, 1)", wrapped))
    done = nanproof(
        "run", "--run-dir", "runs/a", "torchrun", "--standalone", "--nproc-per-node", "2", "train.py", cwd=folder
    )
    assert done.stdout.count("finite True") == 2
    assert "2 started processes were guarded; records in runs/a\n" in done.stderr
    assert json.loads((folder / "runs/a/run.json").read_text())["attached"]


def test_a_guard_that_stops_a_started_process_is_heard_of(folder: Path) -> None:
    script = "python train.py || exit 1\n"
    (folder / "train.sh").write_text(script)
    done = nanproof("run", "--policy", "strict", "--run-dir", "a", "bash", "train.sh", check=False, cwd=folder)
    assert done.returncode == 66, done.stderr


def test_a_command_that_trains_nothing_is_said_to_be_unguarded(folder: Path) -> None:
    done = nanproof("run", "--run-dir", "a", "ls", cwd=folder)
    assert "train.py" in done.stdout
    assert "NOT GUARDED: the script: no process that the command has started took a step" in done.stderr
    required = nanproof("run", "--require", "--run-dir", "b", "ls", check=False, cwd=folder)
    assert required.returncode == 2


def test_what_is_python_is_run_as_python(folder: Path) -> None:
    assert read_typed("python", ("train.py", "--lr", "1")) == Program(target="train.py", arguments=("--lr", "1"))
    assert read_typed(sys.executable, ("-m", "a.b", "x")) == Program(target="a.b", arguments=("x",), is_module=True)
    assert read_typed("python", ("-u", "train.py")) == Command(words=("python", "-u", "train.py"))
    (folder / "train").write_text("#!/usr/bin/env python3\nprint(1)\n")
    assert read_typed("./train", ()) == Program(target="./train")
    assert read_typed("nope", ("a",)) == Program(target="nope", arguments=("a",))
    with pytest.raises(UsageError, match=r"no script nope.*nanproof run torchrun train\.py"):
        Program(target="nope").check()


def test_an_interpreter_of_another_environment_is_told_at_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = folder / "bin" / "python3"
    other.parent.mkdir()
    shutil.copy(shutil.which("true") or "/bin/true", other)
    command = read_typed(str(other), ("train.py",))
    assert isinstance(command, Command)
    outcome = run_command(command, Options(run_dir=folder / "a"))
    assert (outcome.exit_code, outcome.attached) == (0, False)
    assert "is of another environment than nanproof" in caplog.text
    with pytest.raises(UsageError, match=r"nothing would be guarded.*install nanproof in that environment"):
        run_command(command, Options(run_dir=folder / "b", require=True))


def test_a_script_that_cannot_be_started_says_how_it_can(folder: Path) -> None:
    (folder / "train.sh").write_text("#!/bin/bash\n")
    done = nanproof("run", "./train.sh", check=False, cwd=folder)
    assert done.returncode == 2
    assert "chmod +x ./train.sh, or bash ./train.sh" in done.stderr
    done = nanproof("run", "--nproc", "2", "bash", "train.sh", check=False, cwd=folder)
    assert "--nproc starts Python scripts, and bash is none" in done.stderr

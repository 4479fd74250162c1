"""The training command, and the same with changes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from nanproof.cure.command import read_command, read_run
from nanproof.errors import UsageError


def test_modules_interpreter_options_and_torchrun() -> None:
    module = read_command(["python", "-u", "-X", "dev", "-m", "pkg.train", "--lr", "1"])
    assert (module.is_module, module.target, module.arguments, module.name) == (True, "pkg.train", ("--lr", "1"), "pkg")
    ranks = read_command(["torchrun", "--standalone", "--nproc_per_node", "2", "train.py", "a=1"])
    assert (ranks.processes, ranks.target, ranks.arguments) == (2, "train.py", ("a=1",))
    assert read_command(["train.py"]).python == sys.executable


def test_flags_go_before_words_and_replace_what_is_there() -> None:
    command = read_command(["python", "train.py", "--lr=0.1", "optim.eps=1e-8"])
    changed = command.with_flag("--lr", "0.05").with_flag("--seed", "1").with_word("optim.eps", "1e-6")
    assert changed.arguments == ("--lr=0.05", "--seed", "1", "optim.eps=1e-6")
    assert command.with_flag("--seed", "1").without_flag("--lr").arguments == ("--seed", "1", "optim.eps=1e-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command to cure"),
        (["bash", "train.sh"], "'bash' is not a Python program"),
        (["python"], "names no program"),
        (["python", "-c", "pass"], "given as text"),
        (["torchrun", "--nproc_per_node=auto", "train.py"], "how many is that"),
    ],
)
def test_what_is_no_program_is_refused_with_an_example(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_command(words)


def test_a_recorded_run_knows_its_command(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "nanproof",
        "run",
        "--policy",
        "strict",
        "--run-dir=r",
        "-m",
        "pkg.train",
        "--lr",
        "1",
    ]
    (tmp_path / "run.json").write_text(json.dumps({"command": words}))
    command, _ = read_run(tmp_path)
    assert command.shown == "python -m pkg.train --lr 1"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"has no run\.json"):
        read_run(tmp_path / "empty")
    with pytest.raises(UsageError, match=r"there is no run .*nothing"):
        read_run(tmp_path / "nothing")


def test_the_last_run_is_the_newest_one(tmp_path: Path) -> None:
    for seconds, name in ((200, "a"), (100, "b")):
        (tmp_path / name).mkdir()
        record = tmp_path / name / "run.json"
        record.write_text(json.dumps({"command": ["python", f"{name}.py"]}))
        os.utime(record, (seconds, seconds))
    assert read_run(tmp_path / "last")[0].shown == "python a.py"
    (tmp_path / "last").symlink_to("b")
    assert read_run(tmp_path / "last")[0].shown == "python b.py"

"""A dying program, cured: killed half-way, continued, applied and undone."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import argparse
import os

import torch
import yaml
from torch import nn

config = yaml.safe_load(open("config.yaml"))
torch.manual_seed(config["seed"])
torch.set_num_threads(1)
open("trained.txt", "a").write("here\\n")  # a program that writes where it stands
truth = torch.randn(8, 1, generator=torch.Generator().manual_seed(7))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=config["optimizer"]["lr"])
source = torch.Generator().manual_seed(config["seed"])
for step in range(config["max_steps"]):
    x = torch.randn(64, 8, generator=source)
    loss = nn.functional.mse_loss(model(x), x @ truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(9))
    left = (model(x) - x @ truth).square().sum() / (x @ truth).square().sum()
print(f"explained variance {1 - left.item():.3f} (chance 0.0, target 0.9)")
"""
CONFIG = "seed: 0\nmax_steps: 400\noptimizer:\n  lr: 2.0  # much too long a step\n"


def cure(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanproof", "cure", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800, **options)


def alive(pids: list[int]) -> list[int]:
    return [
        p for p in pids if Path(f"/proc/{p}").exists() and "Z" not in Path(f"/proc/{p}/stat").read_text().split()[2]
    ]


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(PROGRAM)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "trained.txt").write_text("mine\n")
    return folder


@pytest.fixture(scope="module")
def outcome(project: Path) -> dict[str, Any]:
    """The answer of a search that was interrupted, started again, killed, and started again."""
    words = [sys.executable, "-m", "nanproof", "cure", "--jobs", "2", "--out", "cured", "--", "python", "train.py"]
    trials = project / "cured" / "trials"
    with subprocess.Popen(
        words,
        cwd=project,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored where tests run behind &
    ) as first:
        while not list(trials.glob("*")):
            assert first.poll() is None
            time.sleep(0.05)
        started = descendants(first.pid)
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=600)
    assert first.returncode == 130
    assert said.endswith("error: interrupted\n  hint: the same command goes on from the trials that have ended\n")
    assert alive(started) == []
    first = subprocess.Popen(words, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(trials.glob("*/trial.json"))) < 3:
        assert first.poll() is None
        time.sleep(0.05)
    started = descendants(first.pid)
    first.send_signal(signal.SIGKILL)
    first.wait()
    until = time.monotonic() + 600
    while alive(started) and time.monotonic() < until:
        time.sleep(0.1)
    assert alive(started) == []
    before = {p: p.stat().st_mtime_ns for p in trials.glob("*/trial.json")}
    ended = cure(project, "--jobs", "2", "--out", "cured", "--json", "--", "python", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert {p: p.stat().st_mtime_ns for p in before} == before  # what had ended was not run again
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_the_answer_is_the_smallest_change_that_learns_on_three_seeds(outcome: dict[str, Any]) -> None:
    assert outcome["answer"] == "cured"
    schema = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "cure.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(outcome)
    lines = {line["change"]["name"]: line for line in outcome["lines"]}
    assert lines["original"]["standing"] == "died"
    winner = lines[outcome["winner"]]
    assert [m["value"] > 0.9 for m in winner["metrics"]] == [True] * 3
    cured = [line for line in outcome["lines"] if line["standing"] == "cured"]
    proved = [line for line in cured if len(line["metrics"]) == 3]
    assert winner["change"]["size"] == min(line["change"]["size"] for line in proved)
    assert outcome["died_at"] == lines["original"]["died_at"] > 1


def test_the_users_files_are_untouched(project: Path, outcome: dict[str, Any]) -> None:
    assert (project / "config.yaml").read_text() == CONFIG
    assert (project / "trained.txt").read_text() == "mine\n"
    names = {p.name for p in project.iterdir()}
    assert names <= {"train.py", "config.yaml", "trained.txt", "cured", "config_cured.yaml"}


def test_the_page_has_every_curve(project: Path, outcome: dict[str, Any]) -> None:
    page = Path(outcome["report"]).read_text()
    for line in outcome["lines"]:
        assert f'"{line["change"]["name"]} ({line["standing"]})"' in page
    assert json.loads((project / "cured" / "cure.json").read_text())["answer"] == "cured"


def test_what_is_printed_works_as_it_stands(project: Path, outcome: dict[str, Any]) -> None:
    """The change is made by the command that was printed, the command for the cured run learns, and undo reverts it."""
    said = cure(project, "--jobs", "2", "--out", "cured", "--", "python", "train.py").stdout
    printed = dict(re.findall(r"^(make it|run it): (.*)$", said, re.M))
    shown = f"cured by {outcome['winner']}: explained variance"
    assert shown in said
    if "make it" in printed:
        words = shlex.split(printed["make it"])
        assert words[:3] == ["nanproof", "cure", "--apply"]
        done = cure(project, *words[2:])
        assert "to revert it: nanproof cure --undo" in done.stdout
        assert (project / "config.yaml").read_text() != CONFIG
    words = shlex.split(printed["run it"])
    words = [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", *words]
    ran = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=600, check=True)
    (project / "trained.txt").write_text("mine\n")
    assert float(re.findall(r"explained variance ([\d.-]+)", ran.stdout)[0]) > 0.9
    if "make it" in printed:
        assert cure(project, "--undo").returncode == 0
    assert (project / "config.yaml").read_text() == CONFIG


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "soon", "--", "python", "train.py"], "--budget soon is not a duration"),
        (["--", "python", "missing.py"], "no such program: missing.py"),
        (["--", "bash", "x.sh"], "'bash' is not a Python program"),
        ([], "no command to cure"),
        (["."], "has no run.json"),
    ],
)
def test_wrong_words_get_one_sentence_and_the_next_step(project: Path, words: list[str], said: str) -> None:
    ended = cure(project, *words)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "hint:" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_program_that_does_not_train_says_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('no data here')\n")
    ended = cure(tmp_path, "--", "python", "train.py", env={**os.environ})
    assert ended.returncode == 2
    assert "made no training step: no data here" in ended.stderr

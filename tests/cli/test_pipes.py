"""A project with named pipes in it: every verb ends, for nothing but regular files is opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PIPES = """
pipe.py pipe.yaml pipe.ipynb pipe.json pipe.toml pipe.log pipe.jsonl pipe.csv pipe.pt pipe.safetensors pipe.txt pipe.png
.gitignore pyproject.toml requirements.txt config.json trainer_state.json training_args.bin ds_config.json train.log
conf/base.yaml src/a.py src/.gitignore runs/a/log.jsonl runs/a/run.json runs/a/.lock runs/a/incidents/1/incident.json
events.out.tfevents.1.x run.wandb wandb-summary.json metrics.csv slurm-1.out run.sh environment.yml plan.yml
.nanproof-baseline.json .nanproof/cache.json .git/config .git/HEAD
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in PIPES.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / "train.py").write_text("import torch\n\nopt = torch.optim.AdamW([torch.ones(2)], lr=1e-3, eps=1e-12)\n")
    (tmp_path / "conf" / "config.yaml").write_text("lr: 1e-3\nprecision: fp16\n")
    return tmp_path


VERBS = [
    "",
    "lint",
    "lint --fix",
    "lint --undo",
    "lint pipe.py pipe.yaml pipe.ipynb",
    "lint --baseline pipe.json",
    "diagnose .",
    "diagnose pipe.log",
    "diagnose . --data .",
    "scan .",
    "harden conf/config.yaml --diff",
    "harden pipe.yaml --diff",
    "watch --once .",
    "watch --once pipe.log",
    "report .",
    "report runs/a",
    "locate runs/a",
    "rollout --init",
    "rollout plan.yml",
    "cure runs/a",
]


@pytest.mark.parametrize("words", VERBS)
def test_pipes_hold_nothing_up(project: Path, words: str) -> None:
    command = [sys.executable, "-m", "nanproof", *words.split()]
    run = subprocess.run(command, cwd=project, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert run.returncode in (0, 1, 2), run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("words", ["lint --undo", "lint --fix"])
def test_a_pipe_in_the_journal_is_named(project: Path, words: str) -> None:
    (project / ".nanproof" / "journal" / "0001").mkdir(parents=True)
    os.mkfifo(project / ".nanproof" / "journal" / "0001" / "entry.json")
    command = [sys.executable, "-m", "nanproof", *words.split()]
    run = subprocess.run(command, cwd=project, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2
    assert "0001 is not a journal entry" in run.stderr


def test_a_pipe_is_no_log(project: Path) -> None:
    command = [sys.executable, "-m", "nanproof", "diagnose", "pipe.log"]
    run = subprocess.run(command, cwd=project, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2
    assert run.stderr.startswith("error: pipe.log is not a file\n  hint: ")

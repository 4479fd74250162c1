"""Trials as tasks of a Ray cluster: a real one on this machine, where Ray is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]

SCRIPT = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3.0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--max-steps", type=int, default=200)
args = parser.parse_args()
torch.manual_seed(args.seed)
truth = torch.randn(8, 1, generator=torch.Generator().manual_seed(7))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for _ in range(args.max_steps):
    x = torch.randn(64, 8)
    loss = (model(x) - x @ truth).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
x = torch.randn(500, 8)
left = ((model(x) - x @ truth).square().mean() / (x @ truth).square().mean()).item()
print(f"explained variance {1 - left:.3f} (chance 0.0, target 0.9)")
"""


def test_a_program_is_cured_by_trials_on_ray(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["cure", "--quiet", "--budget", "14m", "--jobs", "2", "--ray", "local", "--out", "cure"]
    done = subprocess.run(
        [sys.executable, "-m", "nanproof", *words, "--", "python", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"RAY_worker_niceness": "0"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "cure" / "cure.json").read_text())
    assert found["answer"] == "cured"
    assert len(found["seeds"]) == 3
    assert len(list((tmp_path / "cure" / "trials").glob("*/trial.json"))) == found["trials"]


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "nanproof", "cure", "--ray", "nowhere.invalid", "--", "python", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "no Ray cluster at nowhere.invalid" in done.stderr

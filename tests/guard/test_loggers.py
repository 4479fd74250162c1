"""The guard writes into the loggers that people use: the real ones, read back."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from nanproof import Guard
from nanproof.errors import UsageError
from nanproof.guard import Records
from nanproof.logs import read

pytestmark = pytest.mark.slow


def train(loggers: list[Any], bad: int = 4, steps: int = 8) -> Guard:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    guard = Guard(model, torch.optim.AdamW(model.parameters()), records=Records(loggers=loggers))
    batches = [torch.randn(4, 3) for _ in range(steps)]
    batches[bad - 1][0, 0] = math.nan
    for x in guard.batches(batches):
        guard.step(lambda x=x: model(x).square().mean())
    return guard


def test_a_function_hears_every_step() -> None:
    heard: dict[int, dict[str, float]] = {}
    train([lambda step, values: heard.__setitem__(step, dict(values))])
    assert list(heard) == list(range(1, 9))
    assert math.isnan(heard[4]["nanproof/loss"])
    assert [s for s, v in heard.items() if v["nanproof/skipped"]] == [4]
    assert all(math.isfinite(v["nanproof/grad_norm"]) for s, v in heard.items() if s != 4)


def test_tensorboard(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        train([writer])
    series = read(tmp_path)
    losses = series.columns["nanproof/loss"]
    assert losses.steps.tolist() == list(range(1, 9))
    assert losses.steps[losses.bad].tolist() == [4]


@pytest.mark.filterwarnings("ignore")  # of MLflow about what it uses itself
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow  # here: a worker that runs other tests need not load it

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/m.db")
    with mlflow.start_run():
        train([mlflow])
    losses = read(tmp_path / "m.db").columns["nanproof/loss"]
    assert losses.steps.tolist() == list(range(1, 9))
    assert losses.steps[losses.bad].tolist() == [4]
    assert next(tmp_path.rglob("incident-4.txt")).read_text().startswith("step 4: nonfinite")


WANDB = """
import runpy, sys, wandb
run = wandb.init(project="p", mode="offline", dir=sys.argv[2])
runpy.run_path(sys.argv[1])["train"]([run])
run.finish()
"""


def test_wandb(tmp_path: Path) -> None:
    # in a process of its own: it starts a service that does not end with a test
    subprocess.run([sys.executable, "-c", WANDB, __file__, str(tmp_path)], check=True, capture_output=True, timeout=600)
    series = read(next(tmp_path.glob("wandb/offline-run-*/run-*.wandb")))
    losses, skipped = series.columns["nanproof/loss"], series.columns["nanproof/skipped"]
    assert losses.bad.tolist() == [s == 4 for s in range(1, 9)]
    assert skipped.values.tolist() == [float(s == 4) for s in range(1, 9)]


class Broken:
    def log(self, values: dict[str, float], step: int) -> None:
        raise ConnectionError("no network")


def test_a_logger_that_fails_is_left_out_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []
    with caplog.at_level(logging.ERROR, "nanproof"):
        guard = train([Broken(), lambda step, values: heard.append(step)])
    assert heard == list(range(1, 9))
    assert guard.tally.updates == 7
    assert [r.getMessage() for r in caplog.records if "left out" in r.getMessage()] == [
        "nanproof: Broken failed and is left out: no network"
    ]


def test_what_is_no_logger_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="loggers holds a int"):
        Guard(model, torch.optim.SGD(model.parameters()), records=Records(loggers=[3]))

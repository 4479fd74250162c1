"""Whatever the format of a log: with one loss replaced by NaN it is never called healthy, and without one it is."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from diagnosing.folders import Folder
from nanproof.diagnosing import diagnose

Row = dict[str, float]


def rows(bad: int | None, column: str) -> list[Row]:
    made = [
        {"step": float(i), "loss": 3 - i / 20, "grad_norm": 1 + (i % 5) / 10, "val_loss": 3.1 - i / 20, "lr": 1e-4}
        for i in range(1, 41)
    ]
    if bad is not None:
        made[bad][column] = math.nan
    return made


def text(folder: Path, made: list[Row]) -> None:
    folder.joinpath("train.log").write_text(
        "".join(f"step {r['step']:.0f} loss {r['loss']:.4f} grad_norm {r['grad_norm']:.3f} "
                f"val_loss {r['val_loss']:.4f} lr {r['lr']}\n" for r in made)
    )  # fmt: skip


def trainer(folder: Path, made: list[Row]) -> None:
    """What transformers prints, and what it saves."""
    folder.joinpath("train.log").write_text("".join(f"{r}\n" for r in made))


def trainer_state(folder: Path, made: list[Row]) -> None:
    history = [{**r, "step": int(r["step"]), "learning_rate": r["lr"]} for r in made]
    folder.joinpath("trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": 40}))


def lines(folder: Path, made: list[Row]) -> None:
    folder.joinpath("metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in made))


def sheet(folder: Path, made: list[Row]) -> None:
    table = [",".join(made[0]), *(",".join(f"{v:g}" for v in r.values()) for r in made)]
    folder.joinpath("metrics.csv").write_text("\n".join(table) + "\n")


def events(folder: Path, made: list[Row]) -> None:
    told = [f"{r['step']:.0f} {k} {v}" for r in made for k, v in r.items() if k != "step"]
    Folder(name="", accept=(), files={"events.out.tfevents.1.host": "\n".join(told)}).write(folder)


def notebook(folder: Path, made: list[Row]) -> None:
    told = "\n".join(f"step {r['step']:.0f} loss {r['loss']} val_loss {r['val_loss']}" for r in made)
    Folder(name="", accept=(), files={"train.ipynb": f"In:\ntrain()\nOut:\n{told}"}).write(folder)


def mlflow(folder: Path, made: list[Row]) -> None:
    place = folder / "mlruns" / "0" / "4f1c2b" / "metrics"
    place.mkdir(parents=True)
    place.parent.joinpath("meta.yaml").write_text("run_id: 4f1c2b\nstatus: 3\n")
    for name in ("loss", "val_loss"):
        place.joinpath(name).write_text("".join(f"{r['step']:.0f} {r[name]} {r['step']:.0f}\n" for r in made))


def trackio(folder: Path, made: list[Row]) -> None:
    with sqlite3.connect(folder / "project.db") as base:
        base.execute("CREATE TABLE metrics (id INTEGER, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)")
        for i, r in enumerate(made):
            told = json.dumps({k: "NaN" if v != v else v for k, v in r.items() if k != "step"})
            base.execute("INSERT INTO metrics VALUES (?, ?, 'a', ?, ?)", (i, f"2026-01-01T00:00:{i:02d}", i, told))


WRITERS = (text, trainer, trainer_state, lines, sheet, events, notebook, mlflow, trackio)


@pytest.mark.parametrize("write", WRITERS)
def test_a_healthy_log_in_each_format(write: Callable[[Path, list[Row]], None], tmp_path: Path) -> None:
    write(tmp_path, rows(None, ""))
    assert diagnose(tmp_path).verdict == "healthy"


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("bad", "column"), [(0, "loss"), (17, "loss"), (39, "loss"), (17, "val_loss")])
def test_one_nan(write: Callable[[Path, list[Row]], None], bad: int, column: str, tmp_path: Path) -> None:
    write(tmp_path, rows(bad, column))
    assert diagnose(tmp_path).verdict == "broken"


@pytest.mark.parametrize("write", [text, trainer, trainer_state, lines, sheet, events])
def test_one_nan_gradient(write: Callable[[Path, list[Row]], None], tmp_path: Path) -> None:
    """Only a loss scale explains one that is left out; nothing says that there is one."""
    write(tmp_path, rows(17, "grad_norm"))
    assert diagnose(tmp_path).verdict != "healthy"

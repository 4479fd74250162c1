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
        "".join(
            f"step {r['step']:.0f} loss {r['loss']:.4f} grad_norm {r['grad_norm']:.3f} "
            f"val_loss {r['val_loss']:.4f} lr {r['lr']}\n"
            for r in made
        )
    )


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


def resumed(after: Callable[[int], float]) -> str:
    """Forty finite epochs of a loss that falls, resumed after the thirtieth; ``after`` gives the rates from there."""
    told = [f"epoch {i} loss {3 / i + 0.2:.4f} lr {0.1 * (1 - i / 100):.5f}" for i in range(1, 31)]
    told += ["Resuming from checkpoint last.pt"]
    return "\n".join([*told, *(f"epoch {i} loss {3 / i + 0.2:.4f} lr {after(i):.5f}" for i in range(31, 41))]) + "\n"


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        (lambda i: 0.1 * (1 - i / 100), ""),
        (lambda i: 0.07, "scheduler-state-on-resume"),
        (lambda i: 0.01 * (i - 30), "scheduler-state-on-resume"),
        (lambda i: 0.1 * (1 - (i - 30) / 100), "scheduler-state-on-resume"),
    ],
    ids=["goes on", "stands still", "warms up again", "starts again"],
)
def test_a_schedule_that_loses_its_place_is_not_healthy(
    after: Callable[[int], float], cause: str, tmp_path: Path
) -> None:
    tmp_path.joinpath("train.log").write_text(resumed(after))
    found = diagnose(tmp_path)
    assert (found.verdict == "healthy") == (not cause)
    assert not cause or found.causes[0].name == cause


def test_a_log_that_goes_on_where_another_ends_at_another_rate(tmp_path: Path) -> None:
    old = "".join(f"step {i} loss {3 - i / 500:.4f} lr 0.006\n" for i in range(0, 1000, 20))
    new = "".join(f"step {i} loss {1 - i / 9000:.4f} lr 0.045\n" for i in range(1000, 2000, 20))
    tmp_path.joinpath("a.log").write_text(old)
    tmp_path.joinpath("b.log").write_text("=> loaded checkpoint 'last.pth.tar' (step 999)\n" + new)
    assert diagnose(tmp_path).causes[0].name == "scheduler-state-on-resume"


@pytest.mark.parametrize("tail", [(0.61, 0.7, 0.8, 0.95, 1.1), ()])
def test_a_loss_that_climbs_at_its_end(tail: tuple[float, ...], tmp_path: Path) -> None:
    losses = [*(3 - i / 20 for i in range(48)), *tail]
    tmp_path.joinpath("train.log").write_text("".join(f"step {i} loss {v:.4f}\n" for i, v in enumerate(losses, 1)))
    assert (diagnose(tmp_path).verdict == "healthy") == (not tail)


@pytest.mark.parametrize("depth", [0.4, 0.95])
def test_a_stretch_of_other_data(depth: float, tmp_path: Path) -> None:
    losses = [(3 - i / 200) * (depth if 40 <= i < 50 else 1) for i in range(90)]
    tmp_path.joinpath("train.log").write_text("".join(f"step {i} loss {v:.4f}\n" for i, v in enumerate(losses, 1)))
    found = diagnose(tmp_path)
    assert (found.verdict == "healthy") == (depth > 0.9)
    assert (found.causes[0].name == "data-distribution-spike") == (depth < 0.9)


def test_one_good_log_among_others_clears_nothing(tmp_path: Path) -> None:
    text(tmp_path, rows(None, ""))
    grown = "".join(f"step {i} loss {3 - i / 20:.3f} grad_norm {max(1.0, 1.2 ** (i - 20)):.3f}\n" for i in range(1, 41))
    assert diagnose(tmp_path).verdict == "healthy"
    tmp_path.joinpath("other.log").write_text(grown)
    assert diagnose(tmp_path).verdict != "healthy"


@pytest.mark.parametrize("bad", [False, True])
def test_means_over_no_box_are_no_nan_of_the_run(bad: bool, tmp_path: Path) -> None:
    """What darknet prints for a layer without an object in the batch; its own loss tells."""
    told = []
    for i in range(1, 41):
        loss = "-nan" if bad and i > 30 else f"{9 - i / 10:.6f}"
        told += ["Region 94 Avg IOU: -nan, Class: -nan, Obj: -nan, No Obj: 0.5, .5R: -nan, .75R: -nan,  count: 0"]
        told += [f" {i}: {loss}, {loss} avg, 0.001000 rate, 4.1 seconds, {i * 64} images"]
    tmp_path.joinpath("train.log").write_text("\n".join(told) + "\n")
    assert diagnose(tmp_path).verdict == ("broken" if bad else "healthy")


TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'
MEMORY = TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB.\n"
ERROR = TRACEBACK + "ValueError: another reason\n"


@pytest.mark.parametrize(
    ("end", "healthy"),
    [
        (MEMORY, True),
        (TRACEBACK + "KeyboardInterrupt\n", True),
        ("slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-03-02T15:00:11 DUE TO TIME LIMIT ***\n", True),
        (MEMORY + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n", True),
        (ERROR, False),
        (ERROR + MEMORY, False),
        (MEMORY + ERROR, False),
        ("Sending process 101 closing signal SIGTERM\n", False),
    ],
)
def test_how_a_healthy_run_ended(end: str, healthy: bool, tmp_path: Path) -> None:
    text(tmp_path, rows(None, ""))
    with tmp_path.joinpath("train.log").open("a") as log:
        log.write(end)
    diagnosis = diagnose(tmp_path)
    assert (diagnosis.verdict == "healthy") == healthy
    assert bool(diagnosis.ended) == (end is not ERROR and "closing" not in end)


@pytest.mark.parametrize("after", ["loss 2e4", "loss 0.0", "loss 1.0\nSIGSEGV"])
def test_skipped_steps_excuse_nothing_else(after: str, tmp_path: Path) -> None:
    """A scaler that leaves out bad steps is no reason to clear a run that later grows, turns to 0 or crashes."""
    told = ["fp16 training: loss_scale 65536"]
    told += [f"step {i} loss {4 - i / 20} grad_norm {'nan' if i in (9, 10) else 1.1}" for i in range(1, 41)]
    tmp_path.joinpath("train.log").write_text("\n".join(told) + "\n")
    assert diagnose(tmp_path, facts={"precision": "fp16"}).verdict == "healthy"
    told += [f"step {i} {after.replace('2e4', str(10.0 ** (i - 39)))} grad_norm 1.1" for i in range(41, 47)]
    tmp_path.joinpath("train.log").write_text("\n".join(told) + "\n")
    assert diagnose(tmp_path, facts={"precision": "fp16"}).verdict != "healthy"


def test_runs_beside_each_other_are_not_mixed(tmp_path: Path) -> None:
    for name, bad in (("lr-high", 17), ("lr-low", None)):
        tmp_path.joinpath(name).mkdir()
        text(tmp_path / name, rows(bad, "loss"))
    diagnosis = diagnose(tmp_path)
    assert diagnosis.verdict == "healthy"
    assert diagnosis.notes[0] == "1 other run was not diagnosed: lr-high"


def test_ranks_of_one_run_are_all_read(tmp_path: Path) -> None:
    for name, bad in (("rank0", 17), ("rank1", None)):
        tmp_path.joinpath(name).mkdir()
        text(tmp_path / name, rows(bad, "loss"))
    assert diagnose(tmp_path).verdict == "broken"


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv"])
@pytest.mark.parametrize("column", ["loss", "val_loss"])
def test_loggers_that_cannot_write_nan(name: str, column: str, tmp_path: Path) -> None:
    """JSON has no NaN and many writers make null of it; pandas leaves the cell of a CSV file empty."""
    made = [{k: None if k == column and r["step"] > 25 else v for k, v in r.items()} for r in rows(None, "loss")]
    if name.endswith("jsonl"):
        told = [json.dumps(r) for r in made]
    else:
        told = [",".join(made[0]), *(",".join("" if v is None else f"{v:g}" for v in r.values()) for r in made)]
    tmp_path.joinpath(name).write_text("\n".join(told) + "\n")
    diagnosis = diagnose(tmp_path)
    assert diagnosis.verdict != "healthy"
    assert f"{column} ends at step 25" in diagnosis.timeline[0].what


def test_a_sum_that_is_nan_beside_finite_parts(tmp_path: Path) -> None:
    told = [f"step {i}: cls_loss={3 - i / 20:.3f} reg_loss={2 - i / 40:.3f} total=#" for i in range(1, 41)]
    for total in ("1.5", "nan"):
        tmp_path.joinpath("train.log").write_text("\n".join(told).replace("#", total) + "\n")
        assert (diagnose(tmp_path).verdict == "healthy") == (total == "1.5")


def test_a_bar_whose_loss_is_nan_is_believed_beside_another_finite_loss(tmp_path: Path) -> None:
    """The loss in a bar and the one in a record may be different ones, and gradients of a NaN term can be finite."""
    told = []
    for i in range(1, 300):
        told.append(f"\rTraining:  {i // 3}%|##        | {i}/300 [00:10<00:20,  9.8it/s, loss=nan]")
        if i % 10 == 0:
            told.append(f"\nstep {i} kl_loss {3 - i / 200:.4f} grad_norm 0.9\n")
    tmp_path.joinpath("train.log").write_text("".join(told))
    assert diagnose(tmp_path).verdict == "broken"


@pytest.mark.parametrize("end", ["Segmentation fault (core dumped)", "Model diverged, exiting."])
def test_a_run_that_says_how_it_broke(end: str, tmp_path: Path) -> None:
    text(tmp_path, rows(None, "loss"))
    assert diagnose(tmp_path).verdict == "healthy"
    with tmp_path.joinpath("train.log").open("a") as log:
        log.write(f"{end}\n")
    assert diagnose(tmp_path).verdict != "healthy"


def test_fp16_does_not_make_a_healthy_run_doubtful(tmp_path: Path) -> None:
    parts = [f"step {i} box_loss {3 - i / 20:.3f} cls_loss {2 - i / 40:.3f}" for i in range(1, 41)]
    tmp_path.joinpath("train.log").write_text("\n".join(parts) + "\n")
    tmp_path.joinpath("config.yaml").write_text("train:\n  fp16: true\n  lr: 1.0e-4\n")
    assert diagnose(tmp_path).verdict == "healthy"

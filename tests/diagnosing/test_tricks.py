"""Logs of broken runs whose numbers look fine: none of them is called healthy, and what is like them and sound is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nanproof.diagnosing import diagnose
from nanproof.diagnosing.text import SCREEN, as_text

Line = Callable[[int], str]


def rows(line: Line, until: int = 60) -> str:
    return "".join(f"{line(i)}\n" for i in range(1, until))


def falls(i: int) -> float:
    return 0.2 + 3 * 0.97**i


NOTHING = ("", "-", "--", "—", "n/a", "N/A", "None", "null", "?????", "*******", "...", "not a number", "overflow")
LAYOUTS = {
    "equals": "step={i} loss={v}",
    "colon": "Epoch {i} loss: {v} acc: 0.{i:02d}",
    "commas": "step={i}, loss={v}, lr=0.1",
    "braces": "{{'loss': {v}, 'epoch': {i}}}",
    "bar": "Epoch 1: {i}%|### | {i}/60 [00:01<00:02, 3it/s, loss={v}]",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nothing", NOTHING)
def test_a_value_that_is_no_number(layout: str, nothing: str, tmp_path: Path) -> None:
    if layout == "bar" and nothing:
        pytest.skip("a bar formats numbers, or nothing")
    log = tmp_path / "train.log"

    def told(missing: range) -> str:
        return rows(lambda i: LAYOUTS[layout].format(i=i, v=nothing if i in missing else f"{falls(i):.4f}"))

    log.write_text(told(range(0)))
    assert diagnose(tmp_path).verdict == "healthy"
    for missing in (range(40, 60), range(31, 32)):
        log.write_text(told(missing))
        found = diagnose(tmp_path)
        assert found.verdict != "healthy"
        assert any("no readable value" in m.what for m in found.timeline), found.timeline


@pytest.mark.parametrize("word", [None, "", "NaN", "n/a", {"value": "NaN"}, [1.0, None]])
@pytest.mark.parametrize("name", ["metrics.jsonl", "history.json"])
def test_json_without_a_loss(name: str, word: object, tmp_path: Path) -> None:
    made = [{"step": i, "loss": falls(i) if i < 40 else word} for i in range(1, 60)]
    whole = json.dumps(made) if name == "history.json" else "".join(f"{json.dumps(r)}\n" for r in made)
    tmp_path.joinpath(name).write_text(whole)
    assert diagnose(tmp_path).verdict != "healthy"


@pytest.mark.parametrize("cell", ["", "n/a", "#NUM!", "∞", '"NaN"', "-"])
def test_cells_without_a_loss(cell: str, tmp_path: Path) -> None:
    made = rows(lambda i: f"{i},{cell if i >= 40 else falls(i)}")
    tmp_path.joinpath("metrics.csv").write_text(f"step,loss\n{made}")
    assert diagnose(tmp_path).verdict != "healthy"


def after(good: str, bad: str, since: int = 30) -> Line:
    return lambda i: (bad if i >= since else good).format(i=i, v=falls(i))


ILL: dict[str, str] = {
    "frozen": rows(lambda i: f"step {i} loss {max(1.523, 3 - i / 20):.4f}", 200),
    "gradients of 0": rows(lambda i: f"step {i} loss {1.1 + falls(i):.4f} grad_norm {0.9 if i < 40 else 0.0}", 90),
    "swings": rows(lambda i: f"step {i} loss {400.0 if i % 2 else 2.0}"),
    "bce below zero": rows(lambda i: f"epoch {i} bce_loss {1 - i / 5:.3f}", 50),
    "a metric that never was": rows(lambda i: f"epoch {i} loss {falls(i):.3f} val_acc nan"),
    "a validation that never was": rows(lambda i: f"step {i} loss {falls(i):.3f}" + "\nValidation: nan" * (i % 9 == 0)),
    "all steps skipped": rows(lambda i: f"step {i} loss {falls(i):.3f} skipped={i}"),
    "weights that grow": rows(lambda i: f"step {i} loss {falls(i):.3f} params_norm {10 * 1.5**i:.1f}"),
    "a rate that grows": rows(lambda i: f"step {i} loss {falls(i):.3f} lr {1e-4 * 1.3**i:.3e}"),
    "an evaluation that runs away": rows(lambda i: f"epoch {i} train_loss {falls(i):.4f} val_loss {2 * 1.3**i:.3f}"),
    "a reward that never moves": rows(lambda i: f"iter {i} loss {0.01 + i % 3 / 900:.4f} reward 0.00"),
    "a part of the gradients": rows(lambda i: f"iter {i} loss {falls(i):.4f} frac_nan {i}%"),
    "printed weights": rows(lambda i: f"iter {i} loss {falls(i):.4f}") + "fc.weight: min nan max nan mean nan\n",
    "cut within nan": rows(lambda i: f"step {i} loss {falls(i):.3f}") + "step 60 loss na",
    "cut within a traceback": rows(lambda i: f"step {i} loss {falls(i):.3f}")
    + 'Traceback (most recent call last):\n  File "a.py", li',
    "Spanish": rows(after("Época {i} pérdida: {v:.3f}", "Época {i} pérdida: nan")),
    "Russian": rows(after("Эпоха {i}: потери {v:.3f}", "Эпоха {i}: потери nan")),
    "German": rows(after("Epoche {i} Verlust: {v:.3f}", "Epoche {i} Verlust: unendlich")),
    "Chinese": rows(after("第{i}轮 损失 {v:.3f}", "第{i}轮 损失 非数")),
    "infinity": rows(after("epoch {i} loss {v:.3f}", "epoch {i} loss ∞")),
    "a scale below 1": "".join(
        f"Gradient overflow.  Skipping step, reducing loss scale to {2.0**-k}\n" for k in (16, 17)
    )
    + rows(lambda i: f"step {i} loss {falls(i):.3f}"),
}


@pytest.mark.parametrize("log", ILL.values(), ids=ILL)
def test_never_healthy(log: str, tmp_path: Path) -> None:
    tmp_path.joinpath("train.log").write_text(log)
    assert diagnose(tmp_path).verdict != "healthy"


def restarts(wait: Callable[[int], int]) -> str:
    return rows(lambda i: f"step {i} loss {falls(i):.4f} lr {0.1 * (1 - (i % wait(i)) / 50):.5f}", 120)


SOUND: dict[str, str] = {
    "restarts by plan": restarts(lambda i: 40),
    "a policy": rows(lambda i: f"iter {i} loss {i / 9e4:.5f} reward {i / 50:.3f}"),
    "a perplexity that overflows": "step 0 perplexity inf eval_loss 811.2\n"
    + rows(lambda i: f"step {i} loss {falls(i):.4f}"),
    "a running mean": "fp16 with GradScaler, loss_scale 65536\n"
    + rows(lambda i: f"step {i} loss {falls(i):.4f} (1.9) grad_norm 1.0 ({'nan' if i > 9 else '1.1'})"),
    "a window that fills": rows(lambda i: f"step {i} loss {falls(i):.4f} dead {'nan' if i < 6 else '0.01'}"),
    "converged to nothing": rows(lambda i: f"step {i} loss {max(0.0031, 3 * 0.5**i):.4f}"),
    "Spanish": rows(lambda i: f"Época {i}/100 — pérdida: {falls(i):.4f} — precisión: 0.{i:02d}"),
}


@pytest.mark.parametrize("log", SOUND.values(), ids=SOUND)
def test_what_is_like_them_and_sound(log: str, tmp_path: Path) -> None:
    tmp_path.joinpath("train.log").write_text(log)
    assert diagnose(tmp_path).verdict == "healthy"


def test_a_history_of_lists(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps({"loss": [falls(i) for i in range(30)], "lr": [0.1] * 30}, indent=1))
    assert diagnose(tmp_path).verdict == "healthy"
    path.write_text(json.dumps({"loss": [falls(i) for i in range(30)] + [float("nan")] * 3}))
    assert diagnose(tmp_path).verdict == "broken"


@pytest.mark.parametrize("jump", [1.0, 1.4])
def test_a_run_that_goes_on_in_another_folder(jump: float, tmp_path: Path) -> None:
    for name, span, scale in (("first", range(0, 1000, 20), 1.0), ("second", range(1000, 2000, 20), jump)):
        tmp_path.joinpath("runs", name).mkdir(parents=True)
        told = [f"step {i} loss {3 - i / 900:.4f} lr {1e-3 * scale * (1 - i / 4000):.3e}\n" for i in span]
        tmp_path.joinpath("runs", name, "train.log").write_text("".join(told))
    found = diagnose(tmp_path)
    assert (found.verdict == "healthy") == (jump == 1.0)
    assert jump == 1.0 or found.causes[0].name == "scheduler-state-on-resume"


def test_runs_of_a_copied_folder_are_ordered_by_name(tmp_path: Path) -> None:
    for name, value in (("version_10", "{v:.3f}"), ("version_9", "nan")):
        log = tmp_path / "lightning_logs" / name / "train.log"
        log.parent.mkdir(parents=True)
        log.write_text(rows(lambda i, value=value: f"step {i} loss {value.format(v=falls(i))}"))  # type: ignore[misc]
        os.utime(log, (1e9, 1e9))
    assert diagnose(tmp_path).verdict == "healthy"
    os.utime(log, (2e9, 2e9))
    assert diagnose(tmp_path).verdict == "broken"


def test_an_empty_split_is_named(tmp_path: Path) -> None:
    told = "The validation dataset has 0 rows\n" + rows(lambda i: f"epoch {i} train loss: {falls(i):.3f}", 20)
    tmp_path.joinpath("train.log").write_text(told + "epoch 19 validate loss: nan\n")
    assert diagnose(tmp_path).causes[0].name == "empty-target-mean"


def test_a_question_where_nothing_is_known(tmp_path: Path) -> None:
    tmp_path.joinpath("train.log").write_text(rows(lambda i: f"step {i} weird_loss_a {3 - i / 20:.3f}", 6))
    found = diagnose(tmp_path)
    assert (found.verdict, found.missing[0].asks) == ("unknown", "what did the loss do?")
    assert diagnose(tmp_path, facts={"ran": "nan"}).verdict == "broken"
    assert diagnose(tmp_path, facts={"ran": "fell"}).missing == ()


def test_a_page_fits_a_screen(tmp_path: Path) -> None:
    names = "\n".join(f"class A{i}:\n    lr = 0.{i}\n    fp16 = True\n" for i in range(9))
    tmp_path.joinpath("train.py").write_text(names)
    long = "/".join(["a_long_folder_name"] * 5)
    log = tmp_path / long / "train.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        rows(after("step {i} loss {v:.3f} cls_loss {v:.3f} ctc_loss {v:.3f}", "step {i} loss nan ctc_loss nan"))
    )
    found = diagnose(tmp_path)
    assert len(as_text(found).splitlines()) <= SCREEN < len(as_text(found, full=True).splitlines())
    assert all(
        len(line) <= 60 or len(line.split()) <= 2 or "nanproof" in line
        for line in as_text(found, width=60).splitlines()
    )

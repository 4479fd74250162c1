"""The forecast from a log alone: the same in every format, the same as the guard makes, told by watch and diagnose."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from nanproof import diagnose
from nanproof.diagnosing.text import as_text
from nanproof.forecast import Forecast
from nanproof.logs import read
from nanproof.logs.foresee import Outlook, foresee
from nanproof.watch.glance import glance
from nanproof.watch.occasions import occasions
from nanproof.watch.state import RunState

Row = dict[str, float]


def growing(steps: int, **others: float) -> list[Row]:
    """In float16, as the loss scale shows: an activation grows by 15 % per step from step 110 on."""
    return [
        {"step": s, "loss": 2.0, "loss_scale": 1024.0, "max_activation": 20 * 1.15 ** max(0, s - 110), **others}
        for s in range(steps)
    ]


def write(path: Path, rows: list[Row]) -> Path:
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            out = csv.DictWriter(file, list(rows[0]))
            out.writeheader()
            out.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_the_same_forecast_as_of_the_numbers_themselves(tmp_path: Path, suffix: str) -> None:
    rows = growing(150)
    forecast, direct = Forecast(), []
    for row in rows:
        values = {"loss": row["loss"], "scale": row["loss_scale"], "column/max_activation": row["max_activation"]}
        warning = forecast.read(int(row["step"]), values, {"column/max_activation": 65504.0})
        direct += [warning] if warning else []
    assert foresee(read(write(tmp_path / f"run.{suffix}", rows))).warnings == direct
    assert str(direct[0]).startswith("max_activation grows 1.15 × per step and reaches 65,504 in about 4")
    assert direct[0].step <= 130, "it reaches 65,504 at step 168"


def test_a_guards_own_log_keeps_its_names(tmp_path: Path) -> None:
    rows: list[Row] = [
        {k.replace("max_activation", "logits/blocks.0.attn"): v for k, v in row.items()} for row in growing(150)
    ]
    (first, *_) = foresee(read(write(tmp_path / "run.jsonl", rows))).warnings
    assert str(first).startswith("the largest attention logit of blocks.0.attn grows 1.15 ×")


def test_watch_and_its_alerts_tell_it_while_the_run_is_at_risk(tmp_path: Path) -> None:
    looks = []
    for steps in (100, 150):
        series, outlook = read(write(tmp_path / f"{steps}.csv", growing(steps))), Outlook()
        outlook.take(series)
        looks.append(glance("run", series, (), RunState(kind="running", step=steps), outlook))
    assert looks[0].warning == ""
    assert looks[1].warning.startswith("max_activation grows 1.15 × per step and reaches 65,504 in about")
    assert [*occasions(looks[0], looks[1])] == [("warning", f"likely to break soon: {looks[1].warning}")]
    assert [*occasions(looks[1], looks[1])] == [], "once"


def test_diagnose_tells_it(tmp_path: Path) -> None:
    log = write(tmp_path / "run.csv", growing(150))
    said = " ".join(as_text(diagnose(log)).split())
    assert "early warning: max_activation grows 1.15 × per step and reaches 65,504 in about" in said
    assert "run.csv: likely to break soon: max_activation grows" in said


@pytest.mark.parametrize(
    "name",
    [
        "act_max",
        "act/max/layer1",
        "max_act",
        "train/activations.std",
        "residual_norm",
        "resid_rms",
        "output_max/blocks.2",
        "features/rms",
        "amax/h.3",
        "attn_logits/max",
        "qk_logits_max",
        "debug/abs_max",
        "hidden_states_norm",
    ],
)
def test_statistics_of_activations_are_known_by_their_words(tmp_path: Path, name: str) -> None:
    rows = [{name if k == "max_activation" else k: v for k, v in row.items()} for row in growing(150)]
    (first, *_) = foresee(read(write(tmp_path / "run.csv", rows))).warnings
    assert str(first).startswith(f"{name} grows 1.15 ×")


@pytest.mark.parametrize(
    "name",
    [
        "activation_memory",
        "peak_activation_mb",
        "activation_sparsity",
        "actor_max",
        "output_tokens_max",
        "reward_max",
        "max_steps",
        "feature_loss",
        "gpu_max_mem",
        "param_norm",
        "val_cross_entropy",
    ],
)
def test_what_else_grows_is_no_activation(tmp_path: Path, name: str) -> None:
    rows = [{name if k == "max_activation" else k: v for k, v in row.items()} for row in growing(150)]
    assert foresee(read(write(tmp_path / "run.csv", rows))).warnings == []

"""RadioDiff in miniature: dies in its attention scores, hides it when advised, trains when healed."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanproof import Guard, diagnose, ops
from nanproof.cases.catalogue import find
from nanproof.cases.radiodiff import model, model_stable
from nanproof.cases.radiodiff.diffusion import AUTOCAST_DEFAULT
from nanproof.cases.radiodiff.maps import Maps, draw_maps
from nanproof.cases.radiodiff.train import FOLDER, make_model
from nanproof.cases.result import Result, read_result
from nanproof.cases.settings import load
from nanproof.files import read_jsonl

MODULE = "nanproof.cases.radiodiff.train"
CASE = find("radiodiff")
STEPS = str(CASE.within)


def run(words: list[str], expect: int = 0) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", *words], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def train(out: Path, *words: str) -> tuple[Result, list[dict[str, Any]]]:
    run([MODULE, "--out", str(out), *words])
    return read_result(out), list(read_jsonl(out / "training_log.jsonl"))


@pytest.fixture(scope="module")
def wreck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The original, unguarded, after its death."""
    out = tmp_path_factory.mktemp("radiodiff") / "original"
    train(out, "--steps", STEPS)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_original_dies_of_scores_too_large_for_float16(tmp_path: Path, seed: int) -> None:
    words = ["--seed", str(seed), "--steps", STEPS, "--out", str(tmp_path / "out")]
    run(["nanproof", "run", "--policy", "strict", "-m", "--run-dir", str(tmp_path / "run"), MODULE, *words], expect=66)
    (incident,) = (tmp_path / "run" / "incidents").iterdir()
    place = json.loads((incident / "incident.json").read_text())["location"]
    assert Path(place["file"]).parts[-2:] == ("radiodiff", "model.py")
    assert (place["function"], place["op"], place["mechanism"]) == ("score", "bmm", CASE.mechanism)
    assert "float16" in place["why"]
    if seed == 0:
        said = run(["nanproof", "locate", str(incident), "--step", CASE.step], expect=1)
        assert "verified: without this operation the step is finite" in said


@pytest.mark.slow
def test_the_original_ruins_every_parameter_and_its_checkpoints(wreck: Path) -> None:
    result = read_result(wreck)
    assert result.outcome == "died"
    assert result.value == 0.0
    last = torch.load(wreck / "checkpoints" / "step_000100.pt", weights_only=True)["model"]
    bad = [name for name, value in last.items() if not value.isfinite().all()]
    assert len(bad) == result.bad_parameters == len(last)
    said = run(["nanproof", "scan", str(wreck / "checkpoints")], expect=1)
    turn = re.search(r"last healthy: (step_\d+)\.pt +first bad: (step_\d+)\.pt", said)
    assert turn is not None, said
    assert turn[1] < turn[2]


@pytest.mark.slow
def test_the_wreck_is_diagnosed_from_its_folder(wreck: Path) -> None:
    found = diagnose(wreck)
    assert (found.causes[0].name, found.causes[0].confidence) == (CASE.cause, "strong")
    said = "\n".join(x.found for x in found.checklist if x.what == "precision")
    assert "amp: true reaches autocast at code/diffusion.py" in said
    assert "no GradScaler was found; bf16 of accelerate.yaml:7 is overridden there (NP701)" in said


@pytest.mark.slow
def test_a_milestone_brings_its_step_and_its_schedule(tmp_path: Path, wreck: Path) -> None:
    milestone = str(wreck / "checkpoints" / "step_000010.pt")
    words = ["--steps", "12", "--resume", milestone, "optimizer.lr=6e-3", "optimizer.min_lr=6e-4"]
    _, log = train(tmp_path / "rest", *words)
    before = {line["step"]: line["lr"] for line in read_jsonl(wreck / "training_log.jsonl")}
    assert {line["step"]: line["lr"] for line in log} == {step: before[step] for step in (11, 12)}
    checked = run(["nanproof", "diagnose", str(wreck), "--before-resume", milestone], expect=1)
    assert "healthy" in checked


@pytest.mark.slow
def test_the_guarded_original_keeps_its_weights_finite(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--steps", STEPS, "--out", str(out)]
    said = run(["nanproof", "run", "-m", "--run-dir", str(tmp_path / "run"), MODULE, *words])
    assert "rolled back" in said
    assert read_result(out).bad_parameters == 0
    first, *_ = read_jsonl(out / "training_log.jsonl")
    run(["nanproof", "scan", str(out / "checkpoints")])
    assert read_result(out).loss < first["loss"]


@pytest.mark.slow
def test_the_advice_hides_the_death_and_its_learning_rate_never_comes_into_force(tmp_path: Path) -> None:
    result, log = train(tmp_path / "out", "--config-name", "advised", "--steps", STEPS)
    assert all(math.isfinite(float(line["loss"])) for line in log)
    assert result.bad_parameters > 0
    assert result.outcome == "died"
    asked = load(FOLDER / "configs", "advised").optimizer.lr
    assert log[0]["lr"] > 4 * asked


@pytest.mark.slow
def test_the_stable_one_trains(tmp_path: Path) -> None:
    result, _ = train(tmp_path / "out", "--config-name", "stable")
    assert result.outcome == "trained", result
    assert result.largest_activation < 100


@pytest.mark.parametrize(("name", "dtype"), [("original", torch.float16), ("stable", torch.bfloat16)])
def test_the_inner_autocast_wins(name: str, dtype: torch.dtype) -> None:
    diffusion = make_model(load(FOLDER / "configs", name))
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16), diffusion.own_precision(torch.device("cpu")):
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    assert seen == [dtype]
    assert torch.float16 == AUTOCAST_DEFAULT


def test_scores_stay_in_range() -> None:
    """However far the projections have drifted."""
    q, k = (torch.full((1, 1, 4, 32), 1e4, dtype=torch.float16) for _ in range(2))
    assert not model.ConditionalAttention(32, 1).score(q, k).isfinite().any()
    healed = model_stable.ConditionalAttention(32, 1)
    with torch.no_grad():
        healed.log_gain.fill_(100.0)
        assert healed.score(q, k).abs().max() <= 10 * math.sqrt(32)


def test_three_levels_are_told_apart() -> None:
    """A bad input, a bad prediction and a bad component of the loss are named as such."""
    torch.manual_seed(0)
    diffusion = make_model(load(FOLDER / "configs", "stable"))
    guard = Guard(diffusion.denoiser, torch.optim.AdamW(diffusion.denoiser.parameters(), lr=1e-3))
    maps = draw_maps(2, torch.Generator().manual_seed(0))
    assert guard.step(lambda: diffusion(maps), batch=maps).ok
    poisoned = Maps(maps.known, maps.gain.clone().index_fill_(0, torch.tensor([1]), math.nan))
    assert guard.step(lambda: diffusion(poisoned), batch=poisoned).level == "input"

    def predict() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        losses = diffusion(maps)
        return {name: loss * math.nan for name, loss in losses.items()}, torch.tensor([math.nan])

    assert guard.step(predict, batch=maps).level == "prediction"

    def divide() -> dict[str, torch.Tensor]:
        losses = diffusion(maps)
        return losses | {"loss_vlb": losses["loss_vlb"] / 0}

    verdict = guard.step(divide, batch=maps)
    assert (verdict.level, verdict.names) == ("loss", ("loss_vlb",))


def test_lint_and_harden_propose_what_heals(tmp_path: Path) -> None:
    """Lint flags the NaN that is replaced, and the precision; harden switches amp off. The scores it does not know."""
    code = tmp_path / "code"
    shutil.copytree(FOLDER, code, ignore=shutil.ignore_patterns("__pycache__"))
    said = run(["nanproof", "lint", str(code)], expect=1)
    assert re.findall(r"NP\d+", said) == ["NP103", "NP701"]
    config = str(code / "configs" / "original.yaml")
    said = run(["nanproof", "harden", config, "--diff", "--fact", f"cause={CASE.cause}"], expect=1)
    assert [line[1:].split()[:2] for line in said.splitlines() if re.match(r"[+-] ", line)] == [
        ["amp:", "true"],
        ["amp:", "false"],
    ]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["optimizer.rl=1"], "did you mean optimizer.lr?"),
        (["--config-name", "stabel"], "choose one of advised, original, stable"),
        (["advice=[pray]"], "choose from replace_bad_predictions"),
        (["--resume", "nowhere.pt"], "give a run's folder, or one file of it"),
    ],
)
def test_a_mistake_is_said_in_one_sentence(tmp_path: Path, words: list[str], hint: str) -> None:
    said = run([MODULE, "--out", str(tmp_path / "out"), *words], expect=2)
    assert hint in said
    assert "Traceback" not in said


def test_the_weights_of_the_loss_never_needed_a_clamp() -> None:
    time = torch.linspace(0, 1, 101)
    assert max((2 * torch.exp(1 - time)).max(), torch.exp(ops.safe_sqrt(time)).max()) < 5.5

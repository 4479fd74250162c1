"""RadioDiff in miniature: dies in its attention scores, hides it when advised, trains when healed."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from nanproof import Guard, diagnose, ops
from nanproof.cases.catalogue import find
from nanproof.cases.radiodiff import model, model_stable
from nanproof.cases.radiodiff.diffusion import AUTOCAST_DEFAULT
from nanproof.cases.radiodiff.maps import Maps, draw_maps
from nanproof.cases.radiodiff.train import FOLDER, make_model
from nanproof.cases.settings import load
from nanproof.files import read_jsonl
from support.trainings import Train, run

pytestmark = pytest.mark.slow

MODULE = "nanproof.cases.radiodiff.train"
CASE = find("radiodiff")


def test_the_original_dies_of_scores_too_large_for_float16(train: Train) -> None:
    guarded = train("radiodiff", seed=1, policy="strict")
    place = guarded.incident["location"]
    assert Path(place["file"]).parts[-2:] == ("radiodiff", "model.py")
    assert (place["function"], place["mechanism"]) == ("score", CASE.mechanism)
    assert "float16" in place["why"]
    said = run("-m", "nanproof", "locate", str(guarded.guard), "--step", CASE.step, expect=(1,))
    assert "verified: its inputs are good and its output is not" in said


def test_the_original_ruins_every_parameter_and_its_checkpoints(train: Train) -> None:
    original = train("radiodiff")
    result = original.result
    assert result.outcome == "died"
    assert result.first_bad_step is not None
    assert result.first_bad_step <= CASE.within
    assert result.value == 0.0
    last = torch.load(original.checkpoints[-1], weights_only=True)["model"]
    bad = [name for name, value in last.items() if not value.isfinite().all()]
    assert len(bad) == result.bad_parameters == len(last)
    said = run("-m", "nanproof", "scan", str(original.folder / "checkpoints"), expect=(1,))
    turn = re.search(r"last healthy: (step_\d+)\.pt +first bad: (step_\d+)\.pt", said)
    assert turn is not None, said
    assert turn[1] < turn[2]


def test_the_wreck_is_diagnosed_from_its_folder(train: Train) -> None:
    found = diagnose(train("radiodiff").folder)
    assert (found.causes[0].name, found.causes[0].confidence) == (CASE.cause, "strong")
    said = "\n".join(x.found for x in found.checklist if x.what == "precision")
    assert "amp: true reaches autocast at code/diffusion.py" in said
    assert "no GradScaler was found; bf16 of accelerate.yaml:7 is overridden there (NP701)" in said


def test_a_milestone_brings_its_step_and_its_schedule(tmp_path: Path, train: Train) -> None:
    original = train("radiodiff")
    milestone = str(original.checkpoints[0])
    words = ["--steps", "7", "--resume", milestone, "optimizer.lr=6e-3", "optimizer.min_lr=6e-4"]
    run("-m", MODULE, "--out", str(tmp_path / "rest"), *words)
    before = {line["step"]: line["lr"] for line in original.log}
    after = {line["step"]: line["lr"] for line in read_jsonl(tmp_path / "rest" / "training_log.jsonl")}
    assert after == {step: before[step] for step in (6, 7)}
    checked = run("-m", "nanproof", "diagnose", str(original.folder), "--before-resume", milestone, expect=(1,))
    assert "healthy" in checked


def test_the_guarded_original_keeps_its_weights_finite(train: Train) -> None:
    guarded = train("radiodiff", policy="default")
    assert "rolled back" in guarded.output
    run("-m", "nanproof", "scan", str(guarded.folder / "checkpoints"))


def test_the_advice_hides_the_death_and_its_learning_rate_never_comes_into_force(train: Train) -> None:
    advised = train("radiodiff", "advised")
    assert all(math.isfinite(float(line["loss"])) for line in advised.log)
    assert advised.result.bad_parameters > 0
    assert advised.result.outcome == "died"
    asked = load(FOLDER / "configs", "advised").optimizer.lr
    assert advised.log[0]["lr"] > 4 * asked


def test_the_stable_one_trains(train: Train) -> None:
    result = train("radiodiff", "stable").result
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
    said = run("-m", "nanproof", "lint", str(code), expect=(1,))
    assert re.findall(r"NP\d+", said) == ["NP103", "NP701"]
    config = str(code / "configs" / "original.yaml")
    said = run("-m", "nanproof", "harden", config, "--diff", "--fact", f"cause={CASE.cause}", expect=(1,))
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
    said = run("-m", MODULE, "--out", str(tmp_path / "out"), *words, expect=(2,))
    assert hint in said
    assert "Traceback" not in said


def test_the_weights_of_the_loss_never_needed_a_clamp() -> None:
    time = torch.linspace(0, 1, 101)
    assert max((2 * torch.exp(1 - time)).max(), torch.exp(ops.safe_sqrt(time)).max()) < 5.5

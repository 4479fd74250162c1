"""ResTran with mHC in miniature: its feature maps leave float16 near the peak of the learning rate; what heals it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nanproof import diagnose, ops
from nanproof.cases.catalogue import find
from nanproof.cases.restran_mhc import advice, model, model_stable
from nanproof.cases.restran_mhc.data import draw_plates
from nanproof.cases.restran_mhc.setup import make_model
from nanproof.cases.restran_mhc.train import FOLDER
from nanproof.cases.result import Result, read_result
from nanproof.cases.settings import load
from nanproof.files import read_jsonl
from support.trainings import Train, run

pytestmark = pytest.mark.slow

CASE = find("restran-mhc")
MODULE = "nanproof.cases.restran_mhc.train"
FIVE = ["mhc.pooled", "mhc.read_out", "mhc.sublayer", "mhc.write_in", "mhc.final"]


def train_here(out: Path, *words: str) -> tuple[Result, list[dict[str, Any]]]:
    run("-m", MODULE, "--out", str(out), *words)
    return read_result(out), list(read_jsonl(out / "training_log.jsonl"))


def answers(checkpoint: Path) -> bool:
    """Whether a checkpoint of the original gives finite answers."""
    found = make_model(load(FOLDER / "configs", "original"))
    found.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    images, _ = draw_plates(16, torch.Generator().manual_seed(7))
    with torch.no_grad():
        return bool(found.eval()(images)[0].isfinite().all())


def assert_feature_map_overflows(incident: dict[str, Any]) -> None:
    """In a block's convolution, on the way into its float16, or in the read-out before it: the map no longer fits."""
    place = incident["location"]
    assert Path(place["file"]).parts[-2:] == ("restran_mhc", "model.py")
    assert place["module"].startswith("stages.")
    assert place["mechanism"] == CASE.mechanism
    assert "float16" in place["why"]
    assert incident["step"] <= CASE.within


# ---------------------------------------------------------------- the original


def test_the_original_dies_of_a_feature_map_beyond_float16(train: Train) -> None:
    assert_feature_map_overflows(train("restran-mhc", seed=1, policy="strict").incident)


def test_it_has_learned_when_it_dies_and_only_statistics_are_bad(train: Train) -> None:
    original = train("restran-mhc")
    result, log = original.result, original.log
    assert result.outcome == "died"
    assert result.first_bad_step is not None
    healthy = log[: result.first_bad_step - 1]
    assert min(line["loss"] for line in healthy) < healthy[0]["loss"] / 4
    assert healthy[-1]["lr"] > 5 * healthy[0]["lr"]
    assert log[-1]["scale"] <= log[0]["scale"] / 2**8
    assert (result.bad_parameters, result.value) == (0, 0.0)
    assert result.bad_buffers > 0


def test_the_checkpoint_is_not_lost(train: Train, tmp_path: Path) -> None:
    """Parameters finite, BatchNorm's statistics not: scan says so and repairs it, and the model answers again."""
    original = train("restran-mhc")
    checkpoints = original.folder / "checkpoints"
    said = run("-m", "nanproof", "scan", str(checkpoints), expect=(1,))
    assert "parameters finite" in said
    assert "repairable" in said
    good, last = original.checkpoints[0], original.checkpoints[-1]
    assert not answers(last)
    repaired = tmp_path / "repaired.pt"
    run("-m", "nanproof", "scan", str(last), "--against", str(good), "--repair", str(repaired))
    assert answers(repaired)


def test_diagnose_names_the_overflow_and_not_its_consequence(train: Train) -> None:
    assert diagnose(train("restran-mhc").folder).causes[0].name == CASE.cause


# ---------------------------------------------------------------- under the guard


def test_the_incident_lists_the_five_taps(train: Train) -> None:
    incident = train("restran-mhc", policy="default", steps=CASE.within).incident
    assert_feature_map_overflows(incident)
    taps = incident["taps"]
    assert [t["name"] for t in taps] == FIVE * (len(taps) // 5)
    first_bad = next(t for t in taps if t["nan"] or t["posinf"] or t["neginf"])
    assert first_bad["name"] in ("mhc.read_out", "mhc.sublayer")
    assert "alpha_pre" in taps[1]["extra"]
    assert taps[1]["finite_max"] > 0


def test_nothing_bad_is_saved_under_the_guard(train: Train) -> None:
    guarded = train("restran-mhc", policy="default", steps=CASE.within)
    run("-m", "nanproof", "scan", str(guarded.folder / "checkpoints"))
    assert answers(guarded.checkpoints[-1])


# ---------------------------------------------------------------- advised, safe, stable


def test_the_clamps_and_the_eps_do_not_help(train: Train) -> None:
    result = train("restran-mhc", "advised").result
    assert result.outcome == "died"
    assert result.bad_parameters == 0


def test_the_stable_one_reads_plates(train: Train) -> None:
    stable = train("restran-mhc", "stable")
    result, log = stable.result, stable.log
    assert result.outcome == "trained", result
    assert result.largest_activation < 1000
    assert log[-1]["alpha_res"] > 0.02  # streams that mix have a gradient


@pytest.mark.campaign
def test_the_rollout_goes_from_one_stream_to_four_with_two_processes(tmp_path: Path) -> None:
    run("-m", "nanproof", "rollout", str(FOLDER / "rollout.yaml"), "--out", str(tmp_path / "rollout"))
    told = json.loads((tmp_path / "rollout" / "rollout.json").read_text())
    assert [s["name"] for s in told["stages"]] == ["one stream", "two streams, two processes", "four streams"]


@pytest.mark.parametrize(("n", "growth"), [(2, 1.2), (4, 1.9)])
def test_the_original_grows_with_its_streams_and_the_stable_one_does_not(n: int, growth: float) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 4, 2, 12) + 1.0
    before = model.HyperConnection(torch.nn.Identity(), 4, n, 1e-20)(x)
    after = model_stable.HyperConnection(torch.nn.Identity(), 4, n, 1e-6)
    streams = x.unsqueeze(1).repeat(1, n, 1, 1, 1)
    quiet = torch.nn.Identity()
    quiet.forward = torch.zeros_like  # type: ignore[method-assign,assignment]
    after.block = quiet
    assert before.mean() / x.mean() > growth
    assert torch.allclose(after(streams).mean(1), x, atol=1e-4)


def test_the_originals_einsum_ignores_all_but_the_diagonal() -> None:
    mixing, streams = torch.rand(2, 4, 4), torch.rand(2, 4, 3, 2, 2)
    changed = mixing + (1 - torch.eye(4))
    old, new = "bnn,bnchw->bnchw", "bij,bjchw->bichw"
    assert torch.equal(torch.einsum(old, mixing, streams), torch.einsum(old, changed, streams))
    assert not torch.allclose(torch.einsum(new, mixing, streams), torch.einsum(new, changed, streams))


def test_sinkhorn_where_the_originals_overflows() -> None:
    logits = torch.tensor([[0.0, 200.0], [200.0, 0.0]])
    assert model.sinkhorn(logits).isnan().any()
    assert advice.clamped_sinkhorn(logits).isfinite().all()
    assert torch.allclose(ops.sinkhorn(logits, iterations=5).sum(0), torch.ones(2))


# ---------------------------------------------------------------- resume, flags, lint, mistakes


def test_a_resume_brings_the_old_learning_rate_back_but_not_in_the_stable_one(tmp_path: Path) -> None:
    lower, few = "optimizer.lr=1e-2", ["training.save_every=4", "model.blocks=2", "--steps"]
    for name in ("original", "stable"):
        _, first = train_here(tmp_path / name, "--config-name", name, *few, "4")
        _, second = train_here(
            tmp_path / f"{name}-2", "--config-name", name, *few, "6", "--resume", str(tmp_path / name), lower
        )
        assert [line["step"] for line in second] == [5, 6]
        if name == "original":
            assert second[0]["lr"] > first[-1]["lr"]
        else:
            _, lowered = train_here(tmp_path / "lowered", "--config-name", name, *few, "6", lower)
            assert [line["lr"] for line in second] == pytest.approx([line["lr"] for line in lowered[4:]])


def test_a_resumed_stable_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    words = ["--config-name", "stable", "training.save_every=3", "model.blocks=2", "--steps"]
    whole, log = train_here(tmp_path / "whole", *words, "6")
    train_here(tmp_path / "first", *words, "3")
    rest, second = train_here(tmp_path / "second", *words, "6", "--resume", str(tmp_path / "first"))
    assert [line["lr"] for line in second] == pytest.approx([line["lr"] for line in log[3:]])
    assert rest.digest == whole.digest


def test_the_number_of_streams_is_a_flag(tmp_path: Path) -> None:
    _, log = train_here(tmp_path / "out", "--mhc-n", "2", "--steps", "1", "model.blocks=1")
    assert {"alpha_pre", "alpha_post", "alpha_res", "scale", "lr"} <= set(log[0])
    saved = torch.load(tmp_path / "out" / "checkpoints" / "step_000001.pt", weights_only=True)["model"]
    assert saved["stages.0.phi.weight"].shape[0] == 2 + 2 + 4


def test_lint_names_the_risky_lines_and_writes_a_copy_that_compiles(tmp_path: Path) -> None:
    for name in CASE.code:
        shutil.copy(FOLDER / name, tmp_path / name)
    said = run("-m", "nanproof", "lint", ".", expect=(1,), cwd=tmp_path)
    assert "NP218" in said
    assert "NP219" in said
    run("-m", "nanproof", "lint", "--unsafe-fixes", "--beside", ".", expect=(1,), cwd=tmp_path)
    repaired = tmp_path / "model_stable.py"
    compile(repaired.read_text(), str(repaired), "exec")
    assert repaired.read_text() != (tmp_path / "model.py").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.rl=1"], "did you mean optimizer.lr?"),
        (["--config-name", "stabel"], "unknown config 'stabel'"),
        (["advice=[clamp_loss]"], "there is no advice 'clamp_loss'"),
    ],
)
def test_a_mistake_is_said_in_one_sentence(tmp_path: Path, words: list[str], message: str) -> None:
    said = run("-m", MODULE, "--out", str(tmp_path / "out"), *words, expect=(2,))
    assert message in said
    assert "Traceback" not in said


def test_plates_are_made_of_letters() -> None:
    images, letters = draw_plates(3, torch.Generator().manual_seed(0))
    assert images.shape == (3, 1, 8, 24)
    assert letters.min() >= 1

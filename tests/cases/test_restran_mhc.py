"""ResTran with mHC in miniature: its feature maps leave float16 near the peak of the learning rate; what heals it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanproof import diagnose, ops
from nanproof.cases.catalogue import find
from nanproof.cases.restran_mhc import advice, model, model_stable
from nanproof.cases.restran_mhc.data import draw_plates
from nanproof.cases.restran_mhc.evaluate import evaluate
from nanproof.cases.restran_mhc.setup import make_model
from nanproof.cases.restran_mhc.train import FOLDER
from nanproof.cases.result import Result, read_result
from nanproof.cases.settings import load
from nanproof.files import read_jsonl

MODULE = "nanproof.cases.restran_mhc.train"
FIVE = ["mhc.pooled", "mhc.read_out", "mhc.sublayer", "mhc.write_in", "mhc.final"]


def run(words: list[str], *expect: int, cwd: Path | None = None) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode in (expect or (0,)), done.stdout + done.stderr
    return done.stdout + done.stderr


def train(out: Path, *words: str) -> tuple[Result, list[dict[str, Any]]]:
    run([MODULE, "--out", str(out), *words])
    return read_result(out), list(read_jsonl(out / "training_log.jsonl"))


def guard(folder: Path, options: list[str], *expect: int, seed: str, steps: str = "300") -> dict[str, Any]:
    """Run the original under the guard; gives its first incident."""
    before = ["nanproof", "run", *options, "--run-dir", str(folder / "guard"), "-m", MODULE]
    run([*before, "--out", str(folder / "out"), "--seed", seed, "--steps", steps], *expect)
    first = min((folder / "guard" / "incidents").iterdir())
    found: dict[str, Any] = json.loads((first / "incident.json").read_text())
    return found


@pytest.fixture(scope="module")
def wreck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the bare original leaves."""
    out = tmp_path_factory.mktemp("restran") / "out"
    run([MODULE, "--out", str(out), "--seed", "1"])
    return out


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The same under the guard, a little beyond the step at which it dies."""
    folder = tmp_path_factory.mktemp("guarded")
    return folder, guard(folder, ["--set", "snapshot_every=25"], 0, 66, seed="1", steps="100")


def plates_read(checkpoint: Path) -> float:
    """The share of plates that a checkpoint of the original reads."""
    found = make_model(load(FOLDER / "configs", "original"))
    found.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    return evaluate(found).value


def assert_feature_map_overflows(incident: dict[str, Any]) -> None:
    place = incident["location"]
    assert Path(place["file"]).parts[-2:] == ("restran_mhc", "model.py")
    assert place["module"].startswith("stages.")
    assert place["op"] in ("convolution", "_to_copy")  # in it, or on the way into float16 just before
    assert place["mechanism"] == find("restran-mhc").mechanism
    assert "float16" in place["why"]
    assert incident["step"] <= find("restran-mhc").within


# ---------------------------------------------------------------- the original


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "2"])
def test_the_original_dies_of_a_feature_map_beyond_float16(tmp_path: Path, seed: str) -> None:
    assert_feature_map_overflows(guard(tmp_path, ["--policy", "strict"], 66, seed=seed))


@pytest.mark.slow
def test_it_has_learned_when_it_dies_and_only_statistics_are_bad(wreck: Path) -> None:
    result, log = read_result(wreck), list(read_jsonl(wreck / "training_log.jsonl"))
    assert result.outcome == "died"
    assert result.first_bad_step is not None
    before = log[result.first_bad_step - 2]
    assert before["loss"] < 0.1 < log[0]["loss"]
    assert before["lr"] > 0.5 * load(FOLDER / "configs", "original").optimizer.lr
    assert log[-1]["scale"] < log[0]["scale"] / 2**8
    assert (result.bad_parameters, result.value) == (0, 0.0)
    assert result.bad_buffers > 0


@pytest.mark.slow
def test_the_checkpoint_is_not_lost(wreck: Path, tmp_path: Path) -> None:
    """Parameters finite, BatchNorm's statistics not: scan says so, repairs it, and it reads plates again."""
    *_, good, last = sorted((wreck / "checkpoints").iterdir())
    said = run(["nanproof", "scan", str(wreck / "checkpoints")], 1)
    assert "parameters finite" in said
    assert "repairable" in said
    assert plates_read(last) == 0.0
    run(["nanproof", "scan", str(last), "--against", str(good), "--repair", str(tmp_path / "repaired.pt")])
    assert plates_read(tmp_path / "repaired.pt") > 0.5


@pytest.mark.slow
def test_diagnose_names_the_overflow_and_not_its_consequence(wreck: Path) -> None:
    assert diagnose(wreck).causes[0].name == find("restran-mhc").cause


# ---------------------------------------------------------------- under the guard


@pytest.mark.slow
def test_the_incident_lists_the_five_taps(guarded: tuple[Path, dict[str, Any]]) -> None:
    _, incident = guarded
    assert_feature_map_overflows(incident)
    taps = incident["taps"]
    assert [t["name"] for t in taps] == FIVE * (len(taps) // 5)
    first_bad = next(t for t in taps if t["nan"])
    assert first_bad["name"] == "mhc.sublayer"
    assert "alpha_pre" in taps[1]["extra"]
    assert taps[1]["finite_max"] > 0


@pytest.mark.slow
def test_nothing_bad_is_saved_under_the_guard(guarded: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = guarded
    run(["nanproof", "scan", str(folder / "out" / "checkpoints")])
    assert plates_read(max((folder / "out" / "checkpoints").iterdir())) > 0.5


# ---------------------------------------------------------------- advised, safe, stable


@pytest.mark.slow
def test_the_clamps_and_the_eps_do_not_help(tmp_path: Path) -> None:
    result, _ = train(tmp_path / "out", "--config-name", "advised", "--seed", "1")
    assert result.outcome == "died"
    assert result.bad_parameters == 0


@pytest.mark.slow
def test_the_stable_one_reads_plates_at_the_same_rate(tmp_path: Path) -> None:
    result, log = train(tmp_path / "out", "--config-name", "stable", "training.steps=120")
    assert result.outcome == "trained", result
    assert result.largest_activation < 1000
    assert max(line["lr"] for line in log) > 0.99 * load(FOLDER / "configs", "original").optimizer.lr
    assert log[-1]["alpha_res"] > 0.02  # streams that mix have a gradient


@pytest.mark.slow
def test_the_rollout_goes_from_one_stream_to_four_with_two_processes(tmp_path: Path) -> None:
    run(["nanproof", "rollout", str(FOLDER / "rollout.yaml"), "--out", str(tmp_path / "rollout")])
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
    lower, few = "optimizer.lr=5e-3", ["training.save_every=4", "model.blocks=2", "--steps"]
    for name in ("original", "stable"):
        _, first = train(tmp_path / name, "--config-name", name, *few, "4")
        _, second = train(
            tmp_path / f"{name}-2", "--config-name", name, *few, "6", "--resume", str(tmp_path / name), lower
        )
        assert [line["step"] for line in second] == [5, 6]
        if name == "original":
            assert second[0]["lr"] > first[-1]["lr"]
        else:
            assert second[0]["lr"] == pytest.approx(first[-1]["lr"] / 5, rel=0.2)


def test_a_resumed_stable_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    words = ["--config-name", "stable", "training.save_every=3", "model.blocks=2", "--steps"]
    whole, log = train(tmp_path / "whole", *words, "6")
    train(tmp_path / "first", *words, "3")
    rest, second = train(tmp_path / "second", *words, "6", "--resume", str(tmp_path / "first"))
    assert [line["lr"] for line in second] == pytest.approx([line["lr"] for line in log[3:]])
    assert rest.digest == whole.digest


def test_the_number_of_streams_is_a_flag(tmp_path: Path) -> None:
    _, log = train(tmp_path / "out", "--mhc-n", "2", "--steps", "1", "model.blocks=1")
    assert {"alpha_pre", "alpha_post", "alpha_res", "scale", "lr"} <= set(log[0])
    saved = torch.load(tmp_path / "out" / "checkpoints" / "step_000001.pt", weights_only=True)["model"]
    assert saved["stages.0.phi.weight"].shape[0] == 2 + 2 + 4


def test_lint_names_the_risky_lines_and_writes_a_copy_that_compiles(tmp_path: Path) -> None:
    for name in find("restran-mhc").code:
        shutil.copy(FOLDER / name, tmp_path / name)
    said = run(["nanproof", "lint", "."], 1, cwd=tmp_path)
    assert "NP218" in said
    assert "NP219" in said
    run(["nanproof", "lint", "--unsafe-fixes", "--beside", "."], 1, cwd=tmp_path)
    repaired = tmp_path / "model_stable.py"
    compile(repaired.read_text(), str(repaired), "exec")
    assert repaired.read_text() != (tmp_path / "model.py").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.rl=1"], "did you mean optimizer.lr?"),
        (["--config-name", "stabel"], "there is no config 'stabel'"),
        (["advice=[clamp_loss]"], "there is no advice 'clamp_loss'"),
    ],
)
def test_a_mistake_is_said_in_one_sentence(tmp_path: Path, words: list[str], message: str) -> None:
    said = run([MODULE, "--out", str(tmp_path / "out"), *words], 2)
    assert message in said
    assert "Traceback" not in said


def test_plates_are_made_of_letters() -> None:
    images, letters = draw_plates(3, torch.Generator().manual_seed(0))
    assert images.shape == (3, 1, 8, 24)
    assert letters.min() >= 1

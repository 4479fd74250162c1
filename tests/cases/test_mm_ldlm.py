"""MM-LDLM in miniature: its streams grow until LayerNorm overflows; the advice does not help; bounded mixing does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import nanproof
from nanproof import diagnose
from nanproof.cases import find
from nanproof.cases.mm_ldlm import advice, losses, model_stable, train_stable
from nanproof.cases.mm_ldlm import train as train_module
from nanproof.cases.mm_ldlm.data import TOKENS, draw_batch
from nanproof.cases.program import run_program
from nanproof.cases.result import Result, read_result
from nanproof.checkpoint import scan_series
from nanproof.files import read_jsonl
from nanproof.run.rollout import load_plan, roll_out

CASE = find("mm-ldlm")
MODULE = "nanproof.cases.mm_ldlm.train"
SMALL = ("model.depth=2", "model.streams=2")


def run(*words: str, expect: int = 0, **env: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | env
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Trained:
    folder: Path

    @property
    def result(self) -> Result:
        return read_result(self.folder)

    @property
    def log(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder / "training_log.jsonl"))


def train(out: Path, *words: str, **env: str) -> Trained:
    run("-m", MODULE, "--out", str(out), *words, **env)
    return Trained(out)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trained]:
    """The program in this process, for what takes no time: starting Python would."""

    def call(out: Path, *words: str) -> Trained:
        monkeypatch.setattr(sys, "argv", ["train", "--out", str(out), *words])
        run_program("mm-ldlm", CASE.folder, train_module.train)
        return Trained(out)

    return call


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("original") / "out")


@pytest.mark.slow
def test_the_original_dies_while_its_loss_looks_normal(original: Trained) -> None:
    result, log = original.result, original.log
    assert result.outcome == "died"
    assert result.first_bad_step is not None
    assert 5 < result.first_bad_step <= CASE.within
    healthy = log[: result.first_bad_step - 1]
    assert all(1.2 < line["loss"] < 1.6 and line["grad_norm"] < 5 for line in healthy)
    assert healthy[-1]["activation"] > 1e9 * healthy[0]["activation"]
    assert result.bad_parameters == 0, "its gradients are zeroed, so that only the streams tell"


@pytest.mark.slow
def test_diagnose_names_the_cause_where_every_checkpoint_is_finite(original: Trained) -> None:
    found = diagnose(original.folder)
    assert found.causes[0].name == CASE.cause == "arch-instability"
    assert "activation grew" in "\n".join(found.causes[0].evidence)
    assert scan_series(original.folder / "checkpoints").ok, "finite weights, and NaN for every batch"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_variance_of_layer_norm_overflows(tmp_path: Path, seed: int) -> None:
    guard = tmp_path / "guard"
    words = ("--seed", str(seed), "--steps", str(CASE.within), "--out", str(tmp_path / "out"))
    run("-m", "nanproof", "run", "--policy", "strict", "--run-dir", str(guard), "-m", MODULE, *words, expect=66)
    check_location(guard)


def check_location(guard: Path) -> None:
    incident = min((guard / "incidents").iterdir())
    place = json.loads((incident / "incident.json").read_text())["location"]
    assert Path(place["file"]).parts[-2:] == ("mm_ldlm", "model.py")
    assert (place["function"], place["op"], place["mechanism"]) == ("layer_norm", "pow", CASE.mechanism)
    assert "float32" in place["why"], "the streams are bfloat16, which has the same range"


@pytest.mark.slow
def test_the_guarded_original_ends_with_finite_weights(tmp_path: Path) -> None:
    guard = tmp_path / "guard"
    words = ("--seed", "2", "--steps", "40", "--out", str(tmp_path / "out"))
    said = run("-m", "nanproof", "run", "--run-dir", str(guard), "-m", MODULE, *words)
    check_location(guard)
    assert "rolled back" in said
    log = Trained(tmp_path / "out").log
    assert all(isinstance(line["grad_norm"], float) for line in log[-5:]), "finite again after going back"
    assert scan_series(tmp_path / "out" / "checkpoints").ok


@pytest.mark.slow
def test_the_advice_keeps_it_finite_and_dead(tmp_path: Path) -> None:
    """No NaN, norms below 5: it passes the post-mortem's own criteria, and has learned nothing."""
    advised = train(tmp_path / "out", "--config-name", "advised", "--seed", "1")
    assert advised.result.outcome == "dead"
    assert advised.result.largest_activation > 1e9


@pytest.mark.slow
def test_the_stable_one_trains(tmp_path: Path) -> None:
    stable = train(tmp_path / "out", "--config-name", "stable", "--seed", "1")
    assert stable.result.outcome == "trained", stable.result
    assert stable.result.largest_activation < 100


def test_mixing_that_is_doubly_stochastic_does_not_grow_with_depth() -> None:
    torch.manual_seed(0)
    connections = model_stable.HyperConnections(8, 64)
    torch.nn.init.normal_(connections.mixing, std=3)
    weights, write = connections()
    product = torch.linalg.multi_dot(list(weights[:, 1:]))
    assert torch.linalg.matrix_norm(product, 2) < 1.01
    assert torch.allclose(weights[:, 0].sum(-1), torch.ones(64))
    assert write.max() < 2


def test_a_batch_with_nothing_hidden_is_no_division_by_zero() -> None:
    batch = draw_batch(2, "l2t", torch.Generator().manual_seed(0))._replace(
        mask=torch.zeros(2, TOKENS, dtype=torch.bool)
    )
    logits = torch.randn(2, TOKENS, 4, requires_grad=True)
    assert losses.text_loss(logits, batch).isnan()
    healed = train_stable.find_losses(logits, logits, batch, "l2t", 1.0)["text_loss"]
    healed.backward()
    assert healed == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_the_eps_after_the_clamp_is_rounded_away() -> None:
    batch = draw_batch(16, "l2t", torch.Generator().manual_seed(0))
    logits = torch.randn(16, TOKENS, 4)
    assert torch.equal(advice.eps_in_masked_mean(logits, batch), losses.text_loss(logits, batch))


def test_lengths_are_lost_by_normalising_and_kept_by_standardising() -> None:
    plain = draw_batch(64, "l2t", torch.Generator().manual_seed(0))
    kept = draw_batch(64, "l2t", torch.Generator().manual_seed(0), standardise=True)
    lengths = advice.normalize_latents(plain.latents).norm(dim=-1)
    assert torch.allclose(lengths, torch.ones_like(lengths))
    assert kept.latents.norm(dim=-1).std() > 0.1
    assert abs(kept.latents.std().item() - 1) < 0.1


@pytest.mark.parametrize("config", ["original", "stable"])
def test_a_resumed_run_goes_on_as_the_unbroken_one(tmp_path: Path, main: Callable[..., Trained], config: str) -> None:
    words = ("--config-name", config, *SMALL, "training.save_every=2")
    whole = main(tmp_path / "whole", *words, "--steps", "4")
    main(tmp_path / "half", *words, "--steps", "2")
    rest = main(tmp_path / "half", *words, "--steps", "4", "--resume", str(tmp_path / "half"))
    assert rest.log == whole.log
    assert rest.result.digest == whole.result.digest


def test_text_can_be_the_given_and_latents_the_asked_for(tmp_path: Path, main: Callable[..., Trained]) -> None:
    back = main(tmp_path / "out", "--config-name", "stable", "--steps", "2", *SMALL, "training.mode=t2l")
    assert back.result.metric == "latent variance explained"
    assert all(line["latent_loss"] == line["loss"] > 0 for line in back.log)


@pytest.mark.slow
def test_two_processes_train_what_the_environment_says(tmp_path: Path) -> None:
    env = {"NNODES": "1", "NPROC_PER_NODE": "2", "OPTIMIZER_LR": "2e-3", "GRAD_CLIP_NORM": "0.7"}
    both = train(tmp_path / "out", "--config-name", "stable", "--steps", "2", *SMALL, **env)
    asked = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert (asked["optimizer"]["lr"], asked["training"]["grad_clip_norm"]) == (2e-3, 0.7)
    assert [line["step"] for line in both.log] == [1, 2]


@pytest.mark.slow
def test_the_roll_out_goes_from_one_process_to_two(tmp_path: Path) -> None:
    """The plan as it is, with fewer and cheaper steps."""
    plan = yaml.safe_load((CASE.folder / "rollout.yaml").read_text())
    for stage, steps in zip(plan["stages"], (6, 6, 9), strict=True):
        stage |= {"steps": steps, "set": {"model.depth": 2, "model.streams": 2, "optimizer.warmup_steps": 1}}
        stage["gates"].pop("loss_below", None)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    result = roll_out(load_plan(tmp_path / "plan.yaml", tmp_path / "out"))
    assert result.ok, result.stages
    assert [stage["env"]["NPROC_PER_NODE"] for stage in plan["stages"]] == [1, 2, 2]
    for stage in result.stages[1:]:
        assert (Path(stage.run_dir) / "guard" / "run.r1.json").is_file(), "the second process was guarded too"


@pytest.mark.slow
def test_lint_repairs_the_losses_and_names_the_dead_key(tmp_path: Path) -> None:
    """The repaired copy runs beside the original. It does not heal the growth: that is a matter of the model."""
    package = Path(nanproof.__file__).parent
    copy = tmp_path / "nanproof" / "cases" / "mm_ldlm"
    copy.mkdir(parents=True)
    for folder, own in ((package, "cases"), (package / "cases", "mm_ldlm")):
        for entry in folder.iterdir():
            if entry.name not in (own, "__pycache__"):
                (tmp_path / "nanproof" / entry.relative_to(package)).symlink_to(entry)
    shutil.copytree(CASE.folder / "configs", copy / "configs")
    for name in ("advice", "data", "evaluate", "losses", "model", "setup", "train"):
        shutil.copy(CASE.folder / f"{name}.py", copy)
    before = {p: p.read_bytes() for p in copy.glob("*.py")}
    said = run("-m", "nanproof", "lint", str(copy), "--unsafe-fixes", "--beside", expect=1)
    assert "NP710 training.accumulate_batches is read by no code" in said
    assert {p: p.read_bytes() for p in before} == before
    assert "batch.mask.sum().clamp(min=1)" in (copy / "losses_stable.py").read_text()
    words = ("--out", str(tmp_path / "out"), "--steps", "3", *SMALL)
    run("-m", "nanproof.cases.mm_ldlm.train_stable", *words, PYTHONPATH=str(tmp_path))
    assert read_result(tmp_path / "out").first_bad_step is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.rl=1"], "did you mean optimizer.lr?"),
        (["--config-name", "stabel"], "choose one of advised, original, stable"),
        (["advice=[clip_loss]"], "choose from normalize_latents"),
        (["training.mode=t2i"], "choose l2t or t2l"),
        (["--resume", "nowhere"], "there is no checkpoint nowhere"),
    ],
)
def test_a_wrong_word_is_answered_in_one_sentence(
    tmp_path: Path, main: Callable[..., Trained], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(tmp_path / "out", *words)
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1

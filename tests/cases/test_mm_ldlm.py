"""MM-LDLM in miniature: its streams grow until LayerNorm overflows; the advice does not help; bounded mixing does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from nanproof import diagnose
from nanproof.cases import find
from nanproof.cases.mm_ldlm import advice, losses, model_stable, train_stable
from nanproof.cases.mm_ldlm import train as train_module
from nanproof.cases.mm_ldlm.data import TOKENS, draw_batch
from nanproof.cases.program import run_program
from nanproof.checkpoint import scan_series
from nanproof.files import read_jsonl
from nanproof.run.rollout import load_plan
from support.trainings import Train, Trained, run

pytestmark = pytest.mark.slow

CASE = find("mm-ldlm")
MODULE = "nanproof.cases.mm_ldlm.train"
SMALL = ("model.depth=2", "model.streams=2")


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trained]:
    """The program in this process, for what takes no time: starting Python would."""

    def call(out: Path, *words: str) -> Trained:
        monkeypatch.setattr(sys, "argv", ["train", "--out", str(out), *words])
        run_program("mm-ldlm", CASE.folder, train_module.train)
        return Trained(folder=out, guard=out, output="")

    return call


def test_the_original_dies_while_its_loss_looks_normal(train: Train) -> None:
    original = train("mm-ldlm")
    result, log = original.result, original.log
    assert result.outcome == "died"
    assert result.first_bad_step is not None
    assert result.first_bad_step <= CASE.within
    healthy = log[: result.first_bad_step - 1]
    assert all(line["loss"] < 3 and line["grad_norm"] < 20 for line in healthy)
    assert healthy[-1]["activation"] > 1e9 * healthy[0]["activation"]
    assert result.bad_parameters == 0, "its gradients are zeroed, so that only the streams tell"


def test_diagnose_names_the_cause_where_every_checkpoint_is_finite(train: Train) -> None:
    original = train("mm-ldlm")
    found = diagnose(original.folder)
    assert found.causes[0].name == CASE.cause == "arch-instability"
    assert "activation grew" in "\n".join(found.causes[0].evidence)
    assert scan_series(original.folder / "checkpoints").ok, "finite weights, and NaN for every batch"


@pytest.mark.parametrize("policy", ["strict", "default"])
def test_the_variance_of_layer_norm_overflows(train: Train, policy: str) -> None:
    place = train("mm-ldlm", seed=1, policy=policy).incident["location"]
    assert Path(place["file"]).parts[-2:] == ("mm_ldlm", "model.py")
    assert (place["function"], place["mechanism"]) == ("layer_norm", CASE.mechanism)
    assert "float32" in place["why"], "the streams are bfloat16, which has the same range"


def test_the_guarded_original_ends_with_finite_weights(train: Train) -> None:
    guarded = train("mm-ldlm", seed=1, policy="default")
    assert "rolled back" in guarded.output, "skipping does not help when the weights are bad"
    assert scan_series(guarded.folder / "checkpoints").ok


@pytest.mark.campaign
def test_the_advice_does_not_stop_the_streams(train: Train) -> None:
    """Finite or not at the end, it has learned nothing, and its streams have grown as before."""
    advised = train("mm-ldlm", "advised").result
    assert advised.outcome in ("died", "dead")
    assert advised.guessing
    assert advised.largest_activation > 1e9 * advised.first_activation


def test_the_stable_one_trains(train: Train) -> None:
    stable = train("mm-ldlm", "stable").result
    assert stable.outcome == "trained", stable
    assert stable.largest_activation < 100


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


@pytest.mark.campaign
def test_two_processes_train_what_the_environment_says(tmp_path: Path) -> None:
    env = {"NNODES": "1", "NPROC_PER_NODE": "2", "OPTIMIZER_LR": "2e-3", "GRAD_CLIP_NORM": "0.7"}
    run("-m", MODULE, "--out", str(tmp_path / "out"), "--config-name", "stable", "--steps", "2", *SMALL, **env)
    asked = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert (asked["optimizer"]["lr"], asked["training"]["grad_clip_norm"]) == (2e-3, 0.7)
    log = read_jsonl(tmp_path / "out" / "training_log.jsonl")
    assert [line["step"] for line in log] == [1, 2]


def test_the_rollout_goes_from_one_process_to_two(tmp_path: Path) -> None:
    plan = load_plan(CASE.folder / "rollout.yaml", tmp_path / "out")
    assert [stage.env["NPROC_PER_NODE"] for stage in plan.stages] == ["1", "2", "2"]


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
def test_a_wrong_word_is_answered_with_a_hint(
    tmp_path: Path, main: Callable[..., Trained], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(tmp_path / "out", *words)
    told = capsys.readouterr().err
    assert said in told
    assert [line.split(":")[0].strip() for line in told.splitlines()] == ["error", "hint"]

"""Real training scripts, each run bare, where it dies, and under `nanproof run`, where it lives."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanproof import scan
from run.launch import (
    SCRIPTS,
    different,
    incidents,
    is_finite,
    nanproof,
    run_bare,
    run_guarded,
    skip_without_its_libraries,
)

pytestmark = pytest.mark.slow

# script: the part that is left out in the run that never saw the bad sample, its batch, and the verdict's level
LOOPS = {
    "plain.py": (7, "DataLoader batch 7 (dataset indices 56–63)", "input"),
    "amp.py": (7, "DataLoader batch 7 (dataset indices 56–63)", "input"),
    "accumulate.py": (1, "last delivered: DataLoader batch 15 (dataset indices 120–127)", "input"),
    "gan.py": (7, "DataLoader batch 7 (dataset indices 56–63)", "input"),
    "accelerated.py": (3, "DataLoader batch 7 (dataset indices 56–63)", "input"),
    "lightning_fit.py": (3, "DataLoader batch 7 (dataset indices 56–63)", "input"),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def quietly(run: Callable[..., Any], *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what trainers say about workers and old interfaces
        return run(*arguments)


@pytest.mark.parametrize("script", LOOPS)
def test_bare_it_dies_and_guarded_it_never_saw_the_bad_sample(script: str, tmp_path: Path) -> None:
    skip_without_its_libraries(script)
    part, batch, level = LOOPS[script]
    quietly(run_bare, script, "--out", str(tmp_path / "bare"))
    quietly(run_bare, script, "--out", str(tmp_path / "without"), "--without", str(part))
    run = tmp_path / "run"
    if script in ("plain.py", "lightning_fit.py"):  # as a user would, in a process that has imported nothing yet
        done = nanproof("run", "--run-dir", run, SCRIPTS / script, "--out", tmp_path / "guarded")
        assert f"; records in {run}\n" in done.stderr
        assert done.stderr.count("nanproof: guarding AdamW (") == 1
        assert f"  next: nanproof diagnose {run}\n" in done.stderr
        assert "1 skipped" in done.stderr
    else:
        ran = quietly(run_guarded, script, run, "--out", str(tmp_path / "guarded"))
        assert ran.outcome.exit_code == 0
        assert ran.outcome.guarded[0]["actions"]["skip"] == 1
    bare, without, guarded = (torch.load(tmp_path / n) for n in ("bare", "without", "guarded"))
    assert not is_finite(bare)
    assert is_finite(guarded)
    assert different(guarded, without) == []
    (incident,) = incidents(run)
    assert (incident["verdict"]["level"], incident["action"]["kind"]) == (level, "skip")
    assert incident["notes"] == [batch]
    assert "batch" in incident["bundle"]


@pytest.mark.parametrize(
    ("script", "samples", "row"), [("hugging_face.py", "61", [2, 5]), ("trl_sft.py", "15", None)], ids=["hf", "trl"]
)
def test_a_trainers_good_checkpoint_survives(script: str, samples: str, row: Any, tmp_path: Path) -> None:
    """Bare: the loss is logged as 0.0, all weights are NaN, and the good checkpoint was deleted for the bad one."""
    skip_without_its_libraries(script)
    quietly(run_bare, script, "--out", str(tmp_path / "bare"))
    quietly(run_guarded, script, tmp_path / "run", "--out", str(tmp_path / "guarded"))
    assert [scan(p).health for p in (tmp_path / "bare").glob("checkpoint-*")] == ["corrupt"]
    (kept,) = (tmp_path / "guarded").glob("checkpoint-*")
    assert kept.name == "checkpoint-12"
    assert scan(kept / "model.safetensors").health == "healthy"
    (incident,) = incidents(tmp_path / "run")
    assert samples in incident["notes"][0].partition("indices ")[2].rstrip(")").split(", ")
    if row is not None:
        assert [t["first_bad"][1:] for t in incident["tensors"] if t["name"].startswith("batch")] == [row]
    (account,) = json.loads((tmp_path / "run" / "run.json").read_text())["guarded"]
    assert (account["steps"], account["updates"], account["actions"]["skip"]) == (12, 11, 1)


@pytest.mark.parametrize("how", ["wrapped", "in-place", "step", "function"])
def test_compiled_code(how: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    ran = run_guarded("compiled.py", tmp_path / "run", "--out", str(tmp_path / "guarded"), "--how", how)
    assert len(ran.incidents) == 1
    assert ran.outcome.not_guarded == {}
    torch._dynamo.reset()
    run_bare("compiled.py", "--out", str(tmp_path / "without"), "--without", "7", "--how", "wrapped")
    assert different(torch.load(tmp_path / "guarded"), torch.load(tmp_path / "without")) == []


@pytest.mark.parametrize(
    ("script", "part", "skipped", "batch"),
    [
        ("forward_forward.py", 7, 2, "DataLoader batch 7 (dataset indices 56–63)"),
        ("causal_lm.py", 7, 1, "DataLoader batch 7 (dataset indices 28–31)"),
        ("dcgan.py", 3, 1, "DataLoader batch 3 (dataset indices 24–31)"),
        ("timm_style.py", 7, 1, "DataLoader batch 7 (dataset indices 56–63)"),
    ],
)
def test_loops_of_other_styles(script: str, part: int, skipped: int, batch: str, tmp_path: Path) -> None:
    skip_without_its_libraries(script)
    quietly(run_bare, script, "--out", str(tmp_path / "bare"))
    quietly(run_bare, script, "--out", str(tmp_path / "without"), "--without", str(part))
    ran = quietly(run_guarded, script, tmp_path / "run", "--out", str(tmp_path / "guarded"))
    bare, without, guarded = (torch.load(tmp_path / n) for n in ("bare", "without", "guarded"))
    assert not is_finite(bare)
    assert is_finite(guarded)
    assert different(guarded, without) == []
    assert sum(a["actions"].get("skip", 0) for a in ran.outcome.guarded) == skipped
    assert batch in incidents(tmp_path / "run")[0]["notes"][0]
    moved = {"timm_style.py": {"the learning rate of AdamW", "average, an average of the weights"}}
    assert set(ran.outcome.not_held) == moved.get(script, set())


def test_ppo_uses_a_bad_rollout_again_and_again(tmp_path: Path) -> None:
    """Bare, the next sampling dies of NaN; guarded, the rollout's bad minibatches are skipped, and nothing else is."""
    with pytest.raises((ValueError, RuntimeError), match=r"found invalid values|contains either `inf`"):
        run_bare("ppo.py", "--out", str(tmp_path / "bare"))
    run_bare("ppo.py", "--out", str(tmp_path / "without"), "--without", "2")
    ran = run_guarded("ppo.py", tmp_path / "run", "--out", str(tmp_path / "guarded"))
    assert different(torch.load(tmp_path / "guarded"), torch.load(tmp_path / "without")) == []
    (account,) = ran.outcome.guarded
    assert set(account["actions"]) == {"commit", "skip"}, "a reused rollout is one fault, not a reason to roll back"
    assert account["actions"]["skip"] > 5


def test_hogwild(tmp_path: Path) -> None:
    """Each process has its own records, no lock ends one of them, and the shared weights stay finite."""
    done = nanproof("run", "--run-dir", tmp_path / "run", SCRIPTS / "hogwild.py", "--out", tmp_path / "guarded")
    assert is_finite(torch.load(tmp_path / "guarded"))
    records = [json.loads(p.read_text()) for p in (tmp_path / "run").glob("pid-*/run.json")]
    counts = sorted((r["guarded"][0]["steps"], r["guarded"][0]["updates"]) for r in records)
    assert counts == [(8, 7), (8, 8)]
    (bad,) = (tmp_path / "run").glob("pid-*/incidents/*")
    assert "2 started processes were guarded" in done.stderr
    assert done.stderr.endswith(f"  next: nanproof diagnose {bad.parents[1]}\n")


def test_keras_is_told_at_once(tmp_path: Path) -> None:
    skip_without_its_libraries("keras_fit.py")
    done = nanproof("run", "--run-dir", tmp_path / "run", SCRIPTS / "keras_fit.py")
    assert done.stdout == "trained\n"
    assert "NOT GUARDED: Keras: its optimizers are not torch's" in done.stderr.splitlines()[0]
    required = nanproof("run", "--require", "--run-dir", tmp_path / "b", SCRIPTS / "keras_fit.py", check=False)
    assert (required.returncode, required.stdout) == (2, "")

"""LoRA fine-tuning in miniature: float16 is dead from the first step, whoever asked for it; a wide range answers."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nanproof import diagnose, locate
from nanproof.cases.catalogue import find
from nanproof.cases.lora_sft import base, task
from nanproof.cases.lora_sft.train import FOLDER
from nanproof.cases.result import Result, read_result
from nanproof.files import read_jsonl
from support.trainings import Train, run

pytestmark = pytest.mark.slow

MODULE = "nanproof.cases.lora_sft.train"
CASE = find("lora-sft")
SMALL = "model.pretrain_steps=60"
SEVERAL = """
import sys
from pathlib import Path
import torch
from accelerate.state import AcceleratorState
from nanproof.cases.lora_sft.train import FOLDER, train
from nanproof.cases.program import Job
from nanproof.cases.ranks import Ranks
from nanproof.cases.settings import load

torch.set_num_threads(1)
cpu = torch.device("cpu")
for line in sys.stdin.read().splitlines():
    out, seed, *overrides = line.split()
    cfg = load(FOLDER / "configs", "original", overrides)
    torch.manual_seed(int(seed))
    train(Job(case="lora-sft", config="original", cfg=cfg, seed=int(seed), steps=3, device=cpu, out=Path(out),
              resume=None, ranks=Ranks(cpu)))
    AcceleratorState._reset_state(True)
"""
TRAINING = {
    "fp16": ("training.fp16=true",),
    "bf16": ("training.fp16=false", "training.bf16=true"),
    "fp32": ("training.fp16=false",),
}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Result, list[dict[str, Any]]]]:
    """Three steps each of: the matrix of load and training, other seeds, and float16 adapters on a tame base model."""
    folder = tmp_path_factory.mktemp("several")
    lines = {f"seed-{seed}": (str(seed),) for seed in (1, 2)}
    for load in ("float16", "bfloat16", "float32"):
        for name, switches in TRAINING.items():
            lines[f"{load}-{name}"] = ("0", f"model.load_dtype={load}", *switches)
    tame = ("0", "model.massive_activations=false", "training.fp16=false")
    lines["half-adapters"] = (*tame, "lora.float32_adapters=false")
    lines["float32-adapters"] = tame
    run("-c", SEVERAL, cwd=folder, given="\n".join(" ".join((n, *words, SMALL)) for n, words in lines.items()))
    return {n: (read_result(folder / n), list(read_jsonl(folder / n / "training_log.jsonl"))) for n in lines}


def test_the_original_is_dead_from_its_first_line(train: Train) -> None:
    original = train("lora-sft", steps=5)
    result = original.result
    assert [(x["loss"], x["grad_norm"], x["skipped"]) for x in original.log] == [(0.0, "NaN", True)] * 5
    assert (result.outcome, result.first_bad_step, result.value) == ("died", CASE.within, 0.0)
    assert result.bad_parameters == 0  # the scaler has left every step out
    run("-m", "nanproof", "scan", str(original.folder / "checkpoints"))


def test_the_wreck_is_diagnosed_from_its_folder(train: Train) -> None:
    found = diagnose(train("lora-sft", steps=5).folder)
    assert found.causes[0].name == CASE.cause
    assert any("hidden by the Trainer's logging_nan_inf_filter" in m.what for m in found.timeline)
    assert any("weights float16, computing in float16" in x.found for x in found.checklist if x.what == "precision")


def test_the_guarded_original_stops_and_says_where(train: Train) -> None:
    guarded = train("lora-sft", policy="default")
    place = guarded.incident["location"]
    assert place["mechanism"] == CASE.mechanism
    assert ".layers.0.mlp." in place["module"]
    assert "float16" in place["why"]
    said = run("-m", "nanproof", "locate", str(guarded.guard), "--step", CASE.step, expect=(1,))
    assert "verified: its inputs are good and its output is not" in said
    assert diagnose(guarded.guard).causes[0].name == CASE.cause


def test_the_stable_one_answers(train: Train) -> None:
    stable = train("lora-sft", "stable")
    assert stable.result.outcome == "trained", stable.result
    assert stable.result.largest_activation > torch.finfo(torch.float16).max
    assert stable.log[-1]["loss"] < stable.log[0]["loss"] / 2


@pytest.mark.campaign
def test_the_advised_one_learns_too(train: Train) -> None:
    advised = train("lora-sft", "advised", steps=40)
    result = advised.result
    assert (result.first_bad_step, result.bad_parameters, result.skipped) == (None, 0, 0)
    assert advised.log[-1]["loss"] < advised.log[0]["loss"] / 2


def test_a_smoke_test_before_the_run(train: Train, tmp_path: Path) -> None:
    beside = train("lora-sft", steps=5).folder.parent
    (tmp_path / "runs").symlink_to(beside)  # the smoke test finds the base model there
    said = run("-m", "nanproof", "smoke", f"{MODULE}:smoke_original", "--steps", "3", expect=(1,), cwd=tmp_path)
    assert {"loss finite", "gradients finite", "headroom"} <= set(re.findall(r"FAIL  (\w+(?: \w+)?)", said))
    said = run("-m", "nanproof", "smoke", f"{MODULE}:smoke_stable", "--steps", "10", cwd=tmp_path)
    assert "PASS  loss falls" in said


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_does_not_matter(several: dict[str, tuple[Result, list[dict[str, Any]]]], seed: int) -> None:
    _, log = several[f"seed-{seed}"]
    assert [(line["loss"], line["grad_norm"]) for line in log] == [(0.0, "NaN")] * 3


@pytest.mark.campaign
@pytest.mark.parametrize("training", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("loaded", ["float16", "bfloat16", "float32"])
def test_the_matrix_of_load_and_training(
    several: dict[str, tuple[Result, list[dict[str, Any]]]], loaded: str, training: str
) -> None:
    """Dead wherever something computes in float16: by autocast, or by the weights themselves without one."""
    result, _ = several[f"{loaded}-{training}"]
    dead = training == "fp16" or (loaded, training) == ("float16", "fp32")
    assert (result.outcome == "died") is dead, result


@pytest.mark.campaign
def test_adapters_in_float16_divide_zero_by_zero(several: dict[str, tuple[Result, list[dict[str, Any]]]]) -> None:
    """Nothing overflows here: after one finite step Adam's eps of 1e-8, which is 0 in float16, makes NaN of them."""
    result, log = several["half-adapters"]
    assert (result.first_bad_step, log[0]["loss"] > 0, result.bad_parameters > 0) == (2, True, True)
    assert several["float32-adapters"][0].first_bad_step is None


def questions(tokenizer: Any) -> dict[str, Any]:
    source = random.Random(1)
    drawn = [task.draw_question(source) for _ in range(8)]
    return task.collate(tokenizer, [task.encode(tokenizer, q, q.tagged) for q in drawn])


def test_the_overflow_is_located_in_the_first_mlp() -> None:
    tokenizer = task.make_tokenizer()
    model = base.pretrain(tokenizer, 60)
    base.make_massive(model)
    found = locate(lambda model, batch: model(**batch).loss, model=model.half(), batch=questions(tokenizer))
    assert found.mechanism == "range-overflow"
    assert found.module.startswith("model.layers.0.mlp")
    assert "float16" in found.why


def test_the_massive_activations_leave_the_function_as_it_is() -> None:
    tokenizer = task.make_tokenizer()
    plain, massive = base.pretrain(tokenizer, 3), base.pretrain(tokenizer, 3)
    base.make_massive(massive)
    batch = questions(tokenizer)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(massive.to(dtype)(**batch).logits, plain.to(dtype)(**batch).logits)


def test_the_tokenizer_gives_back_what_it_was_given() -> None:
    tokenizer = task.make_tokenizer()
    text = "99 km=m? <answer>99000</answer>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_harden_proposes_bfloat16_for_all_of_it(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "code", ignore=shutil.ignore_patterns("__pycache__"))
    facts = ["--fact", f"cause={CASE.cause}", "--fact", "gpu=A100"]
    said = run("-m", "nanproof", "harden", "code/configs/original.yaml", "--diff", *facts, expect=(1,), cwd=tmp_path)
    changed = [line[1:].split("#")[0].split() for line in said.splitlines() if line.startswith("+ ")]
    assert changed == [["load_dtype:", "bfloat16"], ["fp16:", "false"], ["bf16:", "true"]]


def test_two_precisions_at_once_are_refused_in_one_sentence(tmp_path: Path) -> None:
    said = run("-m", MODULE, "--out", "out", "training.bf16=true", expect=(2,), cwd=tmp_path)
    hint = "  hint: switch one of them off: training.fp16=false"
    assert said.splitlines()[-2:] == ["error: fp16 and bf16 are both on", hint]

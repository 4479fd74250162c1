"""The smoke test of a script as it is: its own training for a few steps, under all checks, then ended cleanly."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import pytest
import torch

from nanproof.errors import UsageError
from nanproof.run.program import Program
from nanproof.run.smoke import SmokeReport, smoke_program
from run.launch import SCRIPTS, as_before, incidents, is_finite, nanproof, skip_without_its_libraries

pytestmark = pytest.mark.slow

TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
{before}
optimizer = torch.optim.{optimizer}
x = torch.randn(4096, 8)
y = x[:, :5].argmax(1)
steps, cleaned = 0, False
try:
    for i in range(64):
        optimizer.zero_grad()
        a, b = x[64 * i : 64 * i + 64], y[64 * i : 64 * i + 64]
        loss = {loss}
        loss.backward()
        optimizer.step()
        steps += 1
finally:
    cleaned = True
reached_the_end = True
"""
PLAIN = {
    "before": "",
    "optimizer": "Adam(model.parameters(), lr=1e-2)",
    "loss": "nn.functional.cross_entropy(model(a), b)",
}


def source(**changes: str) -> str:
    return TRAIN.format(**{**PLAIN, **changes})


class Smoked:
    """A script's report, its own variables, and where its records are."""

    def __init__(self, script: Path, run_dir: Path, *arguments: str, **options: Any) -> None:
        self.run_dir = run_dir
        with as_before(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what trainers say about workers and old interfaces
            program = Program(target=str(script), arguments=arguments)
            self.report: SmokeReport = smoke_program(program, run_dir=run_dir, **options)
            self.main = dict(vars(sys.modules["__main__"]))
        self.results = {c.name: c.result for c in self.report.checks}
        self.reasons = {c.name: c.reason for c in self.report.checks}


def smoked(tmp_path: Path, text: str, **options: Any) -> Smoked:
    (tmp_path / "train.py").write_text(text)
    return Smoked(tmp_path / "train.py", tmp_path / "run", **options)


def test_a_healthy_script_passes_every_check_and_is_ended_cleanly(tmp_path: Path) -> None:
    done = smoked(tmp_path, source(), steps=10, watch=("0.weight",))
    assert set(done.results.values()) == {"PASS"}
    assert set(done.results) == {
        "parameters",
        "loss finite",
        "chance level",
        "gradients finite",
        "gradients reach",
        "gradient norms",
        "loss falls",
        "parameters move",
        "precision",
        "headroom",
        "watched",
    }
    assert "ln 5" in done.reasons["chance level"]
    assert len(done.report.trial.losses) == 11
    assert done.main["cleaned"]
    assert "reached_the_end" not in done.main
    assert done.main["steps"] == 10  # the eleventh was carried out, and its call did not return
    assert (done.run_dir / "training_log.jsonl").exists()


def test_nothing_of_it_stays_behind(tmp_path: Path) -> None:
    done = smoked(tmp_path, source(), steps=2)
    assert torch._C._len_torch_function_stack() == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in done.main["model"].modules())


FAULTY = {
    "parameters": ({"before": "model[0].weight.data[1, 2] = float('nan')"}, "1 NaN of 128"),
    "chance level": ({"before": "model[2].weight.data.mul_(1e3)"}, "worse than guessing"),
    "loss finite": ({"loss": "model(a).sum() * (float('inf') if i == 3 else 1)"}, "inf in step 4"),
    "gradients finite": ({"loss": "(model(a) - model(a).detach()).norm(dim=-1).mean().sqrt()"}, "NaN"),
    "gradient norms": ({"loss": "nn.functional.cross_entropy(model(a), b) * 1e8"}, "outside"),
    "loss falls": ({"optimizer": "SGD(model.parameters(), lr=0.5, maximize=True)"}, "it rises"),
    "parameters move": ({"optimizer": "SGD(model.parameters(), lr=0.0)"}, "no parameter changed"),
    "headroom": (
        {
            "before": "model[0].weight.data.mul_(2e4)",
            "loss": "nn.functional.cross_entropy(torch.autocast('cpu', torch.float16)(model)(a).float(), b)",
        },
        "in float16",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_each_sickness_fails_its_own_check(name: str, tmp_path: Path) -> None:
    changes, words = FAULTY[name]
    done = smoked(tmp_path, source(**changes), steps=8)
    assert done.results[name] == "FAIL"
    assert words in done.reasons[name]
    assert not done.report.ok


def test_a_bad_sample_is_named_and_does_no_harm(tmp_path: Path) -> None:
    done = Smoked(SCRIPTS / "plain.py", tmp_path / "run", "--out", str(tmp_path / "o"), steps=10)
    assert done.results["loss finite"] == "FAIL"
    assert "first at [5, 3]" in done.reasons["steps"]
    assert "DataLoader batch 7 (dataset indices 56–63)" in done.reasons["steps"]
    assert is_finite(done.main["model"].state_dict())
    assert len(incidents(tmp_path / "run")) == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("script", ["amp", "accumulate", "gan", "accelerated", "lightning_fit", "hugging_face"])
def test_real_scripts(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is ended before it meets its bad sample."""
    skip_without_its_libraries(f"{script}.py")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    steps = 0 if script == "accumulate" else 2
    done = Smoked(SCRIPTS / f"{script}.py", tmp_path / "run", "--out", str(tmp_path / "o"), steps=steps)
    assert done.report.ok, done.reasons
    trial = done.report.trial
    assert len(trial.losses) >= steps + 1
    assert trial.chance.level is not None
    assert {layer.output for layer in trial.layers} == {"bfloat16" if script == "amp" else "float32"}
    assert {layer.weight for layer in trial.layers if layer.weight} == {"float32"}
    assert trial.scaler == (script == "amp")
    assert trial.turns == (("discriminator", "generator") if script == "gan" else ())


def test_compiled_layers_are_measured_all_the_same(tmp_path: Path) -> None:
    done = Smoked(SCRIPTS / "compiled.py", tmp_path / "run", "--out", str(tmp_path / "o"), steps=2)
    assert done.report.ok, done.reasons
    assert len(done.report.trial.layers) == 5
    assert torch.compiler.is_compiling() is False
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
    assert compiled(torch.ones(1))  # the stance is the usual one again


def test_a_scaler_that_looks_for_its_scale_is_no_failure(tmp_path: Path) -> None:
    half = "nn.functional.cross_entropy(torch.autocast('cpu', torch.float16)(model)(a).float(), b)"
    text = source(before="scaler = torch.amp.GradScaler('cpu', init_scale=2.0**24)", loss=half).replace(
        "loss.backward()\n        optimizer.step()",
        "scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()",
    )
    done = smoked(tmp_path, text, steps=3)
    assert done.report.ok, done.reasons
    assert done.report.trial.scaler
    assert done.report.trial.overflows > 0
    assert {layer.output for layer in done.report.trial.layers} == {"float16"}


@pytest.mark.parametrize(
    ("text", "result", "words"),
    [
        (source().replace("range(64)", "range(3)"), "NOTE", "ended by itself after 2 of 10 steps"),
        (source().replace("steps += 1", "steps += 1; assert steps < 3"), "FAIL", "exit code 1, after 3 steps"),
        (source() + "\nimport sys; sys.exit(3)", "PASS", ""),
        ("import sys, torch; sys.exit(3)", "FAIL", "exit code 3, after 0 steps"),
        ("import torch", "FAIL", "without a training step"),
    ],
)
def test_scripts_that_end_by_themselves(text: str, result: str, words: str, tmp_path: Path) -> None:
    done = smoked(tmp_path, text, steps=10)
    assert done.results.get("steps", "PASS") == result
    assert words in done.reasons.get("steps", "")
    assert done.report.ok == (result != "FAIL")


def test_a_loop_that_catches_every_exception_is_ended_too(tmp_path: Path) -> None:
    text = source().replace(
        "        optimizer.step()\n",
        """
        try:
            optimizer.step()
        except Exception:
            pass
""",
    )
    done = smoked(tmp_path, text, steps=4)
    assert done.report.ok
    assert "reached_the_end" not in done.main


def test_wrong_calls(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no script nothing"):
        smoke_program(Program(target="nothing.py"))
    with pytest.raises(UsageError, match="steps is -1"):
        smoke_program(Program(target="nothing.py"), steps=-1)


def test_the_verb(tmp_path: Path) -> None:
    """The script prints, reads its arguments, and imports torch itself; machines get JSON and JUnit."""
    first = "import sys\nassert 'torch' not in sys.modules\nprint('hello', sys.argv[1:])\n"
    (tmp_path / "train.py").write_text(first + source())
    words = ("smoke", "train.py", "--steps", "3", "--json", "--junit", "smoke.xml", "--", "--lr", "3")
    done = nanproof(*words, cwd=tmp_path)
    assert json.loads(done.stdout)["ok"]
    assert "hello ['--lr', '3']" in done.stderr
    assert xml.parse(tmp_path / "smoke.xml").getroot().get("failures") == "0"
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("smoke-train-")


def test_the_verb_of_a_sick_module(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(source(loss="model(a).sum() * float('nan')"))
    done = nanproof("smoke", "-m", "faulty", "--steps", "3", check=False, fresh=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "FAIL  loss finite" in done.stdout
    assert "records are in runs/smoke-faulty-" in done.stdout
    for words, said in (
        (["nothing.py"], "no script nothing.py"),
        (["faulty.py:make", "--", "x"], "takes no arguments"),
    ):
        wrong = nanproof("smoke", *words, check=False, fresh=False, cwd=tmp_path)
        assert wrong.returncode == 2
        assert said in wrong.stderr

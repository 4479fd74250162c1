"""Run folders as people have them: the cause, the settings in force, and every command that is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from diagnosing.folders import load_folders
from nanproof.cli.shell import nanproof
from nanproof.diagnosing import diagnose
from nanproof.diagnosing.sources.code_signs import read_signs

PATHS = {f.name: f for f in load_folders()}


def test_what_the_log_says_was_in_force_beats_the_code(tmp_path: Path) -> None:
    PATHS["003"].write(tmp_path)
    held = {h.setting: h for h in diagnose(tmp_path).in_force}
    assert held["lr"].value == "0.6 (out/train.log:1)"
    assert held["lr"].clash == "not 0.0006 (train.py:2)"
    assert held["precision"].value == "bf16 (train.py:5)"


def test_from_the_folder_of_a_run_the_project_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("fp16 = True\nlr = 1e-4\n")
    run = tmp_path / "runs" / "b"
    run.mkdir(parents=True)
    (run / "train.log").write_text("step 1 loss 2.0\nstep 2 loss nan\n")
    held = {h.setting: h.value for h in diagnose(run).in_force}
    assert held["precision"].startswith("fp16 (")
    assert "train.py:1" in held["precision"]


def test_of_several_runs_the_newest_is_read(tmp_path: Path) -> None:
    for name, text, when in (("a", "step 1 loss nan\n", 1_000), ("b", "step 1 loss 2.0\nstep 2 loss 1.9\n", 2_000)):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "train.log").write_text(text)
        os.utime(run / "train.log", (when, when))
    found = diagnose(tmp_path)
    assert found.verdict == "unknown"
    assert any("runs/a" in note for note in found.notes)


def test_a_checkpoint_that_the_run_wrote_after_the_break_is_no_cause(tmp_path: Path) -> None:
    from diagnosing import runs

    runs.save(tmp_path / "ckpt.pt", bad="parameter")
    (tmp_path / "train.log").write_text(
        "Overriding: learning_rate = 1000000000000.0\niter 0: loss 4.28\niter 10: loss nan\niter 20: loss nan\n"
    )
    assert diagnose(tmp_path).causes[0].name == "lr-too-high"


@pytest.mark.parametrize("name", ["train.bin", "meta.pkl", "incidents/7/batch.safetensors"])
def test_data_and_the_guards_own_files_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(range(256)) * 8)
    (tmp_path / "train.log").write_text("step 1 loss 2.0\nstep 2 loss nan\n")
    found = diagnose(tmp_path)
    assert all(x.found == "none found" for x in found.checklist if x.what == "checkpoint")


def test_an_unreadable_log_is_never_cleared(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("Traceback (most recent call last):\nFloatingPointError: boxes contain NaN.\n")
    done = CliRunner().invoke(nanproof, ["diagnose", str(tmp_path), "--json"])
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (1, "broken")


def test_no_word_is_broken_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PATHS["002"].write(tmp_path))
    monkeypatch.setenv("COLUMNS", "60")
    narrow = CliRunner().invoke(nanproof, ["diagnose", "."]).output
    monkeypatch.setenv("COLUMNS", "120")
    wide = CliRunner().invoke(nanproof, ["diagnose", ".", "--full"]).output
    assert {*narrow.split()} <= {*wide.split(), "…", "--full", "shows", "everything", "that", "was", "read."}


def test_color_only_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PATHS["002"].write(tmp_path))
    assert "x1b" not in (plain := CliRunner().invoke(nanproof, ["diagnose", "."]).output)
    monkeypatch.setattr("nanproof.text._has_colors", lambda stream: True)
    colored = CliRunner().invoke(nanproof, ["diagnose", "."]).output
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == plain


def test_places_are_paths_that_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("fp16 = True\nlr = 1e-4\n")
    run = tmp_path / "runs" / "b"
    run.mkdir(parents=True)
    (run / "train.log").write_text("step 1 loss 2.0 lr 1e-4\nstep 2 loss nan lr 1e-4\n")
    for here, folder in ((tmp_path, "runs/b"), (run, ".")):
        monkeypatch.chdir(here)
        held = [h.value.partition("(")[2].partition(":")[0].rstrip(")") for h in diagnose(folder).in_force]
        assert held
        assert all(Path(place).is_file() for place in held), held


def test_a_config_that_harden_wrote_after_the_run_was_not_in_force(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("learning_rate: 0.001\nbatch_size: 8\noptimizer: adam\n")
    (tmp_path / "train.log").write_text("step 1 loss 2.0\nstep 2 loss nan\n")
    (tmp_path / "c_stable.yaml").write_text("learning_rate: 0.0001\nbatch_size: 8\noptimizer: adam\n")
    for name, when in (("c.yaml", 1_000), ("train.log", 2_000), ("c_stable.yaml", 3_000)):
        os.utime(tmp_path / name, (when, when))
    (lr,) = [h for h in diagnose(tmp_path).in_force if h.setting == "lr"]
    assert (lr.value, lr.clash) == ("0.001 (c.yaml:1)", "")


def test_code_that_harden_wrote_after_the_run_was_not_in_force(tmp_path: Path) -> None:
    for name, rate in (("train.py", 0.05), ("train_stable.py", 0.025)):
        text = f"import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default={rate})\n"
        (tmp_path / name).write_text(text + "opt = torch.optim.Adam(model.parameters(), lr=p.parse_args().lr)\n")
    (tmp_path / "train.log").write_text("step 1 loss 2.0 lr 0.05\nstep 2 loss nan lr 0.05\n")
    for name, when in (("train.py", 1_000), ("train.log", 2_000), ("train_stable.py", 3_000)):
        os.utime(tmp_path / name, (when, when))
    (lr,) = [h for h in diagnose(tmp_path).in_force if h.setting == "lr"]
    assert lr.clash == ""


def test_fp16_by_a_config_key_without_a_scaler(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("lr: 0.0003\namp_dtype: fp16\nbatch_size: 8\n")
    (tmp_path / "train.py").write_text(
        "with torch.autocast('cuda', dtype=dtypes[cfg.amp_dtype]):\n    loss = model(x)\nloss.backward()\nopt.step()\n"
    )
    (tmp_path / "train.log").write_text("step 1 loss 2.0\nstep 2 loss 1.9\nstep 3 loss nan\nstep 4 loss nan\n")
    (found,) = [c for c in diagnose(tmp_path).causes if c.name == "amp-misuse"]
    assert "no GradScaler in the code" in found.evidence[0]


def test_a_schedule_that_starts_again_at_a_resume(tmp_path: Path) -> None:
    rows = [f"step {i} loss {3 - i / 100:.3f} lr {1e-4 * (1 - i / 200):.3g}" for i in range(0, 36, 3)]
    again = [f"step {i} loss {2.4 - i / 1000:.3f} lr {1e-4 * (1 - (i - 36) / 200):.3g}" for i in range(36, 72, 3)]
    (tmp_path / "train.log").write_text("\n".join([*rows, "Resuming from checkpoint ckpt/last.pt", *again]) + "\n")
    first = diagnose(tmp_path).causes[0]
    assert first.name == "scheduler-state-on-resume"
    assert any("starts again" in e for e in first.evidence)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(a, b, m):\n    mask = m > 0\n    a = a[mask]\n    return (a - b[mask]).abs().mean()\n", True),
        ("def f(a, m):\n    mask = m > 0\n    return a[mask].mean() if mask.any() else a.sum() * 0\n", False),
        ("def f(loss, num_pos):\n    return loss.sum() / num_pos\n", True),
        ("def f(t, num_label_tokens):\n    if num_label_tokens is not None:\n        t = t / num_label_tokens\n", True),
        ("def f(self, a, y):\n    ij = self.valid(y)\n    return a[ij].mean()\n", True),
        ("def f(loss, num_pos):\n    if num_pos == 0:\n        return loss\n    return loss.sum() / num_pos\n", False),
    ],
)
def test_means_over_nothing_are_seen_unless_they_are_thought_of(code: str, found: bool) -> None:
    assert ("divides-by-count" in {f.name for f in read_signs(code, "loss.py")}) == found


@pytest.mark.parametrize(
    ("header", "high"), [("optimizer='adadelta', lr=1.0", False), ("optimizer='adam', lr=1.0", True)]
)
def test_what_an_optimizer_bears(tmp_path: Path, header: str, high: bool) -> None:
    (tmp_path / "train.log").write_text(f"Namespace({header})\nstep 1 loss 2.0\nstep 2 loss nan\nstep 3 loss nan\n")
    assert (diagnose(tmp_path).causes[0].name == "lr-too-high") == high


def test_a_healthy_run_is_one_whose_loss_fell(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("".join(f"step {i} loss {2 + i / 60:.3f}\n" for i in range(1, 31)))
    assert diagnose(tmp_path).verdict != "healthy"


def test_a_file_of_the_user_is_not_imported(tmp_path: Path) -> None:
    """``python -m`` puts the current folder first: a glob.py there must not be taken for Python's own."""
    (tmp_path / "glob.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "train.log").write_text("step 1 loss 2.0\nstep 2 loss nan\n")
    words = [sys.executable, "-m", "nanproof", "diagnose", "."]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "loss is NaN" in done.stdout


TABLE = (
    "<table><thead><tr><th>Step</th><th>Training Loss</th></tr></thead><tbody>\n"
    "<tr><td>10</td><td>2.500000</td></tr><tr><td>20</td><td>nan</td></tr></tbody></table>"
)
OUTPUTS = [
    {"output_type": "display_data", "metadata": {}, "data": {"text/plain": ["<IPython object>"], "text/html": [TABLE]}},
    {"output_type": "error", "ename": "ValueError", "evalue": "loss is nan", "traceback": []},
]
NOTEBOOK = [
    {"cell_type": "code", "source": ["!python train.py --fp16 --lr 1e-4\n"], "outputs": []},
    {"cell_type": "code", "source": ["%time trainer.train()\n", "y = torch.log(p)\n"], "outputs": OUTPUTS},
]


def test_a_notebook_is_a_log_and_code_and_a_command_line(tmp_path: Path) -> None:
    book = {"cells": NOTEBOOK, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "train.ipynb").write_text(json.dumps(book))
    found = diagnose(tmp_path)
    held = {h.setting: h.value for h in found.in_force}
    assert found.broke
    assert held["lr"] == "0.0001 (train.ipynb)"
    assert held["precision"] == "fp16 (train.ipynb)"
    assert any("NaN since step 20" in m.what for m in found.timeline)
    assert any("loss is nan" in m.what for m in found.timeline)
    assert any("torch.log(p)" in e for c in found.causes for e in c.evidence)


TINY = """import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
w = torch.nn.Parameter(torch.ones(1))
opt = torch.optim.SGD([w], lr=parser.parse_args().lr)
for step in range(3):
    loss = (w * 2).sum()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".bash_history", "cd x\npython train.py --lr 0.1\nnohup python -u train.py --lr 0.3 > out.log 2>&1 &\nls\n"),
        (".zsh_history", ": 1700000000:0;python train.py --lr 0.1\n: 1700000001:0;python train.py --lr 0.3\n"),
        ("run.sh", "LR=0.3\nCUDA_VISIBLE_DEVICES=0 python train.py \\\n  --lr $LR\n"),
        ("train.log", "+ python train.py --lr 0.3\nstep 1 loss 2.0\nstep 2 loss nan\n"),
    ],
)
def test_the_command_line_comes_from_where_it_was_typed(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TINY)
    (tmp_path / "train.log").write_text("step 1 loss 2.0\nstep 2 loss nan\n")
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    found = diagnose(".")
    assert "nanproof run train.py --lr 0.3" in found.commands
    assert next(h.value for h in found.in_force if h.setting == "lr").startswith("0.3 (")


def test_a_script_that_reads_what_is_not_there_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(
        "data = open('data/train.csv').read()\nloss.backward()\n".replace("loss", "data")
    )
    (tmp_path / "train.log").write_text("step 1 loss 2.0\nstep 2 loss nan\n")
    monkeypatch.chdir(tmp_path)
    assert not any(c.startswith("nanproof run") for c in diagnose(".").commands)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("x\n1\n")
    assert "nanproof run train.py" in diagnose(".").commands


def test_deepspeed_trains_fp32_copies_of_fp16_weights(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("step 1 loss 2.0\nstep 2 loss 1.9\nstep 3 loss nan\nstep 4 loss nan\n")
    for flag, first in (("", "double-fp16"), (" --deepspeed ds.json", "fp16-overflow")):
        words = f"torchrun train.py --fp16 --torch_dtype float16 --learning_rate 1e-5{flag}\n"
        (tmp_path / "run.sh").write_text(words)
        assert diagnose(tmp_path).causes[0].name == first


def test_a_milestone_that_changes_nothing_after_a_resume(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("lr: !!float 1e-4\nscheduler: MultiStepLR\nmilestones: [500, 900]\ngamma: 0.5\n")
    rows = "".join(f"step {i} loss {2 - i / 2000:.4f} lr 0.0001\n" for i in range(400, 620, 20))
    (tmp_path / "train.log").write_text(f"Resuming training from checkpoint last.pt at step 400\n{rows}")
    first = diagnose(tmp_path).causes[0]
    assert first.name == "scheduler-state-on-resume"
    assert any("across step 500, a milestone" in e for e in first.evidence)
    assert not any("PyYAML" in e for c in diagnose(tmp_path).causes for e in c.evidence), "the tag makes it a number"


def test_one_term_of_several_on_a_line_that_is_no_record(tmp_path: Path) -> None:
    rows = ("[session 1][iter 0] loss: 3.9", "\t\tcls: 0.7, box: 0.2", "[session 1][iter 100] loss: nan")
    (tmp_path / "train.log").write_text("\n".join([*rows, "\t\tcls: 0.5101, box: nan", ""]))
    assert any("box NaN, others finite" in e for c in diagnose(tmp_path).causes for e in c.evidence)


TRUNCATES = "IGNORE = -100\ndef f(labels, n):\n    labels = labels[:n]\n    return labels\n"
MASKS = """def f(a, input_mask):
    fill = -float('inf')
    a.masked_fill_(~input_mask, fill)
    return a.softmax(-1)
"""
LEAVES_OUT = """class A(nn.Module):
    def __init__(self):
        self.s = nn.Parameter(torch.ones(1))
        self.t = nn.Parameter(torch.ones(1))

    def init_weights(self):
        self.s.fill_(1)
"""


@pytest.mark.parametrize(
    ("code", "sign"),
    [
        (TRUNCATES, "labels-truncated"),
        (MASKS, "masks-with-infinity"),
        (LEAVES_OUT, "left-out-of-init"),
        ("model = DDP(net)\nloss = model.module.loss(batch)\nloss.backward()\n", "bypasses-ddp"),
        ("total = Variable(torch.FloatTensor(1), requires_grad=True)\n", "raw-parameters"),
        ("p = torch.log1p(-p.clamp(max=1.0 - 1e-6))\n", "tiny-eps-at-one"),
        ("EPS = 1e-8\ndef f(w):\n    w += EPS\n    return w\n", "tiny-eps"),
        ("n = torch.norm(g)\nu = g / n\n", "pole-in-code"),
        ("r = (log_probs - old_log_probs).exp()\n", "pole-in-code"),
        ("a = torch.acos(c)\ny = torch.where(torch.isfinite(a), a, z)\n", "selects-after"),
    ],
)
def test_signs_in_code(code: str, sign: str) -> None:
    assert sign in {f.name for f in read_signs(code, "a.py")}
    assert sign not in {f.name for f in read_signs("loss = model(batch)\nloss.backward()\n", "a.py")}

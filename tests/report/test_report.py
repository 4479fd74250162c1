"""Reports: Markdown that says what is true and cannot be broken out of, pictures that hold the curves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from markdown_it import MarkdownIt
from PIL import Image

from nanproof.errors import UsageError
from nanproof.report.markdown import markdown
from nanproof.report.plot import write_png
from nanproof.run.record import RunRecord
from nanproof.watch.compare import compare
from nanproof.watch.runs import find_runs
from support.incidents import make_incident
from support.pages import write_log


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    for name, bad in (("original", tuple(range(300, 600))), ("stable", ())):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name / "training_log.jsonl", 600, bad=bad)
    make_incident(tmp_path / "original", 300)
    return tmp_path / "original", tmp_path / "stable"


def test_the_comparison_tells_the_two_apart(runs: tuple[Path, Path]) -> None:
    text = markdown(find_runs([str(r) for r in runs]))
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| ")}
    assert rows["state"][0].strip() == "died at step 300"
    assert "died" not in rows["state"][1]
    assert [c.strip() for c in rows["values not finite"]] == ["300", "0"]
    assert "step 300" in rows["first thing wrong"][0]
    assert rows["first thing wrong"][1].strip() == "nothing"


def test_a_report_holds_every_part(runs: tuple[Path, Path]) -> None:
    text = markdown(find_runs([str(runs[0])]))
    for words in (
        "### Root cause",
        "### What happened, in order",
        "### Causal chain",
        "### Verified, and not",
        "## Next steps",
        "pole in log at `model.py:12`: log at exactly zero is infinite",
        "`log → mean → loss`",
        "before, step 299: loss 2",
        "- [x] a bad step was located",
        "- [ ] every logged value is finite",
    ):
        assert words in text, words


def test_settings_that_differ_and_settings_to_change(runs: tuple[Path, Path]) -> None:
    for run, rate in zip(runs, ("0.5", "1.0e-4"), strict=True):
        (run / "config.yaml").write_text(f"optimizer:\n  name: adamw\n  lr: {rate}\nfp16: true\nmax_steps: 600\n")
    text = markdown(find_runs([str(r) for r in runs]))
    assert "| optimizer.lr | 0.5 | 0.0001 |" in text
    assert "max\\_steps | 600" not in text
    alone = markdown(find_runs([str(runs[0])]))
    assert "### Settings: before, after, why" in alone
    assert "lr" in alone.split("### Settings: before, after, why")[1].split("###")[0]


def test_a_healthy_run_is_not_accused(runs: tuple[Path, Path]) -> None:
    text = markdown(find_runs([str(runs[1])]))
    assert "No bad value and no incident was recorded." in text
    assert "- [x] every logged value is finite" in text
    for words in ("### Causal chain", "### What happened", "- [ ]", "## Next steps"):
        assert words not in text, words


def test_next_steps_are_commands_as_they_are_typed(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    command = ["python", "-m", "nanproof", "run", "--heal", "train.py", "--lr", "1e-3"]
    (runs[0] / "run.json").write_text(json.dumps({"command": command}))
    text = markdown(find_runs([str(r) for r in runs])).split("## Next steps")[1]
    assert re.findall("`(nanproof .*?)`", text) == [
        "nanproof lint --diff .",
        "nanproof smoke train.py -- --lr 1e-3",
        "nanproof rollout --init train.py",
        "nanproof run train.py --lr 1e-3",
        "nanproof watch original",
    ]


def test_names_cannot_break_out(tmp_path: Path) -> None:
    evil = "<img src=x>|`*[a](b)#"
    folder = tmp_path / evil
    folder.mkdir()
    write_log(folder / "training_log.jsonl", 10, bad=(5,))
    make_incident(folder, 5, why=evil, op=evil, chain=[evil], file=evil)
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown(find_runs([str(folder)])))
    assert "<img" not in html
    assert 'href="b"' not in html


def test_a_picture_holds_both_curves_and_the_bad_steps(runs: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "curves.png"
    write_png(find_runs([str(r) for r in runs]), out)
    pixels = np.asarray(Image.open(out).convert("RGB")).reshape(-1, 3).astype(int)

    def near(color: str) -> int:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        return int((np.abs(pixels - wanted).max(1) < 12).sum())

    assert min(near(c) for c in ("#2f6fd0", "#d97706")) > 100
    # the band of the dead run covers the right half of its chart, in its own color
    picture = np.asarray(Image.open(out).convert("RGB")).astype(int)
    height, width = picture.shape[:2]
    strip = picture[height // 8 : height // 3, int(width * 0.6) : int(width * 0.9)]
    assert ((strip[..., 2] - strip[..., 0]) > 20).mean() > 0.5


def test_a_report_says_first_that_a_run_died(runs: tuple[Path, Path]) -> None:
    head = markdown(find_runs([str(r) for r in reversed(runs)])).splitlines()[2]
    assert head.startswith("- original: **died at step 300**: loss is NaN since step 300 (300 logged values")


def test_two_runs_are_compared_beyond_their_curves(runs: tuple[Path, Path]) -> None:
    around: list[dict[str, dict[str, str]]] = [
        {"environment": {"torch": "2.6.0", "seed": "7"}, "variables": {"OMP_NUM_THREADS": "1"}},
        {"environment": {"torch": "2.7.0", "device": "cpu"}, "variables": {}},
    ]
    for run, recorded in zip(runs, around, strict=True):
        (run / "run.json").write_text(json.dumps({"command": ["python", "train.py"], **recorded}))
    found = compare(*find_runs([str(r) for r in runs]))
    assert found.step == 300
    assert found.first.startswith("loss first differs at step 300: NaN in original")
    # what only one of them has recorded is no difference, but for a variable that is not set in the other
    assert found.environment == (("OMP_NUM_THREADS", "1", "–"), ("torch", "2.6.0", "2.7.0"))
    text = markdown(find_runs([str(r) for r in runs]))
    assert "loss first differs at step 300" in text
    assert "| torch | 2.6.0 | 2.7.0 |" in text


def test_two_runs_on_other_gpus(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The names as torch gives them; this machine has no GPU, so the driver's answers are recorded ones."""
    names = ["NVIDIA A100-SXM4-80GB"] * 2, ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for run, gpus in zip(runs, names, strict=True):
        monkeypatch.setattr(torch.cuda, "get_device_name", gpus.__getitem__)
        RunRecord().write(run, "run.json", {"state": "finished", "exit_code": 0})
    text = markdown(find_runs([str(r) for r in runs]))
    assert "| devices | 2 × NVIDIA A100-SXM4-80GB | 1 × NVIDIA H100 80GB HBM3, 1 × NVIDIA A100-SXM4-80GB |" in text


def test_nothing_to_plot(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text('{"step": 1, "lr": 0.1}\n{"step": 2, "lr": 0.1}\n')
    with pytest.raises(UsageError, match="no loss"):
        write_png(find_runs([str(tmp_path / "a.log")]), tmp_path / "x.png")


def test_nothing_to_report(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("hello\n")
    with pytest.raises(UsageError, match="holds no values of a training"):
        find_runs([str(tmp_path / "a.log")])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["original", "-o", "r.md"], 0, "wrote r.md"),
        (["original", "stable", "-o", "r.html"], 0, "wrote r.html"),
        (["original", "-o", "r.pdf"], 2, "use .html, .md or .png"),
        (["nothing"], 2, "does not exist"),
    ],
)
def test_the_verb(runs: tuple[Path, Path], arguments: list[str], code: int, words: str) -> None:
    command = [sys.executable, "-m", "nanproof", "report", *arguments]
    done = subprocess.run(command, cwd=runs[0].parent, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr

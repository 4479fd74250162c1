"""Run folders as people have them: the cause, the settings in force, and every command that is printed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from diagnosing.folders import Folder, load_folders
from nanproof.cli.shell import nanproof
from nanproof.diagnosing import diagnose

DEV = load_folders(half="dev")
PATHS = {f.name: f for f in load_folders()}


def type_in(command: str) -> tuple[int, str]:
    """Type a printed command where it was printed."""
    import shlex

    words = shlex.split(command)
    assert words[0] == "nanproof"
    done = CliRunner().invoke(nanproof, words[1:])
    return done.exit_code, done.output


@pytest.mark.parametrize("folder", DEV, ids=lambda f: f.name)
def test_a_folder_is_understood(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right cause comes first with evidence, nothing is cleared, and what is printed works."""
    monkeypatch.chdir(folder.write(tmp_path))
    done = CliRunner().invoke(nanproof, ["diagnose", "."])
    found = diagnose(".")
    assert found.causes[0].name in folder.accept
    assert all(c.evidence for c in found.causes)
    assert not found.decided or found.causes[0].name in folder.accept
    assert found.benign == ("benign" in folder.accept and found.decided)
    assert done.exit_code == (0 if found.benign else 1)
    for command in found.commands:
        assert command in done.output, "the text shows exactly the commands of the record"
        code, said = type_in(command)
        assert code in (0, 1), (command, said)
        assert said.strip()


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
    wide = CliRunner().invoke(nanproof, ["diagnose", "."]).output
    assert narrow.split() == wide.split()


def test_color_only_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PATHS["002"].write(tmp_path))
    assert "x1b" not in (plain := CliRunner().invoke(nanproof, ["diagnose", "."]).output)
    monkeypatch.setattr("nanproof.text._has_colors", lambda stream: True)
    colored = CliRunner().invoke(nanproof, ["diagnose", "."]).output
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == plain

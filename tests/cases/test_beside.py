"""What `nanproof lint --beside` makes of the originals is trained; what it cannot repair, it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanproof
from nanproof.cases import find
from nanproof.cases.result import read_result
from nanproof.cases.story import copy_code

pytestmark = pytest.mark.slow


def lay_out(tmp_path: Path, name: str) -> Path:
    """The package with a copy of one case's original, in which lint may write; the rest of it by links."""
    case, package = find(name), Path(nanproof.__file__).parent
    copy = tmp_path / "nanproof" / "cases" / case.folder.name
    copy.mkdir(parents=True)
    for folder, own in ((package, "cases"), (package / "cases", case.folder.name)):
        for entry in folder.iterdir():
            if entry.name not in (own, "__pycache__"):
                (tmp_path / "nanproof" / entry.relative_to(package)).symlink_to(entry)
    copy_code(case, copy)
    shutil.copy(case.folder / "__init__.py", copy)
    return copy


def lint(folder: Path) -> str:
    words = [sys.executable, "-m", "nanproof", "lint", "--unsafe-fixes", "--beside", "."]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600, check=False).stdout


@pytest.mark.parametrize(
    ("name", "code", "file", "repair"),
    [
        ("mm-ldlm", "NP201", "losses_stable.py", "batch.mask.sum().clamp(min=1)"),
        pytest.param("restran-mhc", "NP218", "model_stable.py", "logsumexp", marks=pytest.mark.campaign),
    ],
)
def test_repaired_copies_train(tmp_path: Path, name: str, code: str, file: str, repair: str) -> None:
    """They run beside the original. What makes these two grow is a matter of their models, not of single lines."""
    copy = lay_out(tmp_path, name)
    before = {p: p.read_bytes() for p in copy.rglob("*.py")}
    (copy / "__init__.py").rename(tmp_path / "catalogue.py")  # speaks of keys that the code does not read
    said = lint(copy)
    (tmp_path / "catalogue.py").rename(copy / "__init__.py")
    assert f"{code} applied, finding gone, compiles" in said
    if name == "mm-ldlm":
        assert "NP710 training.accumulate_batches is read by no code" in said
    assert {p: p.read_bytes() for p in before} == before
    assert repair in (copy / file).read_text()
    train = ["-m", f"nanproof.cases.{copy.name}.train_stable", "--steps", "3", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, *train], env=environment, check=True, capture_output=True, timeout=600)
    assert read_result(tmp_path / "out").first_bad_step is None


@pytest.mark.parametrize("name", ["radiodiff", "lora-sft"])
def test_what_is_not_in_the_code_is_not_repaired_there(tmp_path: Path, name: str) -> None:
    """These two die of their precision; that is for harden."""
    assert "no fix to apply" in lint(lay_out(tmp_path, name))

"""Findings that nothing in the code confirms: shown on demand, and where an incident was located."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanproof import lint
from nanproof.linting.catalogue import all_rules
from nanproof.linting.engine import Linter
from nanproof.linting.rule import Rule
from nanproof.linting.settings import Settings

TEXT = """import torch


def spread(a, b):
    return torch.sqrt(((a - b) ** 2).mean())
"""


def test_an_info_is_shown_on_demand_and_fails_no_job(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(TEXT)
    assert lint(file) == ()
    (found,) = lint(file, info=True)
    assert (found.code, found.line, found.info) == ("NP205", 5, True)
    program = [sys.executable, "-m", "nanproof", "lint", str(file)]
    silent, told = (subprocess.run([*program, *more], capture_output=True, text=True) for more in ([], ["--info"]))
    assert (silent.returncode, told.returncode) == (0, 0)
    assert "NP205" not in silent.stdout
    assert "NP205 info:" in told.stdout


def test_the_setting_in_pyproject(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TEXT)
    (tmp_path / "pyproject.toml").write_text("[tool.nanproof.lint]\ninfo = true\n")
    assert [f.code for f in lint(tmp_path)] == ["NP205"]


@pytest.mark.parametrize("rule", [r for r in all_rules() if not r.code.startswith("NP0")], ids=lambda r: r.code)
def test_the_bad_example_of_a_page_is_more_than_an_info(rule: Rule) -> None:
    problems = Linter([], [rule], Settings()).data(Path("example.py"), rule.bad.encode()).problems
    assert problems

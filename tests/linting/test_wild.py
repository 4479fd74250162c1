"""Code that nobody here wrote: nothing crashes, what is not repaired keeps its bytes. `make bench` takes all of it."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import lint_wild

from nanproof.linting.discover import find_files
from nanproof.linting.engine import mentions_torch
from nanproof.linting.settings import Settings

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_a_sample_of_the_standard_library() -> None:
    files = find_files([Path(sysconfig.get_path("stdlib"))], Settings())[::30]
    assert len(files) > 40
    counts, wrong = lint_wild.check(files)
    assert wrong == []
    assert counts["repairs"] == 0


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_a_sample_of_training_code() -> None:
    everything = find_files([Path(sysconfig.get_path("purelib"))], Settings())
    files = [f for f in everything[::20] if mentions_torch(f.read_bytes())][::6]
    assert len(files) > 30
    _, wrong = lint_wild.check(files)
    assert wrong == []

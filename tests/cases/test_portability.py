"""A small part of `make portability`: the oldest instruction set, one seed. Other tests train under the newest."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanproof.cases import find_all
from support.trainings import run

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "portability.py")


@pytest.mark.parametrize("case", [case.name for case in find_all()])
def test_a_case_dies_and_is_healed_whatever_the_processor(tmp_path: Path, case: str) -> None:
    words = ("--cases", case, "--settings", "default", "--seeds", "3", "--out", str(tmp_path / "out"))
    said = run(SCRIPT, *words)
    assert "every original died and every stable variant trained" in said

"""The short part of `make chaos`, tier B: some of all operations of every writer, each fault at least once."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.interrupted import WRITERS, Case, Stage, read_case, sample
from nanproof import files

pytestmark = pytest.mark.slow

SOME = {"checkpoint": 8, "sharded checkpoint": 6, "report": 3, "incident and log": 12}


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_left_is_the_old_or_the_new(tmp_path: Path, name: str) -> None:
    stage = Stage(WRITERS[name], tmp_path / "stage")
    cases = stage.cases()
    assert cases
    for case in sample(cases, SOME.get(name, 10), seed=0):
        try:
            stage.check(case)
        except Exception as error:
            raise AssertionError(f"make chaos SEED={case}: {error}") from error


def test_a_torn_write_is_noticed(tmp_path: Path) -> None:
    """The campaign's own check: a writer that does not go through `files` leaves what is neither old nor new."""

    def prepare(home: Path) -> None:
        (home / "a").write_bytes(b"old")

    def write(home: Path) -> str:
        (home / "a").write_bytes(b"ne")
        files.write_atomic(home / "b", b"b")
        (home / "a").write_bytes(b"new")
        return ""

    writer = WRITERS["log"].__class__(name="torn", prepare=prepare, write=write, read=lambda h: (h / "a").read_bytes())
    stage = Stage(writer, tmp_path / "stage")
    with pytest.raises(AssertionError, match="neither old nor new: b'ne'"):
        stage.check(Case(writer="torn", point="write", turn=1, fault="kill"))


def test_a_case_is_read_back() -> None:
    case = Case(writer="incident and log", point="fsync-dir", turn=3, fault="eio")
    assert read_case(str(case)) == case

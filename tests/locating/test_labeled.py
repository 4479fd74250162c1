"""The labeled set: the true line of every failing program, and no alarm on any healthy one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import nanproof
from nanproof.locating import Location
from support.programs import Program, controls, failing, quietly

LOCATED: dict[str, Location] = {}


@pytest.fixture(scope="module", autouse=True)
def _without_git() -> Iterator[None]:
    """Who wrote a line is another question, and git would be started for every program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanproof.locating.find.suspect_commit", lambda file, line: "")
        yield


def locate(program: Program) -> Location:
    if program.name not in LOCATED:
        model, batch, step = program.make()
        with quietly():
            LOCATED[program.name] = nanproof.locate(step, model=model, batch=batch)
    return LOCATED[program.name]


@pytest.mark.parametrize("program", failing(), ids=lambda p: p.name)
def test_the_line_is_right(program: Program) -> None:
    found = locate(program)
    assert found.reproduced
    assert found.phase in program.phase
    if found.phase == "leaf":
        assert any(found.leaf.startswith(name) for name in program.leaf), found.leaf
        return
    assert (Path(found.file).name, found.line in program.bad) == (program.file.name, True), str(found)


@pytest.mark.parametrize("program", controls(), ids=lambda p: p.name)
def test_a_healthy_program_is_left_in_peace(program: Program) -> None:
    found = locate(program)
    assert not found.reproduced, str(found)


def test_mechanisms_and_proofs() -> None:
    """Experts may differ about a mechanism and some steps have several origins, so this is counted over the set."""
    found = {p: locate(p) for p in failing()}
    named = sum(f.mechanism in p.mechanism for p, f in found.items())
    proved = sum(f.verified is True for f in found.values())
    assert named >= 0.93 * len(found), f"{named} of {len(found)}"
    assert proved >= 0.88 * len(found), f"{proved} of {len(found)}"


def test_the_set_is_large_enough() -> None:
    assert len(failing()) >= 440
    assert len(controls()) >= 120
    assert sum("backward" in p.phase for p in failing()) >= 100

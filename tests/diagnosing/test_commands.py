"""Every command that is printed for a folder or an incident, typed where it was printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from diagnosing import runs
from diagnosing.folders import PACKED, Folder, load_folders
from diagnosing.typed import commands_of, complaint, shape
from nanproof.diagnosing import diagnose
from nanproof.diagnosing.described import FIELDS
from nanproof.diagnosing.questions import QUESTIONS, Question
from nanproof.diagnosing.text import SCREEN, as_text

pytestmark = pytest.mark.slow

FIRST = {f.name for f in load_folders()}
FOLDERS = [f for p in sorted(PACKED.parent.glob("folders*.txt")) for f in load_folders(p)]
OWN = [json.loads(line) for p in sorted(PACKED.parent.glob("incidents*.jsonl")) for line in p.read_text().splitlines()]
TYPED: set[str] = set()
"""Shapes of commands that were typed already; ``score_diagnose.py --commands`` types them all."""


def type_new(commands: list[str]) -> list[str]:
    new = [c for c in commands if shape(c) not in TYPED]
    TYPED.update(shape(c) for c in new)
    return [said for c in new if (said := complaint(c))]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_a_folder(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing confident is wrong, nothing broken is cleared, no cause lacks evidence, and every command works."""
    monkeypatch.chdir(folder.write(tmp_path))
    found = diagnose(".")
    assert not found.decided or found.causes[0].name in folder.accept
    assert not found.benign or "benign" in folder.accept
    assert all(c.evidence for c in found.causes)
    if folder.name in FIRST and int(folder.name) % 2 == 0:
        assert found.causes[0].name in folder.accept
    text = as_text(found, width=100)
    assert all(c in text for c in found.commands), "the text shows exactly the commands of the record"
    words = {*text.split(), *as_text(found, full=True, width=100).split(), "…"}
    assert words.issuperset(as_text(found, width=60).split()), "no word is broken on a narrow terminal"
    assert text.count("\n") < SCREEN
    assert type_new(commands_of(found)) == []


def test_incidents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = []
    for incident in OWN:
        path = Path(f"{incident['id']}.json")
        path.write_text(json.dumps({k: incident[k] for k in FIELDS if k in incident}))
        wrong += type_new(commands_of(diagnose(evidence=path)))
    assert wrong == []


@pytest.mark.parametrize("write", [runs.scheduler_run, runs.double_fp16_run, runs.autocast_run, runs.incident])
def test_runs(write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    assert type_new(commands_of(diagnose("."))) == []


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.name)
def test_answers(question: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer of each question, also of those that none of the folders leads to."""
    monkeypatch.chdir(tmp_path)
    commands = [f"nanproof diagnose --fact loss=nan --fact {question.name}={a}" for a in question.answers]
    assert type_new(commands) == []

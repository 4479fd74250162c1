"""Quarantine: journalled, undoable, whole after a kill at any operation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint import writers
from nanproof.checkpoint import scan_series
from nanproof.checkpoint.quarantine import quarantine, undo
from nanproof.errors import FormatError, UsageError


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.pt"))}


def test_moves_the_bad_and_puts_them_back(tmp_path: Path) -> None:
    run, bad = writers.series(tmp_path / "run", "hbpd"), tmp_path / "run" / "bad"
    before = tree(run)
    moves = quarantine(list(scan_series(run)), bad)
    assert [Path(new).name for _, new in moves] == ["step_1.pt", "step_2.pt", "step_3.pt"]
    assert {p.name for p in run.glob("*.pt")} == {"step_0.pt"}
    assert scan_series(run).ok
    assert len(undo(bad)) == 3
    assert tree(run) == before
    assert undo(bad) == []


def test_suspect_and_unknown_files_stay(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(4, 4)}, tmp_path / "suspect.pt")
    (tmp_path / "text.pt").write_text("hello")
    assert {r.health for r in scan_series(tmp_path)} == {"suspect", "unreadable"}
    assert quarantine(list(scan_series(tmp_path)), tmp_path / "bad") == []
    assert not (tmp_path / "bad").exists()


def test_same_names_do_not_collide_and_folders_move_whole(tmp_path: Path) -> None:
    for run in ("a", "b"):
        folder = tmp_path / run / "checkpoint-5"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text("{}")
        (folder / "optimizer.pt").write_bytes(b"")
    quarantine(list(scan_series(tmp_path / "a", tmp_path / "b")), tmp_path / "bad")
    assert {p.name for p in (tmp_path / "bad").iterdir()} == {"checkpoint-5", "checkpoint-5.2", "quarantine.jsonl"}
    undo(tmp_path / "bad")
    assert (tmp_path / "b" / "checkpoint-5" / "trainer_state.json").exists()


def test_undo_refuses_to_overwrite_and_says_what_to_do(tmp_path: Path) -> None:
    run, bad = writers.series(tmp_path / "run", "b"), tmp_path / "bad"
    quarantine(list(scan_series(run)), bad)
    (run / "step_0.pt").write_text("new")
    with pytest.raises(UsageError, match=r"is there again.*Next: move it away"):
        undo(bad)
    (run / "step_0.pt").unlink()
    assert len(undo(bad)) == 1
    with pytest.raises(UsageError, match=r"has no quarantine\.jsonl"):
        undo(tmp_path / "run")
    (tmp_path / "run" / "quarantine.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(FormatError, match="not a quarantine journal"):
        undo(tmp_path / "run")


@pytest.mark.parametrize(
    "line",
    [
        '{"action": "move", "from": "{0}/taken.pt", "to": "{0}/private/key"}',
        "[1]",
        "{",
        "[" * 100_000,
        '{"action": "move", "from": "{0}/key\\u0000", "to": "key"}',
        '{"action": "move", "from": "", "to": ".."}',
    ],
)
def test_a_journal_that_somebody_else_wrote_moves_nothing_from_elsewhere(line: str, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "quarantine.jsonl").write_text(line.replace("{0}", str(tmp_path)) + "\n")
    with pytest.raises(FormatError, match="not a quarantine journal"):
        undo(bad)
    (bad / "quarantine.jsonl").write_text(
        f'{{"action": "move", "from": "{tmp_path}/b/key", "to": "{tmp_path}/private/key"}}\n'
    )
    assert undo(bad) == []
    assert (tmp_path / "private" / "key").read_text() == "secret"


def test_a_quarantine_that_was_renamed_is_undone(tmp_path: Path) -> None:
    run, bad = writers.series(tmp_path / "run", "hb"), tmp_path / "bad"
    before = tree(run)
    quarantine(list(scan_series(run)), bad)
    assert len(undo(bad.rename(tmp_path / "elsewhere"))) == 1
    assert tree(run) == before


@pytest.mark.parametrize("fault", ["kill", "enospc"])
@pytest.mark.parametrize(
    "point", [f"{p}:{n}" for p in ("append", "rename", "fsync-dir", "mkdir") for n in (1, 2) if (p, n) != ("mkdir", 2)]
)
def test_a_fault_at_any_operation_loses_nothing(point: str, fault: str, tmp_path: Path) -> None:
    run, bad = writers.series(tmp_path / "run", "hbp"), tmp_path / "bad"
    before = tree(run)
    environment = os.environ | {"NANPROOF_FAULT": f"{point}:{fault}"}
    command = [sys.executable, "-m", "nanproof", "scan", str(run), "--quarantine", str(bad)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == (-9 if fault == "kill" else 2), done.stderr
    assert "Traceback" not in done.stderr
    everywhere = {p.name: p.read_bytes() for p in [*run.glob("*.pt"), *bad.glob("*.pt")]}
    assert everywhere == before
    if (bad / "quarantine.jsonl").exists():
        undo(bad)
    assert tree(run) == before
    shutil.rmtree(bad, ignore_errors=True)

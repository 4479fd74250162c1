"""Old or new, never torn: whatever interrupts a write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanproof import files
from nanproof.errors import LockedError, UsageError


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    files.disarm()


OLD, NEW = b"old" * 1000, b"new" * 2000


@pytest.mark.parametrize("fault", ["enospc", "eio", "short"])
@pytest.mark.parametrize("point", ["create", "write", "fsync", "rename"])
def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, point: str, fault: files.Fault) -> None:
    target = tmp_path / "a.bin"
    files.write_atomic(target, OLD)
    files.arm(point, fault=fault)
    with pytest.raises(OSError, match=r"armed at|were written"):
        files.write_atomic(target, NEW)
    assert target.read_bytes() == OLD
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    files.disarm()
    files.write_atomic(target, NEW)
    assert target.read_bytes() == NEW


CHILD = "import sys; from nanproof import files; files.write_atomic(sys.argv[1], b'new' * 2000)"


def child(code: str, fault: str, *arguments: str) -> int:
    env = {**os.environ, "NANPROOF_FAULT": fault}
    return subprocess.run([sys.executable, "-c", code, *arguments], env=env, check=False, timeout=600).returncode


@pytest.mark.parametrize("point", ["create", "write", "fsync", "rename", "fsync-dir"])
def test_a_kill_leaves_old_or_new(tmp_path: Path, point: str) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(OLD)
    assert child(CHILD, f"{point}:1:kill", str(target)) == -9
    assert target.read_bytes() == (NEW if point == "fsync-dir" else OLD)
    assert child(CHILD, "", str(target)) == 0
    assert target.read_bytes() == NEW


def test_a_fault_fires_only_on_its_turn(tmp_path: Path) -> None:
    files.arm("rename", on=2)
    files.write_atomic(tmp_path / "a", b"1")
    with pytest.raises(OSError, match="armed at rename"):
        files.write_atomic(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_unknown_fault_is_refused() -> None:
    with pytest.raises(UsageError, match="no fault nowhere:enospc"):
        files.arm("nowhere")


FOLDER = """
import sys; from nanproof import files
with files.atomic_folder(sys.argv[1]) as f:
    files.write_atomic(f / "x", b"x"); files.write_atomic(f / "y", b"y")
"""


@pytest.mark.parametrize("fault", ["mkdir:1:kill", "write:2:kill", "rename:2:kill", "rename:3:kill", "fsync:4:kill"])
def test_a_killed_folder_is_absent_or_whole(tmp_path: Path, fault: str) -> None:
    target = tmp_path / "folder"
    assert child(FOLDER, fault, str(target)) == -9
    assert not target.exists()
    assert child(FOLDER, "fsync-dir:4:kill", str(target)) == -9
    assert sorted(p.name for p in target.iterdir()) == ["x", "y"]


def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"), files.atomic_folder(tmp_path):
        pass


def test_jsonl_heals_a_torn_line(tmp_path: Path) -> None:
    log = files.JsonLines(tmp_path / "log.jsonl")
    log.append([{"a": 1}])
    with open(log.path, "ab") as file:
        file.write(b'{"a": 2, "long": "' + b"x" * 100_000)
    assert list(files.read_jsonl(log.path)) == [{"a": 1}]
    log.append([{"a": 3}])
    assert list(files.read_jsonl(log.path)) == [{"a": 1}, {"a": 3}]


def test_jsonl_of_one_torn_line_starts_again(tmp_path: Path) -> None:
    log = files.JsonLines(tmp_path / "log.jsonl")
    log.path.write_bytes(b'{"a"')
    log.append([{"a": 1}])
    assert log.path.read_bytes() == b'{"a":1}\n'


def test_jsonl_on_a_full_disk_keeps_whole_lines(tmp_path: Path) -> None:
    log = files.JsonLines(tmp_path / "log.jsonl")
    log.append([{"a": 1}])
    files.arm("append", fault="short")
    with pytest.raises(OSError, match="fitted"):
        log.append([{"a": 2}, {"a": 3}])
    assert log.path.read_bytes() == b'{"a":1}\n'
    log.append([])
    assert log.path.read_bytes() == b'{"a":1}\n'


def test_jsonl_damage_in_the_middle_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b'{"a":1}\n{"a"\n{"a":3}\n')
    with pytest.raises(json.JSONDecodeError):
        list(files.read_jsonl(tmp_path / "log"))


def test_a_lock_names_its_owner_and_dies_with_it(tmp_path: Path) -> None:
    lock = files.Lock(tmp_path)
    lock.acquire()
    with pytest.raises(LockedError, match=rf"in use by process {os.getpid()} on .*Next: give this run a folder"):
        files.Lock(tmp_path).acquire()
    lock.release()
    code = "import os, sys; from nanproof.files import Lock; Lock(sys.argv[1]).acquire(); os.kill(os.getpid(), 9)"
    assert child(code, "", str(tmp_path)) == -9
    again = files.Lock(tmp_path)
    again.acquire()
    again.release()
    again.release()


def test_move_and_remove(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"c")
    with pytest.raises(UsageError, match="exists already"):
        files.move(tmp_path / "a", tmp_path / "b")
    files.move(tmp_path / "a", tmp_path / "b" / "a")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["a", "c"]
    files.remove(tmp_path / "b" / "a")
    files.remove(tmp_path / "b")
    files.remove(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_replaced(tmp_path: Path) -> None:
    files.link("one", tmp_path / "last")
    files.link("two", tmp_path / "last")
    assert (tmp_path / "last").readlink() == Path("two")
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_what_killed_processes_left_is_cleaned_by_the_next_write(tmp_path: Path) -> None:
    code = "import sys; from nanproof import files; files.write_atomic(sys.argv[1], b'new')"
    target = tmp_path / "a.bin"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code, str(target)], env=os.environ | {"NANPROOF_FAULT": "rename:1:kill"})
    assert len(list(tmp_path.glob(".a.bin.*.tmp"))) == 1  # each cleaned what the one before it had left
    foreign = tmp_path / ".a.bin.1-00000000.tmp"  # of another machine, where that process may be alive
    own = tmp_path / f".a.bin.{os.getpid()}-{files._machine()}.tmp"
    mine = tmp_path / ".a.bin.tmp"
    for path in (foreign, own, mine):
        path.write_bytes(b"x")
    files.write_atomic(tmp_path / "b.bin", b"")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["b.bin", foreign.name, own.name, mine.name])

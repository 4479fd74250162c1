"""Changes that can be taken back bit for bit, whatever interrupts them."""

from __future__ import annotations

import itertools
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nanproof import files, journal
from nanproof.errors import FormatError, UsageError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    files.disarm()


OLD = {"a.py": b"one\r\n", "pkg/b.py": b"\xef\xbb\xbftwo\t", "pkg/c.py": b"three"}
NEW = {"a.py": b"ONE\r\n", "pkg/b.py": b"TWO", "pkg/c.py": b"THREE", "pkg/made.py": b"made"}


def plant(home: Path) -> dict[Path, bytes]:
    (home / "pkg").mkdir()
    for name, data in OLD.items():
        (home / name).write_bytes(data)
    return {home / name: data for name, data in NEW.items()}


def contents(home: Path) -> dict[str, bytes]:
    """Everything under a folder but the journal, hidden litter included."""
    found = (p for p in home.rglob("*") if p.is_file() and ".nanproof" not in p.parts)
    return {p.relative_to(home).as_posix(): p.read_bytes() for p in found}


def test_apply_and_undo_exactly(tmp_path: Path) -> None:
    changes = plant(tmp_path)
    (tmp_path / "a.py").chmod(0o751)
    done = journal.apply(changes, home=tmp_path, why="lint --fix", details={"codes": ["NP301"]})
    assert contents(tmp_path) == NEW
    assert stat.S_IMODE((tmp_path / "a.py").stat().st_mode) == 0o751
    assert [a.id for a in journal.applications(tmp_path)] == [done.id]
    assert journal.applications(tmp_path)[0] == done
    assert {p.name for p in journal.undo(tmp_path)} == {"a.py", "b.py", "c.py", "made.py"}
    assert contents(tmp_path) == OLD
    assert stat.S_IMODE((tmp_path / "a.py").stat().st_mode) == 0o751
    with pytest.raises(UsageError, match="nothing to undo"):
        journal.undo(tmp_path)
    with pytest.raises(UsageError, match="undone already"):
        journal.undo(tmp_path, done.id)


def test_several_are_undone_last_first_or_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0")
    (tmp_path / "b").write_bytes(b"0")
    first = journal.apply({tmp_path / "a": b"1"}, home=tmp_path, why="one")
    second = journal.apply({tmp_path / "b": b"1"}, home=tmp_path, why="two")
    third = journal.apply({tmp_path / "b": b"2"}, home=tmp_path, why="three")
    journal.undo(tmp_path, first.id)
    assert (tmp_path / "a").read_bytes() == b"0"
    with pytest.raises(UsageError, match=r"b was edited since two"):
        journal.undo(tmp_path, second.id)
    with pytest.raises(UsageError, match=rf"no change 'x' to undo.*choose from {second.id}, {third.id}"):
        journal.undo(tmp_path, "x")
    journal.undo(tmp_path)
    assert (tmp_path / "b").read_bytes() == b"1"
    journal.undo(tmp_path)
    assert contents(tmp_path) == {"a": b"0", "b": b"0"}


@pytest.mark.parametrize("how", ["edited", "removed"])
def test_undo_refuses_what_the_user_touched(tmp_path: Path, how: str) -> None:
    done = journal.apply(plant(tmp_path), home=tmp_path, why="lint --fix")
    file = tmp_path / "pkg" / "b.py"
    if how == "edited":
        file.write_bytes(b"mine")
    else:
        file.unlink()
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=rf"pkg/b\.py was {how} since lint --fix.*nothing was undone") as caught:
        journal.undo(tmp_path)
    assert contents(tmp_path) == before
    backup = next(t.backup for t in done.files if t.path.endswith("b.py"))
    assert backup is not None
    assert str(tmp_path / ".nanproof" / "journal" / done.id / backup) in str(caught.value)


def test_a_created_file_that_the_user_removed_is_fine(tmp_path: Path) -> None:
    journal.apply(plant(tmp_path), home=tmp_path, why="beside")
    (tmp_path / "pkg" / "made.py").unlink()
    journal.undo(tmp_path)
    assert contents(tmp_path) == OLD


def test_links_are_followed_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.py").write_bytes(b"old")
    (tmp_path / "link.py").symlink_to("real.py")
    journal.apply({tmp_path / "link.py": b"new"}, home=tmp_path, why="fix")
    assert (tmp_path / "link.py").is_symlink()
    assert (tmp_path / "real.py").read_bytes() == b"new"
    journal.undo(tmp_path)
    assert (tmp_path / "link.py").is_symlink()
    assert (tmp_path / "real.py").read_bytes() == b"old"


@pytest.mark.parametrize("target", ["pkg/b.py", "pkg"])
def test_read_only_is_refused_before_anything_happens(tmp_path: Path, target: str) -> None:
    changes = plant(tmp_path)
    place = tmp_path / target
    before = place.stat().st_mode
    place.chmod(before & ~0o222)
    try:
        with pytest.raises(UsageError, match="is read-only; nothing was changed"):
            journal.apply(changes, home=tmp_path, why="fix")
    finally:
        place.chmod(before)
    assert contents(tmp_path) == OLD
    assert not (tmp_path / ".nanproof").exists()


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere does not exist; nothing was changed"):
        journal.apply({tmp_path / "nowhere" / "a.py": b""}, home=tmp_path, why="fix")


@pytest.mark.parametrize("fault", ["enospc", "eio", "short"])
@pytest.mark.parametrize("point", ["create", "write", "rename", "fsync", "mkdir"])
def test_a_full_disk_at_any_write_leaves_the_old_files(tmp_path: Path, point: str, fault: files.Fault) -> None:
    changes = plant(tmp_path)
    for turn in itertools.count(1):
        files.arm(point, on=turn, fault=fault)
        try:
            journal.apply(changes, home=tmp_path, why="fix")
        except (OSError, UsageError):
            files.disarm()
            journal.recover(tmp_path)
            assert contents(tmp_path) in (OLD, NEW)  # NEW: only the mark of the end did not fit
            if contents(tmp_path) == NEW:
                journal.undo(tmp_path)
            continue
        break
    assert turn > 1 or point == "mkdir" or fault == "short"
    files.disarm()
    assert contents(tmp_path) == NEW


def apply(home: Path) -> None:
    journal.apply({home / name: data for name, data in NEW.items()}, home=home, why="fix")


def killed(action: Callable[[Path], object], home: Path, point: str, turn: int) -> bool:
    """Run in a child process that dies at the turn-th pass of a fault point; false if it came to its end."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            files.arm(point, on=turn, fault="kill")
            action(home)
            os._exit(0)
        os._exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_the_environment_arms_a_kill(tmp_path: Path) -> None:
    plant(tmp_path)
    code = "import sys, pathlib; from nanproof import journal; h = pathlib.Path(sys.argv[1]); "
    code += "journal.apply({h / 'a.py': b'x', h / 'pkg/b.py': b'y'}, home=h, why='fix')"
    environment = {**os.environ, "NANPROOF_FAULT": "rename:7:kill"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert contents(tmp_path)["a.py"] == b"x"
    assert len(journal.recover(tmp_path)) == 1
    assert contents(tmp_path) == OLD


POINTS = ("create", "write", "fsync", "rename", "fsync-dir", "mkdir", "lock", "remove")


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_every_operation_of_applying(tmp_path: Path, point: str) -> None:
    """After each kill, recovery leaves all old or all new; then it works, and can be undone."""
    for turn in itertools.count(1):
        home = tmp_path / str(turn)
        home.mkdir()
        plant(home)
        if not killed(apply, home, point, turn):
            break
        recovered = journal.recover(home)
        assert contents(home) in (OLD, NEW)
        assert not journal.unfinished(home)
        if recovered:
            assert contents(home) == OLD
        if contents(home) == OLD:
            apply(home)
        assert contents(home) == NEW
        journal.undo(home)
        assert contents(home) == OLD
        assert not list(home.rglob("*.tmp"))
    assert turn > 1 or point == "remove"


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_every_operation_of_undoing(tmp_path: Path, point: str) -> None:
    for turn in itertools.count(1):
        home = tmp_path / str(turn)
        home.mkdir()
        journal.apply(plant(home), home=home, why="fix")
        if not killed(journal.undo, home, point, turn):
            break
        journal.recover(home)
        if journal.applications(home):
            assert contents(home) == NEW
            journal.undo(home)
        assert contents(home) == OLD
        assert not list(home.rglob("*.tmp"))
    assert turn > 1 or point == "mkdir"


@pytest.mark.parametrize("point", ["write", "rename", "remove", "fsync-dir"])
def test_a_kill_of_the_recovery_is_recovered(tmp_path: Path, point: str) -> None:
    for turn in itertools.count(1):
        home = tmp_path / str(turn)
        home.mkdir()
        plant(home)
        assert killed(apply, home, "rename", 8)
        assert journal.unfinished(home)
        assert contents(home) not in (OLD, NEW)
        again = killed(journal.recover, home, point, turn)
        journal.recover(home)
        assert contents(home) == OLD
        assert not journal.unfinished(home)
        if not again:
            break
    assert turn > 1


def test_recovery_keeps_what_the_user_edited_meanwhile(tmp_path: Path) -> None:
    plant(tmp_path)
    assert killed(apply, tmp_path, "rename", 8)
    (tmp_path / "a.py").write_bytes(b"mine")
    assert len(journal.recover(tmp_path)) == 1
    assert contents(tmp_path) == {**OLD, "a.py": b"mine"}


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    changes = plant(tmp_path)
    lock = files.Lock(files.make_folder(tmp_path / journal.FOLDER))
    lock.acquire()
    with pytest.raises(files.LockedError, match="in use by process"):
        journal.apply(changes, home=tmp_path, why="fix")
    lock.release()
    assert contents(tmp_path) == OLD


def test_rubbish_in_the_journal_is_named(tmp_path: Path) -> None:
    files.make_folder(tmp_path / journal.FOLDER / "0001")
    with pytest.raises(FormatError, match="0001 is not a journal entry"):
        journal.undo(tmp_path)


def test_the_home_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "src" / "deep").mkdir(parents=True)
    assert journal.home_of(tmp_path / "src" / "deep" / "a.py") == tmp_path
    files.make_folder(tmp_path / "src" / journal.FOLDER)
    assert journal.home_of(tmp_path / "src" / "deep") == tmp_path / "src"


def _forge(home: Path, **fields: object) -> Path:
    """An application, and then its entry as somebody else would like it."""
    import json

    done = journal.apply({home / "a.py": b"new"}, home=home, why="fix")
    entry = home / ".nanproof" / "journal" / done.id / "entry.json"
    data = json.loads(entry.read_bytes())
    data["files"][0] |= fields
    entry.write_text(json.dumps(data))
    return entry


@pytest.mark.parametrize("path", ["{outside}", "../outside.py", "pkg/../../outside.py", "link/outside.py"])
def test_an_entry_cannot_lead_out_of_the_project(tmp_path: Path, path: str) -> None:
    home, outside = tmp_path / "project", tmp_path / "outside.py"
    home.mkdir()
    (home / "a.py").write_bytes(b"old")
    (home / "link").symlink_to(tmp_path)
    outside.write_bytes(b"new")  # the very bytes that the entry says it wrote
    _forge(home, path=path.format(outside=outside))
    for act in (journal.undo, journal.recover):
        with pytest.raises((UsageError, FormatError), match="outside of the project"):
            act(home)
    assert outside.read_bytes() == b"new"


@pytest.mark.parametrize("link", [".nanproof", ".nanproof/journal", ".nanproof/journal/.lock"])
def test_a_link_in_place_of_the_journal_leads_nowhere(tmp_path: Path, link: str) -> None:
    """A repository can hold links: what they point to is neither emptied, cleaned nor written to."""
    home, outside = tmp_path / "project", tmp_path / "outside"
    (home / link).parent.mkdir(parents=True)
    outside.mkdir()
    (outside / ".mine.tmp").write_bytes(b"mine")
    (home / "a.py").write_bytes(b"old")
    (home / link).symlink_to(outside / ".mine.tmp" if link.endswith("lock") else outside)
    for act in (lambda: journal.apply({home / "a.py": b"new"}, home=home, why="fix"), lambda: journal.undo(home)):
        with pytest.raises(UsageError, match=r"is a symbolic link|nothing to undo"):
            act()
    assert (home / "a.py").read_bytes() == b"old"
    assert {p.name: p.read_bytes() for p in outside.iterdir()} == {".mine.tmp": b"mine"}


@pytest.mark.parametrize(
    "entry",
    [
        "[]",
        "null",
        '"x"',
        "{",
        "[" * 100_000,
        '{"version": "x"}',
        '{"version": null}',
        '{"version": 1, "files": {}}',
        '{"id": 1, "time": "", "why": "", "files": [{}], "version": 1}',
    ],
)
def test_an_entry_that_does_not_follow_the_schema_is_named(tmp_path: Path, entry: str) -> None:
    place = files.make_folder(tmp_path / journal.FOLDER / "0001")
    (place / "entry.json").write_text(entry)
    (tmp_path / "a.py").write_bytes(b"old")
    for act in (
        lambda: journal.apply({tmp_path / "a.py": b"new"}, home=tmp_path, why="x"),
        lambda: journal.undo(tmp_path),
    ):
        with pytest.raises(FormatError, match="0001 is not a journal entry"):
            act()
    assert (tmp_path / "a.py").read_bytes() == b"old"


@pytest.mark.parametrize(
    "fields",
    [
        {"backup": "../../../../outside.py"},
        {"backup": "/etc/passwd"},
        {"new": "x"},
        {"mode": 1 << 20},
        {"backup": None},
    ],
)
def test_an_entry_that_makes_no_sense_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    (tmp_path / "a.py").write_bytes(b"old")
    _forge(tmp_path, **fields)
    with pytest.raises(FormatError):
        journal.undo(tmp_path)
    assert (tmp_path / "a.py").read_bytes() == b"new"


def test_a_backup_that_was_exchanged_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"old")
    done = journal.apply({tmp_path / "a.py": b"new"}, home=tmp_path, why="fix")
    (tmp_path / ".nanproof" / "journal" / done.id / (done.files[0].backup or "")).write_bytes(b"evil")
    with pytest.raises(FormatError, match="not what was saved"):
        journal.undo(tmp_path)
    assert (tmp_path / "a.py").read_bytes() == b"new"


def test_files_outside_of_the_project_are_not_changed(tmp_path: Path) -> None:
    home, outside = tmp_path / "project", tmp_path / "outside.py"
    home.mkdir()
    outside.write_bytes(b"mine")
    (home / "link.py").symlink_to(outside)
    with pytest.raises(UsageError, match="outside of the project"):
        journal.apply({home / "link.py": b"new"}, home=home, why="fix")
    assert outside.read_bytes() == b"mine"


def test_a_file_edited_since_it_was_read_is_refused(tmp_path: Path) -> None:
    changes = plant(tmp_path)
    seen = {tmp_path / name: data for name, data in OLD.items()}
    (tmp_path / "pkg" / "c.py").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"c\.py was edited since it was read"):
        journal.apply(changes, home=tmp_path, why="fix", seen=seen)
    assert contents(tmp_path) == {**OLD, "pkg/c.py": b"mine"}


def test_a_file_edited_in_the_last_moment_is_left_and_the_others_are_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = plant(tmp_path)
    whole = os.fsync
    edited = tmp_path / "pkg" / "b.py"

    def fsync(fd: int) -> None:  # the moment before the rename
        whole(fd)
        if ".b.py." in Path(f"/proc/self/fd/{fd}").readlink().name:
            edited.write_bytes(b"mine")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UsageError, match=r"b\.py was edited in this moment"):
        journal.apply(changes, home=tmp_path, why="fix")
    assert contents(tmp_path) == {**OLD, "pkg/b.py": b"mine"}


def test_hard_links_and_modes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"old and longer")
    (tmp_path / "a.py").chmod(0o640)
    os.link(tmp_path / "a.py", tmp_path / "same.py")
    journal.apply({tmp_path / "a.py": b"new"}, home=tmp_path, why="fix")
    assert (tmp_path / "same.py").read_bytes() == b"new"
    assert (tmp_path / "a.py").stat().st_nlink == 2
    journal.undo(tmp_path)
    assert (tmp_path / "same.py").read_bytes() == b"old and longer"
    assert stat.S_IMODE((tmp_path / "a.py").stat().st_mode) == 0o640


@pytest.mark.parametrize("fault", ["write", "fsync"])
def test_a_hard_link_killed_half_way_is_recovered(tmp_path: Path, fault: str) -> None:
    (tmp_path / "a.py").write_bytes(b"old and longer")
    os.link(tmp_path / "a.py", tmp_path / "same.py")
    code = "import sys, pathlib; from nanproof import journal; home = pathlib.Path(sys.argv[1]);"
    code += "journal.apply({home / 'a.py': b'new'}, home=home, why='fix')"
    kills = 0
    for turn in range(1, 12):
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"NANPROOF_FAULT": f"{fault}:{turn}:kill"}
        )
        if run.returncode == 0:
            break
        kills += 1
        journal.recover(tmp_path)
        assert (tmp_path / "same.py").read_bytes() == b"old and longer"
        assert (tmp_path / "a.py").stat().st_nlink == 2
    assert kills >= 3

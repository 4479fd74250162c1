"""Moving bad checkpoints out of the way, with a journal that can put every one of them back."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import files
from ..errors import FormatError, UsageError
from .calls import KNOWN
from .layout import JOURNAL
from .report import ScanReport

MOVED = ("corrupt", "damaged", "refused")


def quarantine(reports: list[ScanReport], folder: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Move what is corrupt, damaged, refused or dangerous to load into ``folder``; returns pairs of old and new path.

    The intent is journalled before each move, so that a kill between the two is undone as well.
    """
    home = Path(folder)
    chosen = [r for r in reports if r.health in MOVED or any(KNOWN in words for words in r.calls)]
    for report in chosen:
        if "://" in report.path or not os.path.lexists(report.path):
            raise UsageError(f"{report.path} is not on this machine", hint="quarantine works on local files only")
        if home.resolve().is_relative_to(Path(report.path).resolve()):
            raise UsageError(f"{folder} lies inside {report.path}", hint="choose a folder outside of it")
    if not chosen:
        return []
    files.make_folder(home)
    journal = files.JsonLines(home / JOURNAL)
    moves = []
    for report in chosen:
        source = Path(report.path).absolute()
        target = _free(home / source.name).absolute()
        record = {"action": "move", "from": str(source), "to": str(target), "health": report.health}
        journal.append([{**record, "why": list(report.reasons[:3])}])
        _move(source, target)
        moves.append((str(source), str(target)))
    return moves


def undo(folder: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Put back everything that a quarantine folder still holds; returns pairs of old and new path."""
    home = Path(folder)
    if not (home / JOURNAL).is_file():
        raise UsageError(f"{folder} has no {JOURNAL}", hint="give the folder that --quarantine moved to")
    open_moves: dict[str, str] = {}
    for record in _records(home):
        source, target = _pair(record, home)
        if record.get("action") == "move":
            open_moves[target] = source
        else:
            open_moves.pop(target, None)
    returned = []
    for target, source in reversed(open_moves.items()):
        if not os.path.lexists(target):
            continue  # killed before the move, or taken out by hand
        if os.path.lexists(source):
            raise UsageError(f"{source} is there again", hint="move it away, then run --undo again")
        files.make_folder(Path(source).parent)
        _move(Path(target), Path(source))
        files.JsonLines(home / JOURNAL).append([{"action": "undo", "from": source, "to": target}])
        returned.append((target, source))
    return returned


def _records(home: Path) -> Iterator[Any]:
    try:
        yield from files.read_jsonl(home / JOURNAL)
    except (ValueError, RecursionError):
        raise _foreign(home) from None


def _pair(record: Any, home: Path) -> tuple[str, str]:
    """Where a checkpoint was, and where in this folder it is: a journal that somebody else wrote moves nothing else."""
    source, target = (record.get("from"), record.get("to")) if isinstance(record, dict) else (None, None)
    if not isinstance(source, str) or not isinstance(target, str):
        raise _foreign(home)
    name = Path(target).name
    renamed = name.removeprefix(Path(source).name)  # a name that was taken got a number
    if not name or "\0" in source + target or not re.fullmatch(r"(\.\d+)?", renamed):
        raise _foreign(home)
    return source, str(home.absolute() / name)


def _foreign(home: Path) -> FormatError:
    return FormatError(f"{home / JOURNAL} is not a quarantine journal", hint="give the folder of --quarantine")


def _free(target: Path) -> Path:
    """A name that is not taken: the same checkpoint name may come from several runs."""
    candidate, n = target, 1
    while os.path.lexists(candidate):
        n += 1
        candidate = target.with_name(f"{target.name}.{n}")
    return candidate


def _move(source: Path, target: Path) -> None:
    try:
        files.move(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise UsageError(
            f"{target.parent} is on another disk than {source}", hint="choose a folder on the same disk"
        ) from None

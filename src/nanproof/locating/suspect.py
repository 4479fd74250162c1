"""The commit that last changed a line: who wrote it, and when."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

_SECONDS = 3.0


def suspect_commit(file: str, line: int) -> str:
    """``abc1234 by Ada, 2026-03-01: "use exp"``; empty when git does not know the file.

    >>> suspect_commit("no such file.py", 1)
    ''
    """
    path = Path(file)
    if not line or not path.is_file():
        return ""
    words = ("git", "--no-pager", "blame", "--porcelain", "-L", f"{line},{line}", "--", path.name)
    try:
        done = subprocess.run(
            words,
            cwd=path.parent,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return _read(done.stdout)


def _read(porcelain: str) -> str:
    lines = porcelain.splitlines()
    if not lines:
        return ""
    commit = lines[0].split(" ", 1)[0]
    if not commit.strip("0"):
        return "you: the line is not committed yet"
    said = dict(text.split(" ", 1) for text in lines[1:] if " " in text and not text.startswith("\t"))
    when = datetime.datetime.fromtimestamp(int(said.get("author-time", "0")), datetime.UTC).date()
    return f"{commit[:9]} by {said.get('author', '?')}, {when}: {said.get('summary', '')}"

"""Which files git leaves out, read from `.gitignore` without running git."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from ..files import file_text


class Ignored:
    """The `.gitignore` files from the top of a repository down; the last pattern that matches decides.

    >>> rules = compile_lines(["build/", "*.gen.py", "!keep.gen.py", "/data"])
    >>> [decide(rules, p, folder) for p, folder in (("a/build", True), ("x.gen.py", False), ("keep.gen.py", False))]
    [True, True, False]
    """

    def __init__(self, start: Path) -> None:
        folder = start.absolute() if start.is_dir() else start.absolute().parent
        self.root = next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)

    def __call__(self, path: Path, *, folder: bool) -> bool:
        if self.root is None:
            return False
        full = path.absolute()
        if not full.is_relative_to(self.root):
            return False
        verdict = False
        place = self.root
        for part in ("", *full.relative_to(self.root).parts[:-1]):
            place = place / part if part else place
            found = decide(_read(place / ".gitignore"), full.relative_to(place).as_posix(), folder)
            verdict = verdict if found is None else found
        return verdict


Pattern = tuple[re.Pattern[str], bool, bool]


@functools.lru_cache(maxsize=4096)
def _read(file: Path) -> tuple[Pattern, ...]:
    try:
        return compile_lines(file_text(file, errors="replace").splitlines())
    except OSError:
        return ()


def compile_lines(lines: list[str]) -> tuple[Pattern, ...]:
    """The patterns of one file: a regular expression, whether it takes back, whether it is for folders alone."""
    found = []
    for raw in lines:
        line = raw.rstrip()
        if not line or line.startswith("#"):
            continue
        back = line.startswith("!")
        line = line.removeprefix("!").removeprefix("\\")
        folders, line = line.endswith("/"), line.rstrip("/")
        head = "" if "/" in line else "(?:.*/)?"
        found.append((re.compile(head + _expression(line.lstrip("/"))), back, folders))
    return tuple(found)


def _expression(pattern: str) -> str:
    """``**`` goes through folders, ``*`` and ``?`` do not."""
    pieces = re.split(r"(\*\*/|/\*\*$|\*|\?|\[[^\]]*\])", pattern)
    meaning = {"**/": "(?:.*/)?", "/**": "/.*", "*": "[^/]*", "?": "[^/]"}
    return "".join(meaning.get(p, p.replace("[!", "[^", 1) if p.startswith("[") else re.escape(p)) for p in pieces)


def decide(patterns: tuple[Pattern, ...], path: str, folder: bool) -> bool | None:
    """True to leave it out, False where a pattern takes that back, None where none matches."""
    verdict = None
    for expression, back, folders in patterns:
        if (folder or not folders) and expression.fullmatch(path):
            verdict = not back
    return verdict

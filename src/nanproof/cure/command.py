"""The training command: what is run, and the same command with changes.

>>> command = read_command(["python", "train.py", "--lr", "0.1", "--amp"])
>>> command.with_flag("--lr", "0.05").shown
'python train.py --lr 0.05 --amp'
>>> command.without_flag("--amp").with_flag("--seed", "1").shown
'python train.py --lr 0.1 --seed 1'
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from ..errors import UsageError
from ..files import file_text

_PYTHON = re.compile(r"python(\d(\.\d+)?)?(\.exe)?")
_WORD = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*=")
_HINT = "nanproof cure -- python train.py --config c.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A Python program and its arguments."""

    python: str
    target: str
    """A script, or a module with ``is_module``."""
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    processes: int | None = None
    """How many torchrun starts; None without it."""

    @property
    def name(self) -> str:
        """A short name: that of the script, or of the module that holds it."""
        if not self.is_module:
            return PurePath(self.target).stem
        parts = self.target.split(".")
        return parts[-2] if len(parts) > 1 and parts[-1] in ("train", "main", "__main__") else parts[-1]

    @property
    def program(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    @property
    def shown(self) -> str:
        """As a user types it."""
        start = ["torchrun", f"--nproc_per_node={self.processes}"] if self.processes else [self._python]
        return shlex.join([*start, *self.program])

    @property
    def _python(self) -> str:
        return "python" if self.python == sys.executable else self.python

    def guarded(self, options: Sequence[str]) -> str:
        """The same under the guard, as a user types it."""
        ranks = [f"--nproc={self.processes}"] if self.processes else []
        return shlex.join(["nanproof", "run", *options, *ranks, *self.program])

    def with_word(self, key: str, text: str) -> Command:
        """``key=value`` at the end, in the place of an earlier word on the same key."""
        kept = [a for a in self.arguments if a.lstrip("+").partition("=")[0] != key or "=" not in a]
        return replace(self, arguments=(*kept, f"{key}={text}"))

    def with_flag(self, flag: str, text: str | None) -> Command:
        """A flag with its value, where it stands already, or before the first ``key=value``."""
        at = self._flag(flag)
        words = list(self.arguments)
        if at is None:
            values = {i + 1 for i, w in enumerate(words) if w.startswith("--") and "=" not in w}
            end = next((i for i, w in enumerate(words) if _WORD.match(w) and i not in values), len(words))
            words[end:end] = [flag] if text is None else [flag, text]
        elif text is None:
            pass
        elif "=" in words[at]:
            words[at] = f"{flag}={text}"
        else:
            words[at + 1 : at + 2] = [text]
        return replace(self, arguments=tuple(words))

    def without_flag(self, flag: str) -> Command:
        at = self._flag(flag)
        return self if at is None else replace(self, arguments=self.arguments[:at] + self.arguments[at + 1 :])

    def _flag(self, flag: str) -> int | None:
        return next((i for i, a in enumerate(self.arguments) if a == flag or a.startswith(f"{flag}=")), None)

    def script(self, folder: Path) -> Path | None:
        """The file that is run; nothing is imported to find it."""
        if not self.is_module:
            path = folder / self.target
            return path if path.is_file() else None
        inside = Path(*self.target.split("."))
        for root in (folder, *map(Path, sys.path)):
            for path in (root / inside.with_suffix(".py"), root / inside / "__main__.py"):
                if path.is_file():
                    return path
        return None


def read_command(words: Sequence[str]) -> Command:
    """What was typed after ``--``."""
    if not words:
        raise UsageError("no command to cure", hint=_HINT)
    first = PurePath(words[0]).name
    if first == "torchrun":
        return _torchrun(list(words[1:]))
    if first == "nanproof" and list(words[1:2]) == ["run"]:
        return _under_guard(list(words[2:]))
    if not _PYTHON.fullmatch(first):
        if words[0].endswith(".py"):
            return Command(python=sys.executable, target=words[0], arguments=tuple(words[1:]))
        raise UsageError(f"{words[0]!r} is not a Python program", hint=_HINT)
    python = sys.executable if words[0] in ("python", "python3") else words[0]
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        taken = rest.pop(0)
        if taken in ("-c", "-"):
            raise UsageError("a program given as text has no file to change", hint=_HINT)
        if taken in ("-X", "-W") and rest:
            rest.pop(0)
    if rest[:2] == ["-m", "nanproof"] and rest[2:3] == ["run"]:
        return replace(_under_guard(rest[3:]), python=python)
    return _program(python, rest)


def _program(python: str, rest: list[str], processes: int | None = None) -> Command:
    is_module = rest[:1] == ["-m"]
    rest = rest[1:] if is_module else rest
    if not rest:
        raise UsageError("the command names no program", hint=_HINT)
    return Command(python=python, target=rest[0], is_module=is_module, arguments=tuple(rest[1:]), processes=processes)


def _torchrun(rest: list[str]) -> Command:
    count = 1
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        name, equals, text = rest.pop(0).partition("=")
        takes = name.lstrip("-").replace("-", "_")
        if not equals and takes not in ("standalone", "no_python") and rest:
            text = rest.pop(0)
        if takes in ("nproc_per_node", "nproc"):
            if not text.isdigit():
                raise UsageError(f"--nproc_per_node {text}: how many is that?", hint="give a number")
            count = int(text)
    return _program(sys.executable, rest, count)


def _under_guard(rest: list[str]) -> Command:
    """The program behind the options of ``nanproof run``."""
    processes = None
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        name, equals, text = rest.pop(0).partition("=")
        if name in ("--quiet", "-q", "--json", "--debug", "--heal", "--no-heal", "--require", "--check"):
            continue
        if not equals and rest:
            text = rest.pop(0)
        if name == "--nproc" and text.isdigit():
            processes = int(text)
    if rest and rest[0] != "-m" and not rest[0].endswith(".py") and shutil.which(rest[0]):
        return read_command(rest)  # a whole command
    return _program(sys.executable, rest, processes)


def read_run(folder: Path) -> tuple[Command, Path]:
    """The command of a run that ``nanproof run`` has recorded, and the folder it was typed in.

    ``runs/last`` is the newest run in ``runs`` where nothing has that name.
    """
    if folder.name == "last" and not folder.exists():
        found = sorted(folder.parent.glob("*/run.json"), key=lambda p: p.stat().st_mtime)
        folder = found[-1].parent if found else folder
    if not folder.is_dir():
        raise UsageError(f"there is no run {folder}", hint=_HINT)
    path = folder / "run.json"
    try:
        record = json.loads(file_text(path))
        words = [str(w) for w in record["command"]]
    except FileNotFoundError:
        raise UsageError(f"{folder} has no run.json: it is not the folder of a `nanproof run`", hint=_HINT) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{path} cannot be read", hint=_HINT) from None
    typed_in = Path(str(record.get("cwd") or Path.cwd()))
    started = [[str(w) for w in p["command"]] for p in record.get("processes", ()) if p.get("guarded")]
    try:
        command = read_command(words)
    except UsageError:
        if not started:
            raise
        command = read_command(started[0])  # a shell script, say: what it has started is the program
    return command, typed_in if typed_in.is_dir() else Path.cwd()

"""A whole command behind `nanproof run`: launchers and shell scripts are started, and what they train joins the run.

>>> read_typed("train.py", ("--lr", "1e-3"))
Program(target='train.py', arguments=('--lr', '1e-3'), is_module=False)
>>> read_typed(sys.executable, ("-m", "package.train", "--fast"))
Program(target='package.train', arguments=('--fast',), is_module=True)
>>> read_typed("bash", ("train.sh",)).name
'train'
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..errors import GuardStop, UsageError
from ..files import open_file
from .launcher import Outcome, Stage
from .options import Options
from .program import Program

log = logging.getLogger("nanproof")
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Something else than a Python program, which may start some."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """What it is called in the name of a run's folder: as the script in it, or as itself."""
        scripts = [w for w in self.words if w.endswith((".py", ".sh"))]
        return Path((scripts or self.words)[0]).stem

    @property
    def other_python(self) -> str | None:
        """The interpreter of another environment that it starts with, which knows no nanproof."""
        first = shutil.which(self.words[0])
        if first is None or not _PYTHON.fullmatch(Path(first).name):
            return None
        return None if _is_ours(first) else first


def read_typed(program: str, arguments: tuple[str, ...]) -> Program | Command:
    """What was typed: a Python script, ``python`` and a script, or a command that is found on PATH."""
    path, found = Path(program), shutil.which(program)
    is_python = found is not None and _PYTHON.fullmatch(path.name) is not None
    if path.is_file() and not is_python:
        if not _is_foreign(path):
            return Program(target=program, arguments=arguments)
        return Command(words=(program if "/" in program else f"./{program}", *arguments))
    if found is None:
        return Program(target=program, arguments=arguments)  # which says what is wrong with it
    if is_python and _is_ours(found) and arguments:
        first, *rest = arguments
        if first == "-m" and rest:
            return Program(target=rest[0], arguments=tuple(rest[1:]), is_module=True)
        if not first.startswith("-"):
            return Program(target=first, arguments=tuple(rest))
    return Command(words=(program, *arguments))


def run_command(command: Command, options: Options, *, report: Callable[[Outcome], None] = lambda _: None) -> Outcome:
    """Start a command, let the Python processes that it starts join the run, and gather what they did."""
    options.check()
    other = command.other_python
    if other is not None:
        why = f"{other} is of another environment than nanproof ({sys.prefix})"
        if options.require:
            raise UsageError(f"nothing would be guarded: {why}", hint="install nanproof in that environment")
        log.warning("nanproof: NOT GUARDED: %s. Next: install nanproof there, and type this with its own nanproof", why)
    options.claim_folder()
    stage = Stage(dataclasses.replace(options, started=True), report)
    stage.nothing = "no process that the command has started took a step with a torch optimizer under the guard"
    stage.set_up()
    code = 1
    try:
        code = wait_for(command.words)
    finally:
        outcome = stage.end(code)
    assert outcome is not None
    return outcome


def wait_for(words: Sequence[str]) -> int:
    """Run a command, hand signals on, and return its exit code as a shell would."""
    try:
        process = subprocess.Popen(words)
    except OSError as error:
        raise UsageError(
            f"{words[0]} cannot be started: {error.strerror or error}", hint=f"chmod +x {words[0]}, or bash {words[0]}"
        ) from error

    def hand_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:
                continue  # the terminal has sent it to the command too
    finally:
        signal.signal(signal.SIGTERM, before)


def was_stopped(outcome: Outcome) -> bool:
    """Whether the guard of a started process has stopped the run; launchers turn its exit code into their own."""
    accounts = [a for p in outcome.processes for a in p.get("guarded", ())]
    codes = [p.get("exit_code") for p in outcome.processes]
    return GuardStop.exit_code in codes or any((a.get("actions") or {}).get("stop") for a in accounts)


def _is_ours(python: str) -> bool:
    return Path(python).parent.resolve() == Path(sys.executable).parent.resolve()


def _is_foreign(path: Path) -> bool:
    """Whether a file is to be started, not read as Python: another interpreter's script, or a binary."""
    if path.suffix in (".py", ".pyw"):
        return False
    with open_file(path) as file:
        start = file.readline(256)
    return b"\0" in start or start.startswith(b"\x7fELF") or (start.startswith(b"#!") and b"python" not in start)

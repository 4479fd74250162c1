"""Printed commands, typed as they stand: how each ends, and whether it did what it is printed for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from nanproof.cli.shell import nanproof
from nanproof.diagnosing import Diagnosis
from support.forked import run_python

NOT_STARTED = re.compile(
    r"ModuleNotFoundError|ImportError|FileNotFoundError|NameError|unrecognized arguments|the following arguments are"
)
"""How a training ends that could not begin."""


def commands_of(diagnosis: Diagnosis) -> list[str]:
    """Every command of a record: those that the text shows, and those of causes that only --json has."""
    causes = (c for s in diagnosis.causes for c in s.commands)
    return list(dict.fromkeys([*diagnosis.commands, *causes, *(c for m in diagnosis.missing for c in m.commands)]))


def shape(command: str) -> str:
    """Equal for commands that do the same wherever they are typed: a page, or one answer to one question."""
    words = shlex.split(command)
    if words[1] == "explain":
        return command
    return f"answer {words[-1]}" if "--fact" in words and words[1] == "diagnose" else f"{command} in {Path.cwd()}"


def complaint(command: str) -> str:
    """What is wrong with a command, typed in the current directory; "" when it did what it is printed for."""
    words = shlex.split(command)
    if words[0] != "nanproof":
        return f"{command}: not a command of nanproof"
    verb = words[1]
    if verb == "run":
        done = run_python("-m", "nanproof", *words[1:], cwd=Path.cwd())
        code, said = done.returncode, done.stdout
    else:
        ran = CliRunner().invoke(nanproof, words[1:])
        code, said = ran.exit_code, ran.output
    if code not in ((0, 1, 66) if verb == "run" else (0, 1)) or "Traceback" in said:
        return f"{command} exits {code}: {said.strip()[-300:]}"
    return "" if _DID[verb](words, code, said) else f"{command} does nothing: {said.strip()[-300:]}"


def _found_a_rule(words: list[str], code: int, said: str) -> bool:  # unconfirmed findings end with 0
    return any(rule in said for rule in words[words.index("--select") + 1].split(","))


def _diagnosed(words: list[str], code: int, said: str) -> bool:
    """Data that is printed has a problem; a question that is answered is not asked again."""
    if "--data" in words:
        return code == 1
    answered = f"--fact {words[-1].partition('=')[0]}="
    return "--fact" in words and all(line.count(answered) < 2 for line in said.splitlines())


_DID: dict[str, Callable[[list[str], int, str], bool]] = {
    "explain": lambda words, code, said: code == 0 and words[2] in said,
    "lint": _found_a_rule,
    "harden": lambda words, code, said: "wrote " in said,
    "scan": lambda words, code, said: Path(words[2]).name in said,
    "diagnose": _diagnosed,
    "locate": lambda words, code, said: bool(said.strip()),
    "run": lambda words, code, said: "nanproof" in said and not NOT_STARTED.search(said),
}

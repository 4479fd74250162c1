"""Commands in the documentation exist: each verb, each option, each combination can be parsed; sessions show the truth.

The Python blocks of a page are run by tests/test_docs.py, one after the other, as the page shows them.
"""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from nanproof.cli.shell import nanproof

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUNNABLE = ("console", "sh", "bash", "yaml", "toml", "text", "python", "py", "json", "diff")
"""Fences that the documentation uses; Python that is not run is marked ``py``, output ``text``."""


def commands(page: Path) -> Iterator[list[str]]:
    """The words after ``nanproof`` of every command that a page shows."""
    for block in re.findall(r"^```(?:console|sh|bash)\n(.*?)^```", page.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "nanproof" in line else []
            if words[:1] == ["$"]:
                words = words[1:]
            if words[:1] == ["nanproof"]:
                yield words[1:]
            elif "-m" in words and "nanproof" in words[words.index("-m") + 1 :][:1]:
                yield words[words.index("-m") + 2 :]


def complaint(words: list[str]) -> str:
    """What the command line has against these words; that a file does not exist here is fine."""
    root = click.Context(nanproof, info_name="nanproof")
    if not words or words[0].startswith("-"):
        return ""
    command = nanproof.get_command(root, words[0])
    if command is None:
        return f"there is no verb {words[0]}"
    try:
        command.make_context(words[0], list(words[1:]), parent=root)
    except click.exceptions.Exit:
        return ""
    except click.UsageError as error:
        said = error.format_message()
        return "" if "does not exist" in said else said
    return ""


@pytest.mark.parametrize("page", [p for p in PAGES if any(commands(p))], ids=lambda p: p.name)
def test_every_command_can_be_parsed(page: Path) -> None:
    wrong = {" ".join(words): said for words in commands(page) if (said := complaint(words))}
    assert wrong == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_verbs_and_options_named_in_the_text_exist(page: Path) -> None:
    root = click.Context(nanproof, info_name="nanproof")
    verbs = set(nanproof.list_commands(root))
    wrong = []
    for words in (quoted.split() for quoted in re.findall(r"`nanproof ([a-z][^`]*)`", page.read_text())):
        if words[0] not in verbs:
            wrong.append(f"there is no verb {words[0]}")
            continue
        command = nanproof.get_command(root, words[0])
        assert command is not None
        known = {"--help", "-h"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        own = words[1 : words.index("--")] if "--" in words else words[1:]  # after -- comes a command of the user's
        if words[0] in ("run", "smoke"):  # what comes after a script or -m MODULE belongs to the script
            own = own[: next((i for i, w in enumerate(own) if w.endswith(".py") or w == "-m"), len(own))]
        wrong += [f"{words[0]} has no {w}" for w in own if w.startswith("--") and w.split("=")[0] not in known]
    assert wrong == []


def test_a_wrong_command_is_noticed() -> None:
    assert complaint(["heel", "."]) == "there is no verb heel"
    assert "No such option" in complaint(["scan", "--no-such-option", "x"])
    assert complaint(["scan", "no/such/folder"]) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_says_what_it_is(page: Path) -> None:
    fences = re.findall(r"^```(\S*)", page.read_text(), re.M)[::2]
    assert [f for f in fences if f not in RUNNABLE] == []


def sessions(page: Path) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    return [b for b in found if b.startswith(">>>")]


def test_sessions_show_what_happens() -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for page in PAGES:
        session = "\n".join(sessions(page))  # one continues where the last one ended
        test = doctest.DocTestParser().get_doctest(session, {}, page.name, str(page), 0)
        said: list[str] = []
        doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
        assert said == [], "".join(said)

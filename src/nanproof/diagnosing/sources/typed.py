"""The command lines that started a run: in launch scripts, notebooks, logs that show them, and a shell's history.

>>> text = "ls\\n: 1700000000:0;python train.py --lr 1\\nnohup python train.py --lr 3 > out.log &\\nvim train.py\\n"
>>> last_command(text)
'nohup python train.py --lr 3 > out.log &'
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ...config.loading import SHELL
from ...config.source import Source
from ...logs.readers.notebook import read_notebook
from .in_force import HEADER_LINES, head_of
from .part import name_in
from .places import Places

MAX_BYTES = 2 << 20
_STARTS = re.compile(
    r"^\s*(?:[+$>!]\s*|\S+[$#]\s+)?(?P<command>(?:\w+=\S+\s+)*(?:nohup\s+)?(?:\S*/)?(?:python[\d.]*|torchrun|accelerate"
    r"|deepspeed|srun|mpirun)\s.*?\S+\.py\b.*)"
)
# what zsh and fish write before a command
_STAMP = re.compile(r"^(?:: \d+:\d+;|- cmd: )")


def typed_commands(places: Places) -> Iterator[Source]:
    """Launch scripts first, then what notebooks gave to a shell, what logs begin with, and the end of a history."""
    for path in places.configs:
        if path.suffix in SHELL:
            yield Source(name_in(places.root, path), _text(path))
    yield from shown_commands(places)


def shown_commands(places: Places) -> Iterator[Source]:
    """Those that no launch script holds."""
    for path in places.notebooks:
        yield Source(name_in(places.root, path), read_notebook(_text(path).encode()).commands)
    for log in places.logs:
        if log.format.startswith("text"):
            head = head_of(Path(log.path)).splitlines()[:HEADER_LINES]
            found = next((m["command"] for line in head if (m := _STARTS.match(line))), "")
            yield Source(name_in(places.root, log.path), f"{found}\n")
    for path in places.history:
        yield Source(name_in(places.root, path), f"{last_command(_text(path))}\n")


def last_command(history: str) -> str:
    """The last line that started a Python script: the run that one asks about is usually that one."""
    lines = (_STAMP.sub("", line) for line in reversed(history.splitlines()))
    return next((m["command"] for line in lines if (m := _STARTS.match(line))), "")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""

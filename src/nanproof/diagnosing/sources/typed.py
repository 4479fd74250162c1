"""The command lines that started a run: in launch scripts, notebooks, logs that show them, and a shell's history.

>>> text = "ls\\n: 1700000000:0;python train.py --lr 1\\nnohup python train.py --lr 3 > out.log &\\nvim train.py\\n"
>>> last_command(text)
'nohup python train.py --lr 3 > out.log &'
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from ...config.launch import programs
from ...config.loading import SHELL
from ...config.source import Source
from ...files import open_file
from ...linting.program import Program
from ...logs.readers.notebook import read_notebook
from .in_force import HEADER_LINES, head_of
from .part import name_in
from .places import Places

MAX_BYTES = 2 << 20
_TRAINS = re.compile(r"\.backward\(|Trainer\(|\.fit\(")
# code that is found by a name or a path, which only a run would tell
_BY_NAME = re.compile(
    r"import_module|__import__|sys\.path|instantiate\(|find_spec|pkgutil|runpy|entry_points|exec\(|locate\("
)
_STARTS = re.compile(
    r"^\s*(?:[+$>!]\s*|\S+[$#]\s+)?(?P<command>(?:\w+=\S+\s+)*(?:nohup\s+)?(?:\S*/)?(?:python[\d.]*|torchrun|accelerate"
    r"|deepspeed|srun|mpirun)\s.*?\S+\.py\b.*)"
)
# what zsh and fish write before a command
_STAMP = re.compile(r"^(?:: \d+:\d+;|- cmd: )")


def typed_commands(places: Places) -> Iterator[Source]:
    """Launch scripts first, then what notebooks gave to a shell, what logs begin with, and the end of a history."""
    yield from _recorded(places)
    for path in places.configs:
        if path.suffix in SHELL:
            yield Source(name_in(places.root, path), _text(path))
    yield from shown_commands(places)


def scripts(places: Places) -> Iterator[tuple[Path, list[str]]]:
    """The scripts that these commands start, as far as they are here, with their arguments."""
    for source in typed_commands(places):
        for name, arguments in programs(source):
            around = [places.root / name, places.root / Path(source.path).parent / name]
            around += [f for f in places.code if f.parts[-len(Path(name).parts) :] == Path(name).parts]
            if script := next((p for p in around if p.is_file()), None):
                yield script, arguments


def of_its_script(places: Places) -> Places:
    """Without the other scripts of a folder, where one is known to have made the run: their settings are not its own.

    What the run's own script imports stays. Where it may load more by a name or a path that only running it would tell,
    so does every file but other scripts, which train by themselves: below ``__main__``, or as they are imported.
    """
    recorded = dataclasses.replace(places, configs=(), notebooks=(), history=())
    started = {s.absolute() for s, _ in scripts(recorded)} or {s.absolute() for s, _ in scripts(places)}
    if len(started) != 1 or not any(f.absolute() in started for f in places.code):
        return places
    program = Program(places.code)
    used = program.reached_from(*started)
    texts = {f: _text(f) for f in used}
    if not any(_TRAINS.search(text) for text in texts.values()):
        return places  # what was started last only prepares or draws something
    by_name = any(_BY_NAME.search(text) or program.may_import_more(f) for f, text in texts.items())
    settings = [_text(f) for f in places.configs if f.suffix != ".py"]
    by_name = by_name or any("_target_" in text or "class_path" in text for text in settings)
    other = {f for f in places.code if f.absolute() not in used and (not by_name or _is_script(f))}
    if not other:
        return places
    names = ", ".join(sorted(name_in(places.root, f) for f in other)[:3])
    names += ", …" if len(other) > 3 else ""
    kind = "script" if by_name else "Python file"
    why = "" if by_name else f", which {next(iter(started)).name} does not import"
    note = f"{len(other):,} other {kind}{' was' if len(other) == 1 else 's were'} not read{why}: {names}"
    code, configs = (tuple(f for f in files if f not in other) for files in (places.code, places.configs))
    return dataclasses.replace(places, code=code, configs=configs, notes=(*places.notes, note))


def _is_script(path: Path) -> bool:
    text = _text(path)
    if not _TRAINS.search(text):
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    at_once = (s for s in tree.body if isinstance(s, ast.If | ast.For | ast.While | ast.With | ast.Try))
    return any("__main__" in (told := ast.unparse(s)) or _TRAINS.search(told) for s in at_once)


def _recorded(places: Places) -> Iterator[Source]:
    """The command of a guarded run, from its run.json."""
    for log in places.logs:
        record = Path(log.path) / "run.json"
        if log.format == "nanproof" and record.is_file():
            try:
                words = [str(w) for w in json.loads(_text(record))["command"]]
            except (ValueError, KeyError, TypeError):
                continue
            yield Source(name_in(places.root, record), shlex.join(["python", *words[1:]]) + "\n")


def shown_commands(places: Places) -> Iterator[Source]:
    """Those that no launch script holds."""
    for path in places.notebooks:
        yield Source(name_in(places.root, path), read_notebook(_text(path).encode()).commands)
    for log in places.logs:
        if log.format.startswith("text"):
            head = head_of(Path(log.path)).splitlines()[:HEADER_LINES]
            found = next((m["command"] for line in head if (m := _STARTS.match(line))), "")
            yield Source(name_in(places.root, log.path), f"{found}\n")
    for path in places.environment:
        if path.name == "wandb-metadata.json":
            yield Source(name_in(places.root, path), _tracked(_text(path)))
    for path in places.history:
        yield Source(name_in(places.root, path), f"{last_command(_text(path))}\n")


def _tracked(metadata: str) -> str:
    """The command line that W&B keeps of a run.

    >>> _tracked('{"program": "train.py", "args": ["--lr", "0.1"]}')
    'python train.py --lr 0.1\\n'
    """
    try:
        told = json.loads(metadata)
        program, words = told["program"], [str(w) for w in told["args"]]
    except (ValueError, KeyError, TypeError):
        return ""
    return shlex.join(["python", str(program), *words]) + "\n"


def last_command(history: str) -> str:
    """The last line that started a Python script: the run that one asks about is usually that one."""
    lines = (_STAMP.sub("", line) for line in reversed(history.splitlines()))
    return next((m["command"] for line in lines if (m := _STARTS.match(line))), "")


def _text(path: Path) -> str:
    try:
        with open_file(path) as file:
            return file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""

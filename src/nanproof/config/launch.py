"""Launch scripts, read and never run: what they pass to the program, and in which environment.

>>> script = "export LR=5e-5\\ntorchrun --nproc_per_node 8 train.py --bf16 \\\\\\n  --learning_rate $LR opt.eps=1e-6\\n"
>>> launch = read_launch(Source("run.sh", script))
>>> [(v.key, v.value, v.line) for v in launch.values], launch.changes[0][0].text
([('launch.nproc_per_node', 8, 2), ('bf16', True, 2), ('learning_rate', 5e-05, 3)], 'opt.eps=1e-6')
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

from ..errors import UsageError
from .overrides import Override, parse_override, plain
from .source import Source
from .value import Value

_LAUNCHERS = {"python", "python3", "torchrun", "accelerate", "deepspeed", "srun", "mpirun", "horovodrun", "uv", "exec"}
_ENDS = {"|", "||", "&&", "&", ";", ">", ">>", "2>", "2>&1", "<", ")", "("}
_ASSIGN = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_CONFIGS = {"config", "config_file", "cfg", "config_path_file", "deepspeed", "deepspeed_config", "yaml", "conf"}

Word = tuple[str, int]
MAX_QUOTE = 100


@dataclass(slots=True)
class Launch:
    """What a launch script says."""

    values: list[Value] = field(default_factory=list)
    changes: list[tuple[Override, int]] = field(default_factory=list)
    """Overrides in Hydra's style, each with its line."""
    environment: dict[str, tuple[str, int]] = field(default_factory=dict)
    configs: list[str] = field(default_factory=list)
    """Config files that are named on the command line."""
    scripts: list[str] = field(default_factory=list)
    config_name: str = ""
    config_path: str = ""


def read_launch(source: Source) -> Launch:
    """Read every command of a script that starts a Python program."""
    launch = Launch()
    for words in _started(source, launch):
        _program(launch, words, source.path)
    return launch


def programs(source: Source) -> Iterator[tuple[str, list[str]]]:
    """The Python scripts that are started, each with its arguments; variables that are set there are filled in.

    >>> list(programs(Source("run.sh", "LR=1e-3\\nCUDA_VISIBLE_DEVICES=0 python -u train.py --lr $LR > log.txt\\n")))
    [('train.py', ['--lr', '1e-3'])]
    """
    for words in _started(source, Launch()):
        texts = [w for w, _ in words]
        script = next((i for i, w in enumerate(texts) if w.endswith(".py")), None)
        if script is not None:
            yield texts[script], texts[script + 1 :]


def _started(source: Source, launch: Launch) -> Iterator[list[Word]]:
    """The commands that start a program, with the variables before them put in; the environment goes to ``launch``."""
    variables: dict[str, str] = {}
    lines: dict[str, int] = {}
    for words in _commands(source):
        words = [pair for w, line in words for pair in _filled(w, line, variables, lines)]
        while words and (found := _ASSIGN.fullmatch(words[0][0])):
            variables[found[1]], lines[found[1]] = found[2], words[0][1]
            if len(words) > 1:  # set for this command only
                launch.environment[found[1]] = (found[2], words[0][1])
            words = words[1:]
        if words and words[0][0] == "nohup":
            words = words[1:]
        if words and words[0][0] == "export":
            for word, line in words[1:]:
                if found := _ASSIGN.fullmatch(word):
                    variables[found[1]] = found[2]
                    launch.environment[found[1]] = (found[2], line)
        elif words and PurePath(words[0][0]).name in _LAUNCHERS:
            yield words
        elif words and words[0][0].endswith(".py") and "/" in words[0][0]:  # ./train.py --fp16
            yield [("python", words[0][1]), *words]


def _words(line: str, ends: str) -> list[str] | None:
    """The words of a line, None while a quote in it is open."""
    lexer = shlex.shlex(line.removesuffix(ends), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None


def _commands(source: Source) -> list[list[Word]]:
    commands: list[list[Word]] = []
    going_on = False
    ends = {".bat": "^", ".cmd": "^", ".ps1": "`"}.get(PurePath(source.path).suffix.lower(), "\\")
    rows = _arguments(source.text).splitlines()
    number = 0
    while number < len(rows):
        first, number = number + 1, number + 1
        line = rows[first - 1].rstrip()
        words = _words(line, ends)
        while words is None and number < len(rows) and number - first < MAX_QUOTE:
            line += f"\n{rows[number].rstrip()}"  # a quote that goes on over several lines
            number += 1
            words = _words(line, ends)
        more = line.endswith(ends) and not line.lstrip().startswith("#")
        if words is None:  # a quote that never ends
            number, going_on = first, more
        elif going_on and commands:
            commands[-1] += [(w, first) for w in words]
            going_on = more
        else:
            commands.append([(w, first) for w in words])
            going_on = more
    parts: list[list[Word]] = []
    for command in commands:
        parts.append([])
        for word in command:
            if word[0] in _ENDS:
                parts.append([])
            else:
                parts[-1].append(word)
    return [p for p in parts if p]


_ARRAY = re.compile(r"(?m)^(\s*[A-Za-z_]\w*)=\(([^()]*)\)\s*$")


def _arguments(text: str) -> str:
    """A script with its arrays of arguments as quoted strings, which is what becomes of them."""
    text = re.sub(r"\$\{(\w+)\[[@*]\]\}", r"$\1", text)
    return _ARRAY.sub(lambda m: f'{m[1]}="' + re.sub(r"(?m)\s#.*$|[\"']", "", m[2]) + '"', text)


def _filled(word: str, line: int, variables: dict[str, str], lines: dict[str, int]) -> Iterator[Word]:
    """A word with its variables put in; one such as ``$GPT_ARGS`` is many arguments, at the lines where they stand."""
    text = _expand(word, variables)
    whole = _VARIABLE.fullmatch(word)
    name = (whole[1] or whole[3]) if whole else ""
    if name not in lines or not text.lstrip().startswith("-"):
        yield text, line
        return
    for number, row in enumerate(text.split("\n"), start=lines[name]):
        yield from ((part, number) for part in row.split() if part != "\\")


def _expand(word: str, variables: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        return variables.get(found[1] or found[3], found[2] if found[2] is not None else found[0])

    return _VARIABLE.sub(value, _VARIABLE.sub(value, word)) if len(word) < 10_000 else word


def _program(launch: Launch, words: list[Word], path: str) -> None:
    texts = [w for w, _ in words]
    script = next((i for i, w in enumerate(texts) if w.endswith(".py")), None)
    if script is None:
        script = next((i + 1 for i, w in enumerate(texts[:-1]) if w in ("-m", "--module")), None)
    if script is None:
        return
    launch.scripts.append(texts[script])
    tool = "accelerate" if "accelerate" in (PurePath(t).name for t in texts[:script]) else "launch"
    _options(launch, [w for w in words[1:script] if w[0] not in ("-m", "-u")], path, prefix=f"{tool}.")
    _options(launch, words[script + 1 :], path, prefix="")


def _options(launch: Launch, words: list[Word], path: str, prefix: str) -> None:
    index = 0
    while index < len(words):
        word, line = words[index]
        index += 1
        if not word.startswith("-") or re.fullmatch(r"-?\d.*", word):
            if not prefix and re.match(r"[+~]{0,2}[A-Za-z_][\w./@-]*=|~\w", word):
                try:
                    launch.changes.append((parse_override(word), line))
                except UsageError:
                    continue
            continue
        name, equals, text = word.lstrip("-").partition("=")
        if not equals:
            text = "true"
            if index < len(words) and not re.match(r"--?[A-Za-z]", words[index][0]):
                if "=" not in words[index][0].partition("[")[0] or word.startswith("--"):
                    text = words[index][0]
                    index += 1
            elif re.match(r"no[-_]", name):
                name, text = name[3:], "false"
        key = name.replace("-", "_")
        if key == "config_name":
            launch.config_name = text
        elif key in ("config_path", "config_dir") and not prefix:
            launch.config_path = text
        if key in _CONFIGS and "." in text:
            launch.configs.append(text)
        value = plain(text)
        launch.values.append(
            Value(key=f"{prefix}{key}", value=value, path=path, line=line, text=text, origin="command-line")
        )

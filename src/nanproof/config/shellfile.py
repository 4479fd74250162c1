"""Changing one setting in a launch script: the flag's value, or the variable that it takes its value from.

>>> script = "LR=5e-4\\ntorchrun train.py --fp16 True --learning_rate $LR\\n"
>>> print(set_flag(Source("run.sh", script), "learning_rate", 1e-4).text, end="")
LR=0.0001
torchrun train.py --fp16 True --learning_rate $LR
>>> print(set_flag(Source("run.sh", "python train.py --fp16 --lr 0.1\\n"), "fp16", False).text, end="")
python train.py --lr 0.1

The script is read back: if anything but the one setting changed, the edit is refused.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import UsageError
from ..files import file_text
from .launch import read_launch
from .source import Source
from .value import Plain, as_number


def set_flag(source: Source, key: str, after: Plain) -> Source:
    """The script with one flag changed, added, or taken out; a sentence says why where that cannot be done."""
    name = key.rpartition(".")[2] if key.startswith(("launch.", "accelerate.")) else key
    changed = Source(source.path, _edit(source.text, name, after, source.path))
    before, now = ({v.key: v.value for v in read_launch(s).values} for s in (source, changed))
    own = {k for k in before | now if k.rpartition(".")[2] == name.replace("-", "_")}
    others = {k for k in before.keys() | now.keys() if before.get(k) != now.get(k)} - own
    if others or not (after is False or any(_equal(now.get(k), after) for k in own)):
        raise UsageError(f"{name} in {source.path} cannot be changed safely", hint="change it by hand")
    return changed


def flag_of(text: str, word: str) -> str:
    """The flag that a word means: itself in another spelling, or the one that takes its value from this variable.

    >>> flag_of("python train.py --lr $LR --clip-grad 0", "LR"), flag_of("python train.py --clip-grad 0", "clip_grad")
    ('lr', 'clip-grad')
    """
    spelled = re.sub(r"[-_]", "[-_]", word) if re.fullmatch(r"[\w-]+", word) else r"(?!)"
    found = re.search(rf"--({spelled})(?![\w-])|--([\w-]+)(?:=|[ \t]+)[\"']?\$\{{?{spelled}\b", text)
    return (found[1] or found[2]) if found else ""


def _edit(text: str, name: str, after: Plain, path: str) -> str:
    flag = re.sub(r"[-_]", "[-_]", re.escape(name).replace(r"\-", "-"))
    value = r"(?P<gap>=|[ \t]+(?!-[A-Za-z-]|\\))?(?P<value>[^\s\\]+)?"
    found = re.search(rf"(?m)^(?![ \t]*#).*?(?P<flag>(?<!\S)--?{flag}(?![\w-])){value}", text)
    if found is None:
        return _add(text, name, after, path)
    given = found["value"] if found["gap"] is not None else None
    if given is None:
        if after is True:
            return text
        if after is False:
            return text[: found.start("flag")].rstrip(" \t") + text[found.end("flag") :]
        raise UsageError(f"{name} in {path} has no value to change", hint="change it by hand")
    variable = re.fullmatch(r"[\"']?\$\{?([A-Za-z_]\w*)\}?[\"']?", given)
    if variable:
        assigned = re.search(rf"(?m)^[ \t]*(?:export[ \t]+)?{variable[1]}=(?P<value>[^\s#]*)", text)
        if assigned is None:
            raise UsageError(f"{name} in {path} comes from ${variable[1]}, which is set elsewhere", hint="set it there")
        return text[: assigned.start("value")] + _written(after, assigned["value"]) + text[assigned.end("value") :]
    return text[: found.start("value")] + _written(after, given) + text[found.end("value") :]


def _add(text: str, name: str, after: Plain, path: str) -> str:
    """A flag that is not there yet goes right behind the script; explicit booleans stay explicit."""
    script = re.search(r"(?m)^(?![ \t]*#).*?\S+\.py(?=\s|$)", text)
    if script is None or after is False:
        raise UsageError(f"{name} is not set in {path}", hint="set it where the script has its default")
    if _refuses(script[0].split()[-1], name, path):
        raise UsageError(f"{script[0].split()[-1]} has no flag --{name}", hint="add it there first")
    explicit = re.search(r"--\w+[= ](?:True|true)\b", text)
    style = explicit[0][-4:] if explicit else ""
    words = f" --{name}" if after is True and not explicit else f" --{name} {_written(after, style)}"
    return text[: script.end()] + words + text[script.end() :]


def _refuses(script: str, name: str, path: str) -> bool:
    """Whether the script parses its own flags and does not know this one."""
    for folder in (Path(), Path(path).parent, Path(path).parent.parent):
        try:
            code = file_text(folder / script, errors="replace")
        except OSError:
            continue
        flag = re.sub(r"[-_]", "[-_]", re.escape(name).replace(r"\-", "-"))
        parses = "add_argument(" in code and not re.search(r"HfArgumentParser|parse_known_args|OmegaConf|hydra", code)
        return parses and re.search(rf"--{flag}[\"']", code) is None
    return False


def _written(after: Plain, before: str) -> str:
    if isinstance(after, bool):
        return str(after).lower() if before.strip("\"'") in ("true", "false") else str(after)
    quote = before[:1] if before[:1] in "\"'" and before[:1] else ""
    return f"{quote}{after:g}{quote}" if isinstance(after, float) else f"{quote}{after}{quote}"


def _equal(one: object, other: Plain) -> bool:
    if isinstance(other, bool):
        return one is other or str(one).lower() == str(other).lower()
    left, right = as_number(one), as_number(other)
    return one == other or (left is not None and left == right)

"""Changing one setting in the text of a config, and nothing else: bytes are replaced, comments and layout stay.

>>> print(set_value(Source("c.yaml", "optim:\\n  lr: 1e-4  # peak\\n  name: adam\\n"), "optim.lr", 5e-5).text)
optim:
  lr: 5.0e-5  # peak
  name: adam
<BLANKLINE>
>>> print(set_value(Source("c.yaml", "optim:\\n  lr: 1e-4  # peak\\n"), "optim.eps", 1e-6).text)
optim:
  lr: 1e-4  # peak
  eps: 1.0e-6
<BLANKLINE>

Every edit is read back: if anything but the one key changed, it is refused.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from ..errors import FormatError, UsageError
from .code import Code
from .literals import Format, write
from .loading import SHELL, parse, tree_of
from .shellfile import set_flag
from .source import Source
from .tree import Section, flatten
from .value import Plain, Value, show


class CannotEdit(UsageError):
    """This setting cannot be changed in this file; the message says why."""


def set_value(source: Source, key: str, after: Plain) -> Source:
    """The text with one setting changed, or added below the section that its key names."""
    if Path(source.path).suffix.lower() in SHELL:
        try:
            return set_flag(source, key, after)
        except UsageError as error:
            raise CannotEdit(error.message, hint=error.hint) from None
    before = _values(source)
    if key not in before:  # the settings of a tool stand at the top of its file
        key = re.sub(r"^(accelerate|deepspeed)\.", "", key)
    held = before.get(key)
    if held is not None:
        changed = _replace(source, held, after)
    elif format_of(source.path) == "python":
        changed = _add_argument(source, key, after)
    else:
        changed = _add(source, key, after)
    _verify(source, changed, before, key, after)
    return changed


def _values(source: Source) -> dict[str, Value]:
    """What the file says, by its own keys."""
    if format_of(source.path) == "python":
        return {v.key: v for v in parse(source)}
    return {v.key: v for v in flatten(tree_of(source), source, "yaml")}


def format_of(path: str) -> Format:
    """The format of a file, by its ending."""
    endings: dict[str, Format] = {".py": "python", ".json": "json", ".toml": "toml"}
    return endings.get(Path(path).suffix.lower(), "yaml")


def _replace(source: Source, held: Value, after: Plain) -> Source:
    if held.span is None:
        raise CannotEdit(f"{held.label} is not written out at {held.where}", hint="change it by hand")
    data = source.whole.encode()
    start, end = held.span
    text = write(after, format_of(source.path), held.text)
    if format_of(source.path) == "yaml" and (not held.text or held.text.startswith(("- ", "-\n", "-\r"))):
        start = len(data[:start].rstrip())  # no value yet, or a list below the key: it goes beside the key
        text = f" {text}"
    if held.text.endswith("\n") or data[start:end].endswith(b"\n"):
        end = start + len(data[start:end].rstrip())
    return Source(source.path, (data[:start] + text.encode() + data[end:]).decode())


def _add(source: Source, key: str, after: Plain) -> Source:
    """Add a key to the section that holds it; sections that are missing are added with it."""
    parts = key.split(".")
    root = here = tree_of(source)
    while len(parts) > 1 and (below := here.get(parts[0])) is not None:
        if not isinstance(below, Section):
            raise CannotEdit(f"{parts[0]} in {source.path} is no section", hint="change it by hand")
        here, parts = below, parts[1:]
    form, text = format_of(source.path), source.text
    if here.flow:
        return _with(source, _inside_braces(source, here, _entry(parts, after, "json" if form == "json" else "flow")))
    own = [node for _, node in here.pairs if form != "toml" or not (isinstance(node, Section) and not node.flow)]
    newline = "\r\n" if "\r\n" in text else "\n"
    indent = "" if here is root or form == "toml" else _indent(source, here)
    entry = _entry(parts, after, form, indent, newline)
    if not own and here is root:
        return _with(source, f"{entry}{newline}{text}")
    last = max((node.end for node in own), default=here.end)
    at = last - 1 if text[last - 1 : last] == "\n" else last
    end = text.find("\n", at)
    if end < 0:
        return _with(source, f"{text}{newline}{indent}{entry}{newline}")
    return _with(source, f"{text[: end + 1]}{indent}{entry}{newline}{text[end + 1 :]}")


def _entry(parts: list[str], after: Plain, form: str, indent: str = "", newline: str = "\n") -> str:
    """One setting in the style of the format, with the sections around it that are missing."""
    *sections, name = parts
    if form == "toml":
        return f"{'.'.join(parts)} = {write(after, 'toml')}"
    if form == "json":
        opened = "".join(f"{json.dumps(s)}: {{" for s in sections)
        return f"{opened}{json.dumps(name)}: {write(after, 'json')}{'}' * len(sections)}"
    if form == "flow":
        return f"{''.join(f'{s}: {{' for s in sections)}{name}: {write(after, 'yaml')}{'}' * len(sections)}"
    lines = [f"{'  ' * i}{part}:" for i, part in enumerate(parts)]
    lines[-1] += f" {write(after, 'yaml')}"
    return f"{newline}{indent}".join(lines)


def _with(source: Source, text: str) -> Source:
    return Source(source.path, f"\ufeff{text}" if source.bom else text)


def _indent(source: Source, section: Section) -> str:
    """The indentation of a block's keys."""
    line = source.text[source.text.rfind("\n", 0, section.start) + 1 : section.start]
    return re.sub(r"[^\s]", " ", line)


def _inside_braces(source: Source, section: Section, entry: str) -> str:
    text = source.text
    if not section.pairs:
        changed = f"{text[: section.start + 1]}{entry}{text[section.start + 1 :]}"
    else:
        last = max(node.end for _, node in section.pairs)
        first = section.pairs[0][1]
        opening = text[section.start + 1 : first.start]
        space = re.match(r"\s*", opening)
        gap = space[0] if space and "\n" in space[0] else " "
        changed = f"{text[:last]},{gap}{entry}{text[last:]}"
    return changed


def _add_argument(source: Source, key: str, after: Plain) -> Source:
    """Add a keyword to the one call that a key such as ``TrainingArguments.bf16`` names."""
    holder, _, name = key.partition(".")
    code = Code.parse(source.path, source.whole)
    calls = [n for n in ast.walk(code.tree) if isinstance(n, ast.Call) and code.dotted(n.func).endswith(holder)]
    if not name or len(calls) != 1 or not (calls[0].keywords or calls[0].args):
        raise CannotEdit(f"{source.path} has no one place for {key}", hint="add it by hand")
    parts: list[ast.expr] = [*calls[0].args, *(k.value for k in calls[0].keywords)]
    last = max(parts, key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0))
    span = code.span(last)
    if span is None:
        raise CannotEdit(f"{source.path} is not UTF-8", hint="change it by hand")
    data = source.whole.encode()
    line = data[data.rfind(b"\n", 0, span[0]) + 1 : span[0]]
    several = last.lineno > calls[0].lineno
    gap = b"\n" + line[: len(line) - len(line.lstrip())] if several else b" "
    entry = f"{name}={write(after, 'python')}".encode()
    return Source(source.path, (data[: span[1]] + b"," + gap + entry + data[span[1] :]).decode())


def _verify(old: Source, new: Source, before: dict[str, Value], key: str, after: Plain) -> None:
    """Read the result back: the key has the new value, and every other key is as it was."""
    try:
        now = _values(new)
    except FormatError:
        now = {}
    if key not in now or now[key].value != after:
        raise CannotEdit(f"{key} cannot be set to {show(after)} in {old.path}", hint="change it by hand")
    others = [k for k in {*before, *now} - {key} if _written(before.get(k)) != _written(now.get(k))]
    if others:
        raise CannotEdit(
            f"{key} shares its value with {', '.join(sorted(others)[:3])} in {old.path}", hint="change it by hand"
        )


def _written(value: Value | None) -> str | None:
    """What must not change; values that follow from the changed one are written as before."""
    return None if value is None else value.text if value.value != () else "a list"

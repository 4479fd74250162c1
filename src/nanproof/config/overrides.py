"""Settings as typed on a command line: ``optimizer.lr=5e-5``, ``+x=1``, ``~y``, in the grammar of Hydra.

>>> parse_override("+optimizer.betas=[0.9,0.95]")
Override(kind='add', key='optimizer.betas', package='', value=(0.9, 0.95), text='+optimizer.betas=[0.9,0.95]')
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UsageError
from .source import MAX_DEPTH
from .value import Origin, Plain, Value

_KEY = re.compile(r"(\+\+|\+|~)?([\w./$-]+(?:\[[^\]]*\])?)(?:@([\w.:]*))?(?:=(.*))?", re.S)
_INT = re.compile(r"[-+]?(0|[1-9](_?\d)*)")
_FLOAT = re.compile(
    r"[-+]?((0|[1-9](_?\d)*)?\.\d(_?\d)*([eE][-+]?\d(_?\d)*)?|(0|[1-9](_?\d)*)\.([eE][-+]?\d(_?\d)*)?"
    r"|(0|[1-9](_?\d)*)[eE][-+]?\d(_?\d)*|inf|nan)",
    re.I,
)
_SWEEP = re.compile(r"(choice|range|interval|glob|shuffle|sort|tag|extend_list)\(.*\)", re.S)
_CAST = re.compile(r"(int|float|str|bool)\((.*)\)", re.S)
_PAIRS = {"[": "]", "{": "}", "(": ")"}


class Sweep(ValueError):
    """Several values at once, for several runs."""


@dataclass(frozen=True, slots=True)
class Override:
    """One change asked for from outside; ``value`` may be a dictionary."""

    kind: Literal["set", "add", "force", "delete"]
    key: str
    package: str
    value: Any
    text: str

    def values(self, path: str = "", line: int = 0, origin: Origin = "command-line") -> Iterator[Value]:
        """The settings that it brings."""
        yield from unfold(self.key, self.value, path=path, line=line, text=self.text, origin=origin)


def parse_override(text: str) -> Override:
    """The change behind one word of a command line."""
    found = _KEY.fullmatch(text.strip())
    if not found or (found[4] is None and found[1] != "~"):
        raise UsageError(f"{text!r} is not a change of a setting", hint="write key=value: optimizer.lr=5e-5")
    kinds: dict[str | None, Literal["set", "add", "force", "delete"]] = {
        None: "set",
        "+": "add",
        "++": "force",
        "~": "delete",
    }
    try:
        value = parse_value(found[4]) if found[4] is not None else None
    except Sweep:
        raise UsageError(f"{text!r} gives several values", hint="give one, a sweep is several runs") from None
    return Override(kinds[found[1]], found[2], found[3] or "", value, text)


def parse_value(text: str, depth: int = 0) -> Any:
    """A value as Hydra reads it: numbers, words, quotes, lists, dictionaries.

    >>> parse_value("1e-4"), parse_value("null"), parse_value("'1'"), parse_value("{a:1,b:[x,2]}")
    (0.0001, None, '1', {'a': 1, 'b': ('x', 2)})
    """
    text = text.strip()
    if depth > MAX_DEPTH:
        raise UsageError("a value is nested too deeply", hint="write it into the config file")
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    if text[:1] in ("[", "{") and text[-1] == _PAIRS[text[0]]:
        parts = [p for p in split(text[1:-1]) if p.strip()]
        if text[0] == "[":
            return tuple(parse_value(p, depth + 1) for p in parts)
        pairs = [p.partition(":") for p in parts]
        return {k.strip().strip("'\""): parse_value(v, depth + 1) for k, _, v in pairs}
    if depth == 0 and (_SWEEP.fullmatch(text) or len(split(text)) > 1):
        raise Sweep(text)
    if found := _CAST.fullmatch(text):
        return _cast(found[1], parse_value(found[2], depth + 1))
    return plain(text)


def plain(text: str) -> Plain:
    """A word or a number without quotes."""
    lowered = text.lower()
    if lowered in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[lowered]
    if len(text) < 1000:
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
    return re.sub(r"\\([\\()\[\]{}:=,\s])", r"\1", text)


def split(text: str) -> list[str]:
    """The parts between commas that stand outside of quotes and brackets."""
    parts, start, closing, quote, escaped = [], 0, [], "", False
    for index, char in enumerate(text):
        if escaped or char == "\\":
            escaped = not escaped
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _PAIRS:
            closing.append(_PAIRS[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif char == "," and not closing:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _cast(kind: str, value: Any) -> Any:
    try:
        match kind:
            case "int":
                return int(value)
            case "float":
                return float(value)
            case "str":
                return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    except (TypeError, ValueError, OverflowError):
        return value
    return value.lower() == "true" if isinstance(value, str) else bool(value)


def unfold(key: str, value: Any, *, path: str, line: int, text: str, origin: Origin) -> Iterator[Value]:
    """Plain values by dotted key for anything nested; what is no plain data is unknown."""
    stack = [(key, value, 0)]
    while stack:
        name, item, depth = stack.pop()
        if isinstance(item, Mapping) and depth < MAX_DEPTH:
            stack += [(f"{name}.{k}" if name else str(k), v, depth + 1) for k, v in reversed(list(item.items()))]
            continue
        nested = isinstance(item, list | tuple) and any(isinstance(i, Mapping | list | tuple) for i in item)
        if nested and depth < MAX_DEPTH:
            stack += [(f"{name}.{i}", v, depth + 1) for i, v in reversed(list(enumerate(item)))]
            item = ()
        if isinstance(item, list):
            item = tuple(item)
        known = _is_plain(item)
        yield Value(
            key=name, value=item if known else None, path=path, line=line, text=text, origin=origin, known=known
        )


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(v is None or isinstance(v, bool | int | float | str) for v in value)
    return value is None or isinstance(value, bool | int | float | str)

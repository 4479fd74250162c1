"""``${a.b}`` as OmegaConf resolves it: absolute, relative, nested, inside text; ``oc.env`` and ``oc.select``.

>>> from .source import Source
>>> from .yamlfile import values
>>> layers = Layers()
>>> for value in values(Source("c.yaml", "base: 1e-4\\nopt: {lr: '${base}', name: 'lr_${.lr}'}")):
...     layers.put(value)
>>> resolve(layers, {})
>>> [v.value for v in layers.settings()]
[0.0001, 0.0001, 'lr_0.0001']
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from .overrides import parse_value, split
from .source import MAX_NODES
from .value import Layers, Plain, Value

_DEPTH = 30
_PATH = re.compile(r"(\.*)([^\s.:\[\]{}$][^\s:\[\]{}$]*(?:\[[^\]]*\][^\s:\[\]{}$]*)*)?")


class _Open(Exception):
    """This cannot be resolved from the files alone."""


class _Points(str):
    """The key of a whole section that an interpolation points to."""


def resolve(layers: Layers, environment: Mapping[str, str]) -> None:
    """Replace every interpolation by what it stands for; what stays open is marked as unknown."""
    room = _Room(layers, environment)
    for key in [k for k, v in layers.values.items() if _marked(v.value)]:
        value = layers.values.get(key)
        if value is None:
            continue
        try:
            found = room.value(key, value.value, 0)
        except (_Open, RecursionError, ValueError):
            layers.values[key] = replace(value, known=False)
            layers.notes.append(f"{value.where}: {value.text} is only known when the program runs")
            continue
        if isinstance(found, _Points):
            room.copy(value, found)
        else:
            layers.values[key] = replace(value, value=found)


def _marked(value: Plain) -> bool:
    if isinstance(value, tuple):
        return any(_marked(v) for v in value)
    return isinstance(value, str) and "${" in value


class _Room:
    def __init__(self, layers: Layers, environment: Mapping[str, str]) -> None:
        self.layers, self.environment, self.copied, self.looked = layers, environment, 0, 0

    def value(self, key: str, value: Plain, depth: int) -> Plain:
        if isinstance(value, tuple):
            return tuple(self.value(f"{key}.{i}", v, depth + 1) for i, v in enumerate(value))
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > _DEPTH:
            raise _Open
        pieces = _pieces(value)
        if len(pieces) == 1 and pieces[0][0]:
            return self.inner(key, pieces[0][1], depth)
        words = []
        for marked, piece in pieces:
            found = self.inner(key, piece, depth) if marked else piece
            if isinstance(found, _Points | tuple):
                raise _Open
            words.append(str(found))
        if sum(map(len, words)) > MAX_NODES:
            raise _Open
        return "".join(words)

    def inner(self, key: str, text: str, depth: int) -> Plain:
        """What stands between ``${`` and ``}``."""
        if "${" in text and ":" not in text.partition("${")[0]:
            text = str(self.value(key, text, depth + 1))
        name, colon, rest = text.partition(":")
        if colon:
            return self.resolver(key, name.strip(), rest, depth)
        return self.look(key, text.strip(), depth)

    def resolver(self, key: str, name: str, rest: str, depth: int) -> Plain:
        arguments = [self.value(key, a.strip(), depth + 1) for a in split(rest)]
        first = str(arguments[0]) if arguments else ""
        default: Plain = parse_value(str(arguments[1]), 1) if len(arguments) > 1 else None
        if name in ("oc.env", "env"):
            if first in self.environment:
                return self.environment[first]
            if len(arguments) < 2:
                raise _Open
            return default if default is None else str(arguments[1]).strip("'\"")
        if name == "oc.select":
            try:
                return self.look("", first, depth)
            except _Open:
                return default
        if name == "oc.decode" and isinstance(arguments[0], str):
            decoded: Plain = parse_value(arguments[0], 1)
            return decoded
        raise _Open

    def look(self, key: str, path: str, depth: int) -> Plain:
        """The value at a path, seen from a key."""
        found = _PATH.fullmatch(path)
        self.looked += 1  # "${b}${b}" of "${c}${c}" of … doubles with every level
        if not found or not path or self.looked > MAX_NODES:
            raise _Open
        dots, rest = found[1], re.sub(r"\[([^\]]*)\]", r".\1", found[2] or "").strip(".")
        if dots:
            parts = key.split(".")
            if len(dots) > len(parts):
                raise _Open
            rest = ".".join([*parts[: len(parts) - len(dots)], *([rest] if rest else [])])
        value = self.layers.values.get(rest)
        if value is not None and value.value != ():
            if not value.known:
                raise _Open
            return self.value(rest, value.value, depth + 1)
        head, _, index = rest.rpartition(".")
        held = self.layers.values.get(head)
        if held is not None and isinstance(held.value, tuple) and index.isdecimal() and int(index) < len(held.value):
            return self.value(rest, held.value[int(index)], depth + 1)
        if self.layers.has(rest) and not key.startswith(f"{rest}."):
            return _Points(rest)
        raise _Open

    def copy(self, value: Value, section: str) -> None:
        """Put a copy of a section in the place of the interpolation that names it."""
        below = [(k, v) for k, v in self.layers.values.items() if k.startswith(f"{section}.")]
        self.copied += len(below)
        if self.copied > MAX_NODES:
            raise ValueError("too many values")
        del self.layers.values[value.key]
        for name, held in below:
            key = value.key + name[len(section) :]
            try:
                found = self.value(name, held.value, 0)
            except _Open:
                found = held.value
            self.layers.put(replace(held, key=key, value=found, span=None))


def _pieces(text: str) -> list[tuple[bool, str]]:
    """Text cut into what stands in ``${…}`` (True) and the rest."""
    pieces: list[tuple[bool, str]] = []
    at = 0
    while (start := text.find("${", at)) >= 0:
        if text[:start].endswith("\\"):
            pieces.append((False, text[at : start - 1] + "${"))
            at = start + 2
            continue
        depth, end = 1, start + 2
        while depth and end < len(text):
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        if depth:
            raise _Open
        if start > at:
            pieces.append((False, text[at:start]))
        pieces.append((True, text[start + 2 : end - 1]))
        at = end
    if at < len(text):
        pieces.append((False, text[at:]))
    return pieces

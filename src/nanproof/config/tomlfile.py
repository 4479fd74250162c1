"""TOML with the place of every value: tomllib says what is right, a cursor says where it stands.

>>> [(v.key, v.value, v.line) for v in values(Source("c.toml", '[optim]\\nlr = 1e-4\\nbetas = [0.9, 0.95]'))]
[('optim.lr', 0.0001, 2), ('optim.betas', (0.9, 0.95), 3)]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

from ..errors import FormatError
from .source import MAX_DEPTH, Source
from .tree import Items, Leaf, Node, Section, flatten
from .value import Origin, Value

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.S)
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ATOM = re.compile(r"[^,\]}#\r\n]+")


def values(source: Source, origin: Origin = "toml") -> Iterator[Value]:
    """Every value of the file."""
    return flatten(read_toml(source), source, origin)


def read_toml(source: Source) -> Section:
    """The file as a tree."""
    try:
        tomllib.loads(source.text)
        return _Reader(source.text).read()
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise FormatError(f"{source.path} is not TOML: {error}", hint="correct it, or give another file") from None


class _Reader:
    """Walks a text that tomllib has accepted."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text.replace("\r\n", " \n"), 0  # the same length: places stay

    def read(self) -> Section:
        root = Section(start=0, end=len(self.text))
        here = root
        while self.skip(_BLANK) < len(self.text):
            if self.text[self.at] == "[":
                many = self.text.startswith("[[", self.at)
                self.at += 2 if many else 1
                names = self.path()
                self.at = self.text.index("]", self.at) + (2 if many else 1)
                here = self.descend(root, names, many)
                here.start = here.end = self.at
                continue
            *sections, name = self.path()
            self.at = self.text.index("=", self.at) + 1
            self.skip(_SPACE)
            node = self.value(0)
            self.descend(here, sections, False).pairs.append((name, node))
            here.end = self.at
        return root

    def skip(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return self.at

    def path(self) -> list[str]:
        names = []
        while True:
            self.skip(_SPACE)
            quoted = _STRING.match(self.text, self.at)
            found = quoted or _BARE.match(self.text, self.at)
            if not found:
                raise ValueError("a key is missing")
            self.at = found.end()
            names.append(str(tomllib.loads(f"v = {found[0]}")["v"]) if quoted else found[0])
            self.skip(_SPACE)
            if self.text[self.at : self.at + 1] != ".":
                return names
            self.at += 1

    def descend(self, root: Section, names: list[str], many: bool) -> Section:
        here = root
        for index, name in enumerate(names):
            found = here.get(name)
            if isinstance(found, Items) and not (many and index == len(names) - 1):
                found = found.items[-1]
            if many and index == len(names) - 1:
                rows = found if isinstance(found, Items) else Items(start=self.at, end=self.at)
                if found is None:
                    here.pairs.append((name, rows))
                found = Section(start=self.at, end=self.at)
                rows.items.append(found)
            elif not isinstance(found, Section):
                found = Section(start=self.at, end=self.at)
                here.pairs.append((name, found))
            here = found
        return here

    def value(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        start, mark = self.at, self.text[self.at]
        if mark == "[":
            rows = Items(start=start, end=start)
            self.at += 1
            while self.skip(_BLANK) < len(self.text) and self.text[self.at] != "]":
                rows.items.append(self.value(depth + 1))
                self.skip(_BLANK)
                self.at += self.text[self.at] == ","
            self.at += 1
            rows.end = self.at
            return rows
        if mark == "{":
            return self.inline(depth)
        found = _STRING.match(self.text, start) or _ATOM.match(self.text, start)
        if not found:
            raise ValueError("a value is missing")
        text = found[0].rstrip()
        self.at = start + len(text)
        value = tomllib.loads(f"v = {text}")["v"]
        plain = value if isinstance(value, bool | int | float | str) else text
        return Leaf(value=plain, start=start, end=self.at)

    def inline(self, depth: int) -> Section:
        section = Section(start=self.at, end=self.at, flow=True)
        self.at += 1
        while self.skip(_BLANK) < len(self.text) and self.text[self.at] != "}":
            *sections, name = self.path()
            self.at = self.text.index("=", self.at) + 1
            self.skip(_SPACE)
            node = self.value(depth + 1)
            self.descend(section, sections, False).pairs.append((name, node))
            self.skip(_BLANK)
            self.at += self.text[self.at] == ","
        self.at += 1
        section.end = self.at
        return section

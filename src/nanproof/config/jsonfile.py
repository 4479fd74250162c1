"""JSON with the place of every value; NaN and Infinity are taken as Python writes them.

>>> [(v.key, v.value, v.line) for v in values(Source("ds.json", '{"fp16": {\\n "enabled": true}}'))]
[('fp16.enabled', True, 2)]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ..errors import FormatError
from .source import MAX_DEPTH, MAX_NODES, Source
from .tree import Items, Leaf, Node, Section, flatten
from .value import Origin, Plain, Value

_SPACE = re.compile(r"[ \t\r\n]*")
_ATOM = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|-?Infinity|NaN|true|false|null")
_WORDS: dict[str, Plain] = {"true": True, "false": False, "null": None}


def values(source: Source, origin: Origin = "json") -> Iterator[Value]:
    """Every value of the file."""
    return flatten(read_json(source), source, origin)


def read_json(source: Source) -> Section:
    """The file as a tree."""
    reader = _Reader(source)
    root = reader.read()
    if not isinstance(root, Section):
        raise FormatError(f"{source.path} is not a mapping of keys to values", hint="give the config file of the run")
    return root


class _Reader:
    """A cursor over the text; nesting costs no stack."""

    def __init__(self, source: Source) -> None:
        self.source, self.text, self.at = source, source.text, 0
        self.decoder = json.JSONDecoder(strict=False)

    def read(self) -> Node:
        opened: list[Section | Items] = []
        keys: list[str] = []
        for _ in range(MAX_NODES):
            self.skip()
            node = self.atom() if self.peek() not in "{[" else self.open()
            if isinstance(node, Section | Items) and not self.closes(node):
                opened.append(node)
                if len(opened) > MAX_DEPTH:
                    raise self.wrong("it is nested too deeply")
                keys.append(self.key() if isinstance(node, Section) else "")
                continue
            while opened:
                holder = opened[-1]
                if isinstance(holder, Section):
                    holder.pairs.append((keys[-1], node))
                else:
                    holder.items.append(node)
                self.skip()
                if self.take(","):
                    keys[-1] = self.key() if isinstance(holder, Section) else ""
                    break
                if not self.closes(holder):
                    raise self.wrong("a comma or the end of a section is missing")
                opened.pop(), keys.pop()
                node = holder
            else:
                self.skip()
                if self.at < len(self.text):
                    raise self.wrong("there is more after the end")
                return node
        raise self.wrong("it holds too many values")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1] or "\0"

    def skip(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def take(self, mark: str) -> bool:
        if self.peek() != mark:
            return False
        self.at += 1
        return True

    def open(self) -> Section | Items:
        start, brace = self.at, self.peek() == "{"
        self.at += 1
        return Section(start=start, end=start, flow=True) if brace else Items(start=start, end=start)

    def closes(self, node: Section | Items) -> bool:
        self.skip()
        closed = self.take("}" if isinstance(node, Section) else "]")
        node.end = self.at
        return closed

    def key(self) -> str:
        self.skip()
        if self.peek() != '"':
            raise self.wrong("a key in double quotes is missing")
        name = self.string()
        self.skip()
        if not self.take(":"):
            raise self.wrong("a colon is missing")
        return name

    def string(self) -> str:
        try:
            value, self.at = self.decoder.raw_decode(self.text, self.at)
        except ValueError:
            raise self.wrong("a string does not end") from None
        return str(value)

    def atom(self) -> Leaf:
        start = self.at
        if self.peek() == '"':
            value: Plain = self.string()
            return Leaf(value=value, start=start, end=self.at)
        found = _ATOM.match(self.text, start)
        if not found:
            raise self.wrong("a value is missing")
        self.at = found.end()
        word = found[0]
        try:
            value = _WORDS[word] if word in _WORDS else json.loads(word)
        except ValueError:  # an integer with more digits than Python converts
            return Leaf(value=word, start=start, end=self.at, known=False)
        return Leaf(value=value, start=start, end=self.at)

    def wrong(self, words: str) -> FormatError:
        return FormatError(
            f"{self.source.path} is not JSON: {words} (line {self.source.line(self.at)})",
            hint="correct it, or give another file",
        )

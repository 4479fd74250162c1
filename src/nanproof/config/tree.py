"""What a YAML, JSON or TOML file holds: sections, lists and leaves, each with its place in the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import FormatError
from .source import MAX_DEPTH, MAX_NODES, Source
from .value import Origin, Plain, Value

Node: TypeAlias = "Leaf | Section | Items"


@dataclass(slots=True, kw_only=True)
class Leaf:
    value: Plain
    start: int
    end: int
    known: bool = True


@dataclass(slots=True, kw_only=True)
class Section:
    """A mapping. ``flow`` when it stands in braces."""

    pairs: list[tuple[str, Node]] = field(default_factory=list)
    start: int
    end: int
    flow: bool = False

    def get(self, key: str) -> Node | None:
        return next((node for name, node in reversed(self.pairs) if name == key), None)


@dataclass(slots=True, kw_only=True)
class Items:
    """A list."""

    items: list[Node] = field(default_factory=list)
    start: int
    end: int


def flatten(root: Section, source: Source, origin: Origin) -> Iterator[Value]:
    """Every leaf by dotted key. A list of plain values is one value; in other lists the items count from 0."""
    count = 0
    stack: list[tuple[str, Node, int]] = [("", root, 0)]
    while stack:
        key, node, depth = stack.pop()
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH:  # aliases multiply what was small on disk
            raise FormatError(
                f"{source.path} unfolds to too many values", hint="give a config file without nested aliases"
            )
        if isinstance(node, Section):
            stack += [(f"{key}.{name}" if key else name, item, depth + 1) for name, item in reversed(node.pairs)]
            continue
        if isinstance(node, Items):
            count += len(node.items)
            leaves = [i for i in node.items if isinstance(i, Leaf)]
            if len(leaves) < len(node.items):
                stack += [(f"{key}.{i}", item, depth + 1) for i, item in reversed(list(enumerate(node.items)))]
                leaves = []
            value: Plain = tuple(leaf.value for leaf in leaves)
            known = all(leaf.known for leaf in leaves)
        else:
            value, known = node.value, node.known
        yield Value(
            key=key,
            value=value,
            path=source.path,
            line=source.line(node.start),
            column=source.column(node.start),
            text=source.text[node.start : node.end].rstrip(),
            origin=origin,
            span=source.bytes(node.start, node.end),
            known=known,
        )

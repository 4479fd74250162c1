"""YAML by events: nothing is built that the file did not write, aliases are shared, nesting is bounded.

>>> [(v.key, v.value, v.line) for v in values(Source("c.yaml", "a: &x {lr: 1e-4}\\nb:\\n  <<: *x\\n  eps: 1.0e-8"))]
[('a.lr', 0.0001, 1), ('b.lr', 0.0001, 1), ('b.eps', 1e-08, 4)]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..errors import FormatError
from .source import MAX_DEPTH, MAX_NODES, Source
from .tree import Items, Leaf, Node, Section, flatten
from .value import Origin, Plain, Value

# What OmegaConf and YAML 1.2 take for a float; YAML 1.1, and with it PyYAML, wants a dot and a signed exponent.
_FLOAT = re.compile(r"[-+]?(\d+(_\d+)*\.[\d_]*([eE][-+]?\d+)?|\d+(_\d+)*[eE][-+]?\d+|\.\d+(_\d+)*([eE][-+]?\d+)?)")
_CODE = re.compile(r"tag:yaml\.org,2002:python/\S*?:(os|posix|nt|subprocess|builtins|sys|shutil|importlib|runpy|pty)\b")
_PREFIX = "tag:yaml.org,2002:"


def values(source: Source, origin: Origin = "yaml") -> Iterator[Value]:
    """Every value of the file."""
    return flatten(read_yaml(source), source, origin)


def read_yaml(source: Source) -> Section:
    """The first document of the file as a tree."""
    import yaml

    try:
        return _build(source)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None else ""
        words = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
        raise FormatError(
            f"{source.path} is not YAML: {words}{line}", hint="correct it, or give another file"
        ) from None


def _build(source: Source) -> Section:
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    maker = _Maker(source)
    open_nodes: list[tuple[Section | Items, list[Node]]] = []
    root: Node | None = None
    for count, event in enumerate(yaml.parse(source.text, Loader=loader)):
        if count > MAX_NODES or len(open_nodes) > MAX_DEPTH:
            raise FormatError(
                f"{source.path} has too many or too deeply nested values", hint="give a plain config file"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((maker.start(event), []))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            ended, below = open_nodes.pop()
            maker.finish(ended, below, event)
            node: Node = ended
        elif isinstance(event, yaml.ScalarEvent):
            node = maker.leaf(event)
        elif isinstance(event, yaml.AliasEvent):
            node = maker.alias(event, [held for held, _ in open_nodes])
        elif isinstance(event, yaml.DocumentEndEvent) and root is not None:
            break
        else:
            continue
        if open_nodes:
            open_nodes[-1][1].append(node)
        else:
            root = node
    if not isinstance(root, Section):
        raise FormatError(f"{source.path} is not a mapping of keys to values", hint="give the config file of the run")
    return root


class _Maker:
    """Makes nodes of events, and remembers the anchors."""

    def __init__(self, source: Source) -> None:
        import yaml

        self.source = source
        self.anchors: dict[str, Node] = {}
        self.yaml: Any = yaml.SafeLoader("")
        self.scalar = yaml.ScalarNode

    def start(self, event: Any) -> Section | Items:
        import yaml

        self._refuse_code(event.tag)
        place = {"start": event.start_mark.index, "end": event.end_mark.index}
        mapping = isinstance(event, yaml.MappingStartEvent)
        node: Section | Items = Section(**place, flow=bool(event.flow_style)) if mapping else Items(**place)
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def finish(self, node: Section | Items, below: list[Node], event: Any) -> None:
        if isinstance(node, Items):
            node.items = below
        else:
            merged: list[tuple[str, Node]] = []
            for key, item in zip(below[::2], below[1::2], strict=True):
                text = self.source.text[key.start : key.end]
                if text == "<<" and isinstance(item, Section | Items):
                    parts = item.items[::-1] if isinstance(item, Items) else [item]
                    merged += [pair for part in parts if isinstance(part, Section) for pair in part.pairs]
                elif isinstance(key, Leaf):
                    node.pairs.append((str(key.value) if key.value is not None else text, item))
            own = {name for name, _ in node.pairs}
            node.pairs = [pair for pair in merged if pair[0] not in own] + node.pairs
        # the end of a block stands where the next token begins; its last item says better where it ends
        braces = self.source.text[node.start : node.start + 1] in ("[", "{")
        node.end = event.end_mark.index if braces or not below else max(b.end for b in below)

    def leaf(self, event: Any) -> Leaf:
        self._refuse_code(event.tag)
        value, known = self._value(event)
        node = Leaf(value=value, start=event.start_mark.index, end=event.end_mark.index, known=known)
        if event.anchor or event.tag:  # the mark begins at the anchor or tag; only the value is to be edited
            written = self.source.text[node.start : node.end]
            node.start += len(re.match(r"(?:[&!]\S*\s+)*", written)[0])  # type: ignore[index]
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def _value(self, event: Any) -> tuple[Plain, bool]:
        plain, quoted = event.implicit
        tag = event.tag or self.yaml.resolve(self.scalar, event.value, (plain, quoted))
        if not event.tag and plain and _FLOAT.fullmatch(event.value):
            return float(event.value.replace("_", "")), True
        kind = tag.removeprefix(_PREFIX)
        if kind in ("null", "bool", "int", "float", "str"):
            try:
                built = self.yaml.construct_object(self.scalar(tag, event.value))
            except (ValueError, KeyError):
                return event.value, not event.tag
            return built, True
        return event.value, kind in ("timestamp", "merge", "value") and not event.tag

    def alias(self, event: Any, opened: list[Section | Items]) -> Node:
        node = self.anchors.get(event.anchor)
        if node is None:
            raise FormatError(f"{self.source.path} is not YAML: there is no anchor {event.anchor}", hint="correct it")
        if any(node is held for held in opened):
            raise FormatError(
                f"{self.source.path} unfolds to too many values: {event.anchor} holds itself",
                hint="give a config file without such aliases",
            )
        return node

    def _refuse_code(self, tag: str | None) -> None:
        if tag and (found := _CODE.match(tag)):
            raise FormatError(
                f"{self.source.path} is not YAML to be read: its tag {found[0].removeprefix(_PREFIX)} runs code",
                hint="do not load this file with yaml.load either",
            )

"""JSON Schemas of records and of what commands print, derived from the types themselves.

>>> schema_of(Incident)["required"][:3]
['id', 'step', 'time']
>>> schema_of(int | list[str], title="either")["anyOf"]
[{'type': 'integer'}, {'type': 'array', 'items': {'type': 'string'}}]
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from . import records
from .records import Incident


def schema_of(kind: Any, title: str = "", *, printed: bool = False) -> dict[str, Any]:
    """A JSON Schema (2020-12) for a type; further fields are allowed, as a reader keeps them.

    A reader may leave out fields that have defaults; what is ``printed`` has all of them.
    """
    writer = _Writer(printed)
    whole = writer.fields(kind) if _has_fields(kind) else writer.schema(kind)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title or kind.__name__}
    return head | whole | {"$defs": {name: writer.parts[name] for name in sorted(writer.parts)}}


def _has_fields(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or typing.is_typeddict(kind))


class _Writer:
    def __init__(self, printed: bool) -> None:
        self.printed = printed
        self.parts: dict[str, Any] = {}  # records inside records, by name: one of them contains itself

    def fields(self, kind: Any) -> dict[str, Any]:
        # records may be imported for type checkers alone in the module of a kind that has them
        hints = typing.get_type_hints(kind, {**vars(records), **vars(sys.modules[kind.__module__])})
        if typing.is_typeddict(kind):
            names, required = list(hints), [n for n in hints if n in kind.__required_keys__]
        else:
            fields = [f for f in dataclasses.fields(kind) if not (kind is Incident and f.name == "unknown")]
            missing = dataclasses.MISSING
            names = [f.name for f in fields]
            needed = [f.name for f in fields if f.default is missing and f.default_factory is missing]
            required = names if self.printed else needed
        properties = {name: self.schema(hints[name]) for name in names}
        return {"type": "object", "properties": properties, "required": required}

    def schema(self, kind: Any) -> dict[str, Any]:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if _has_fields(kind):
            if kind.__name__ not in self.parts:
                self.parts[kind.__name__] = {}  # begun
                self.parts[kind.__name__] = self.fields(kind)
            return {"$ref": f"#/$defs/{kind.__name__}"}
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self.schema(a) for a in args]}
        if origin is Literal:
            return {"enum": list(args)}
        if origin is tuple and args[1:] != (Ellipsis,):
            return {"type": "array", "prefixItems": [self.schema(a) for a in args]}
        if origin in (tuple, list):
            return {"type": "array", "items": self.schema(args[0])}
        if origin in (Mapping, dict):
            return {"type": "object", "additionalProperties": self.schema(args[1])}
        if kind is float:
            return {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
        names = {int: "integer", str: "string", bool: "boolean", type(None): "null"}
        return {"type": names[kind]} if kind in names else {}

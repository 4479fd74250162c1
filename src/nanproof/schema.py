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


def schema_of(kind: Any, title: str = "") -> dict[str, Any]:
    """A JSON Schema (2020-12) for a type; further fields are allowed, as a reader keeps them."""
    parts: dict[str, Any] = {}  # records inside records, by name: one of them contains itself
    whole = _fields(kind, parts) if _has_fields(kind) else _schema(kind, parts)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title or kind.__name__}
    return head | whole | {"$defs": {name: parts[name] for name in sorted(parts)}}


def _has_fields(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or typing.is_typeddict(kind))


def _fields(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    # records may be imported for type checkers alone in the module of a kind that has them
    hints = typing.get_type_hints(kind, {**vars(records), **vars(sys.modules[kind.__module__])})
    if typing.is_typeddict(kind):
        names, required = list(hints), [n for n in hints if n in kind.__required_keys__]
    else:
        fields = [f for f in dataclasses.fields(kind) if not (kind is Incident and f.name == "unknown")]
        missing = dataclasses.MISSING
        names = [f.name for f in fields]
        required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    properties = {name: _schema(hints[name], parts) for name in names}
    return {"type": "object", "properties": properties, "required": required}


def _schema(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _has_fields(kind):
        if kind.__name__ not in parts:
            parts[kind.__name__] = {}  # begun
            parts[kind.__name__] = _fields(kind, parts)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(a, parts) for a in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple and args[1:] != (Ellipsis,):
        return {"type": "array", "prefixItems": [_schema(a, parts) for a in args]}
    if origin in (tuple, list):
        return {"type": "array", "items": _schema(args[0], parts)}
    if origin in (Mapping, dict):
        return {"type": "object", "additionalProperties": _schema(args[1], parts)}
    if kind is float:
        return {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    names = {int: "integer", str: "string", bool: "boolean", type(None): "null"}
    return {"type": names[kind]} if kind in names else {}

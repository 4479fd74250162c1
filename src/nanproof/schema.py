"""The JSON Schema of a record, derived from the record itself.

>>> schema_of(Incident)["required"][:3]
['id', 'step', 'time']
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from .records import Incident


def schema_of(record: type) -> dict[str, Any]:
    """A JSON Schema (2020-12) for a record class; further fields are allowed, as a reader keeps them."""
    parts: dict[str, Any] = {}  # records inside records, by name: one of them contains itself
    whole = _record(record, parts)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": record.__name__}
    return head | whole | {"$defs": {name: parts[name] for name in sorted(parts)}}


def _record(record: type, parts: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    fields = [f for f in dataclasses.fields(record) if not (record is Incident and f.name == "unknown")]
    missing = dataclasses.MISSING
    return {
        "type": "object",
        "properties": {f.name: _schema(hints[f.name], parts) for f in fields},
        "required": [f.name for f in fields if f.default is missing and f.default_factory is missing],
    }


def _schema(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in parts:
            parts[kind.__name__] = {}  # begun
            parts[kind.__name__] = _record(kind, parts)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(a, parts) for a in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": _schema(args[0], parts)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(args[1], parts)}
    if kind is float:
        return {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    names = {int: "integer", str: "string", bool: "boolean", type(None): "null"}
    return {"type": names[kind]} if kind in names else {}

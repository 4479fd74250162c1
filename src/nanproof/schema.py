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
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": record.__name__}
    return schema | _schema(record)


def _schema(kind: Any) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = [f for f in dataclasses.fields(kind) if not (kind is Incident and f.name == "unknown")]
        missing = dataclasses.MISSING
        return {
            "type": "object",
            "properties": {f.name: _schema(hints[f.name]) for f in fields},
            "required": [f.name for f in fields if f.default is missing and f.default_factory is missing],
        }
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(a) for a in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": _schema(args[0])}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(args[1])}
    if kind is float:
        return {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    names = {int: "integer", str: "string", bool: "boolean", type(None): "null"}
    return {"type": names[kind]} if kind in names else {}

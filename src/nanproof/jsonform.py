"""The strict JSON form of records: NaN and ±Inf as words, wrong types refused with the field named."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from .errors import FormatError

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: object) -> Any:
    """Plain JSON values for records, mappings, sequences and numbers; non-finite numbers become words.

    >>> to_json({"loss": math.nan, "names": ("a", "b")})
    {'loss': 'NaN', 'names': ['a', 'b']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if dataclasses.is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


T = TypeVar("T")


def from_json(cls: type[T], data: object) -> T:
    """The record that `to_json` wrote; wrong types are refused with the field named."""
    return typing.cast(T, _read(cls, data, cls.__name__))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a record's fields; evaluating them costs more than reading the record."""
    return typing.get_type_hints(kind)


def _read(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(data, dict):
            raise FormatError(f"{where} must be an object")
        hints = _hints(kind)
        fields = {f.name: f for f in dataclasses.fields(kind)}
        required = dataclasses.MISSING
        for name, f in fields.items():
            if name not in data and f.default is required and f.default_factory is required:
                raise FormatError(f"{where} has no {name}")
        return kind(**{k: _read(hints[k], v, f"{where}.{k}") for k, v in data.items() if k in fields})
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return _read(next(a for a in args if a is not type(None)), data, where)
    if origin is Literal:
        if data not in args:
            raise FormatError(f"{where} is {data!r}, not one of {args}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise FormatError(f"{where} must be a list")
        return tuple(_read(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if origin is Mapping:
        if not isinstance(data, dict):
            raise FormatError(f"{where} must be an object")
        return {k: _read(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if kind is float:
        if isinstance(data, str) and data in _WORDS:
            return _WORDS[data]
        if isinstance(data, int | float) and not isinstance(data, bool):
            return float(data)
    elif isinstance(data, kind) and not (kind is int and isinstance(data, bool)):
        return data
    raise FormatError(f"{where} must be {kind.__name__}, not {type(data).__name__}")

"""JSON objects, many at a time: strict parsing is the quick way, and NaN must not be in it."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

_BARE = re.compile(rb"(?<=[:,\[\s])(-?(?:NaN|nan|Infinity|inf))(?=[\s,}\]])")


def parse_objects(objects: bytes) -> list[dict[str, Any]] | None:
    """JSON objects with commas between; bare NaN and Infinity, which orjson refuses, become strings.

    >>> parse_objects(b'{"loss": NaN},{"loss": 2}'), parse_objects(b"{'loss': 2}")
    ([{'loss': 'NaN'}, {'loss': 2}], None)
    """
    for quote in (None, _quote_bare, _quote_any):
        try:
            rows = orjson.loads(b"[" + (quote(objects) if quote is not None else objects) + b"]")
        except orjson.JSONDecodeError:
            continue
        return rows if set(map(type, rows)) == {dict} else None
    return None


def parse_object(line: bytes) -> dict[str, Any] | None:
    """One object, as lenient as Python is."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _quote_bare(objects: bytes) -> bytes:
    """The words that Python's json writes, in quotes: quick, and wrong only within texts."""
    for bare in (b"NaN", b"Infinity", b"-Infinity"):
        objects = objects.replace(b":" + bare, b':"' + bare + b'"').replace(b": " + bare, b': "' + bare + b'"')
    return objects


def _quote_any(objects: bytes) -> bytes:
    return _BARE.sub(rb'"\1"', objects)

"""The numbers of logs: what trainers, printf and JSON write, and nothing that only Python would read.

>>> parse(b"-1.#IND"), parse(b"nan.0"), parse(b"1,024.0"), parse(b"1e999")
(nan, nan, 1024.0, inf)
>>> parse(b"1_0"), parse("٣".encode()), parse(b"12:30"), parse(b"v2")
(None, None, None, None)
"""

from __future__ import annotations

import math
import re

# Possessive quantifiers (*+, ++) never give back what they took: no line, however long, makes these slow.
NUMBER = (
    rb"[-+]?(?:"
    rb"1\.\#(?i:ind|inf|qnan|snan)\d*+"  # what Microsoft's printf writes
    rb"|(?i:nan)(?:\((?i:ind|snan|qnan)\)|\.0)?|(?i:inf(?:inity)?)(?:\.0)?"  # nan.0: the progress bar of Lightning
    rb"|\d{1,3}(?:,\d{3})++(?:\.\d*+)?"
    rb"|(?:\d++\.\d*+|\.\d++)(?:[eE][-+]?\d++)?|\d++(?:[eE][-+]?\d++|(?!,\d))"  # 1,5 is no whole number
    rb")"
)
"""A number, as a regular expression for bytes; it says nothing about what follows, see `END`."""

END = rb"(?![\w#]|\.\d|:\w)"
"""What must not follow a number: the rest of a word, of a clock time, of a version."""

_WHOLE = re.compile(NUMBER)
_WORDS = {b"nan": math.nan, b"inf": math.inf, b"1.#": math.nan}


def parse(text: bytes) -> float | None:
    """The number that a text is, or None."""
    text = text.strip()
    return value(text) if _WHOLE.fullmatch(text) else None


def value(number: bytes) -> float:
    """The value of a match of `NUMBER`."""
    try:
        return float(number)
    except ValueError:  # the forms that only logs know
        lower = number.lower().lstrip(b"+-")
        if lower.startswith(b"1.#inf"):
            lower = b"inf"
        word = _WORDS.get(lower[:3])
        if word is None:
            return float(number.replace(b",", b""))
        return -word if number.startswith(b"-") and word == word else word


def of(thing: object) -> float | None:
    """The number behind a value of JSON, YAML or SQL, or None.

    >>> of(True), of("NaN"), of("6.21"), of([3e-4]), of({"a": 1}), of(None)
    (1.0, nan, 6.21, 0.0003, None, None)
    """
    if isinstance(thing, int | float):
        try:
            return float(thing)
        except OverflowError:
            return math.inf if thing > 0 else -math.inf
    if isinstance(thing, str):
        return parse(thing.encode("ascii", "replace")) if len(thing) <= 64 else None
    if isinstance(thing, list | tuple) and len(thing) == 1:  # lr=[1e-05]
        return of(thing[0]) if not isinstance(thing[0], list | tuple) else None
    return None


def whole(thing: object) -> int | None:
    """The step or the total behind a value: an integer that fits into 64 bits, or None.

    >>> whole(3.0), whole("120"), whole(3.5), whole(float("nan")), whole(1e300)
    (3, 120, None, None, None)
    """
    number = of(thing)
    if number is None or not abs(number) < 2**62 or number != int(number):
        return None
    return int(thing) if isinstance(thing, int) else int(number)

"""How a value is written in each format.

>>> write(5e-05, "yaml"), write(5e-05, "python"), write(1e-4, "python", "2e-4"), write("bf16-mixed", "json")
('5.0e-5', '5e-5', '1e-4', '"bf16-mixed"')
"""

from __future__ import annotations

import json
import math
import re
from typing import Literal

from ..floats import find_format
from .value import Plain

Format = Literal["yaml", "json", "toml", "python"]
_POWER = re.compile(r"\d\.?e[-+]?\d", re.I)
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "none", "y", "n", "nan", "inf"}


def write(value: Plain, form: Format, before: str = "") -> str:
    """The source of a value; ``before`` is what stood there, whose way of writing booleans is kept."""
    if isinstance(value, tuple):
        inner = ", ".join(write(v, form) for v in value)
        return f"({inner}{',' if len(value) == 1 else ''})" if form == "python" and before[:1] == "(" else f"[{inner}]"
    if value is None:
        return {"python": "None", "toml": '""'}.get(form, "null")
    if isinstance(value, bool):
        word = str(value) if form == "python" else str(value).lower()
        if form == "yaml" and before in ("True", "False"):
            return str(value)
        return {"yes": "no", "no": "yes", "on": "off", "off": "on"}.get(before, word) if form == "yaml" else word
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value, form, bool(_POWER.search(before)))
    if form == "python" and before.startswith("torch.") and find_format(value) is not None:
        return f"torch.{value}"
    if form == "yaml" and _PLAIN.fullmatch(value) and value.lower() not in _WORDS and before[:1] not in ("'", '"'):
        return value
    return json.dumps(value, ensure_ascii=False)


def _number(value: float, form: Format, powers: bool) -> str:
    if not math.isfinite(value):
        words = {"yaml": (".nan", ".inf"), "toml": ("nan", "inf"), "json": ("NaN", "Infinity")}
        nan, inf = words.get(form, ('float("nan")', 'float("inf")'))
        return nan if math.isnan(value) else inf if value > 0 else f"-{inf}"
    text = repr(value)
    if powers and "e" not in text and 0 < abs(value) < 0.01:  # as it was written before: 1e-4, not 0.0001
        text = f"{value:e}" if float(f"{value:e}") == value else text
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    if form == "yaml" and "." not in mantissa:  # YAML 1.1 takes 5e-05 for a word
        mantissa += ".0"
    power = int(exponent)
    return f"{mantissa}e{power:+d}" if form == "yaml" or power < 0 else f"{mantissa}e{power}"

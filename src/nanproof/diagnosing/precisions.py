"""What a line about precision says, as people write it.

>>> [str(f) for f in read_precision("pure fp16 + 4bit", where="precision")]
['precision fp16 (precision)', 'pure fp16, without fp32 weights (precision)', 'weights fp16 (precision)']
>>> [str(f) for f in read_precision("bf16-mixed", where="config.yaml:3")]
['precision bf16 (config.yaml:3)']
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .evidence import Fact

_FORMATS = (
    ("fp4", r"fp4|nvfp4|mxfp4"),
    ("fp8", r"fp8|float8|e4m3|e5m2|mxfp8|transformer engine"),
    ("bf16", r"bf16|bfloat16"),
    ("fp16", r"fp16|float16|\bhalf\b|16-mixed|\b16[- ]bit|^16$|apex|\bo[12]\b|\bamp\b|autocast|16-true"),
    ("fp32", r"fp32|float32|\btf32\b|32-true|^32$|full precision|\b32[- ]bit|^no$|^none$|^off$|double|fp64"),
)
_PURE = re.compile(r"pure|16-true|\bo3\b|full(y)? (fp16|bf16|half)|\.half|weights", re.IGNORECASE)
_NO_SCALER = re.compile(r"(no|without|missing)( a| any)?( grad)?[- ]?scaler", re.IGNORECASE)


def read_precision(text: str, *, where: str) -> Iterator[Fact]:
    """Facts from a free description of the training precision."""
    name = find_format(text)
    if not name:
        return
    yield Fact(name="precision", value=name, where=where)
    if name in ("fp16", "bf16") and _PURE.search(text):
        if name == "fp16":
            yield Fact(name="pure-half", where=where, words="pure fp16, without fp32 weights")
        yield Fact(name="weights", value=name, where=where)
    if name == "fp16" and _NO_SCALER.search(text):
        yield Fact(name="no-scaler", where=where, words="fp16 without a GradScaler")


def find_format(text: str) -> str:
    """The format that decides: the narrowest that is named."""
    return next((name for name, pattern in _FORMATS if re.search(pattern, text[:1000], re.IGNORECASE)), "")

"""Would ``torch.load(weights_only=True)`` accept the file? What its pickle machine knows, as of torch 2.13."""

from __future__ import annotations

from .opcodes import NAMES, SHAPES

# The instructions of torch's weights_only machine; it ends at any other.
_KNOWN = """
GLOBAL NEWOBJ REDUCE BUILD APPEND APPENDS SETITEM SETITEMS MARK TUPLE TUPLE1 TUPLE2 TUPLE3 NONE NEWFALSE NEWTRUE
EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET BININT BININT1 BININT2 BINFLOAT BINUNICODE SHORT_BINSTRING BINPERSID
BINGET LONG_BINGET BINPUT LONG_BINPUT LONG1 PROTO STOP
"""
_FORBIDDEN = [NAMES.get(code, "?") not in _KNOWN.split() for code in range(256)]


def instructions(data: bytes, at: int, end: int) -> list[str]:
    """The first instruction of a pickle that torch's weights_only machine does not know."""
    while at < end:
        code, shape = data[at], SHAPES[data[at]]
        if _FORBIDDEN[code] or shape is None:
            return [f"its pickle uses {NAMES.get(code, hex(code))} at byte {at:,}"]
        kind, width = shape
        at += 1
        if kind == 0:
            at += width
        elif kind == 1:
            at += width + int.from_bytes(data[at : at + width], "little")
        else:
            for _ in range(width):
                at = data.find(b"\n", at) + 1
    return []

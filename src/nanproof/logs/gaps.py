"""Lines that begin as the records of a log do, up to a loss or a norm, and have no number there.

>>> gaps = Gaps()
>>> gaps.learn(b"step=7, loss=2.5", find_pairs(b"step=7, loss=2.5"))
>>> gaps.find(b"step=8, loss=2.4"), gaps.find(b"step=9, loss="), gaps.find(b"step=9, loss=n/a")
('', 'loss', 'loss')

A trainer that cannot write NaN leaves the place empty, or writes a dash or a word, in any language.
"""

from __future__ import annotations

import re

from . import numbers
from .grammar import Layout, find_pairs
from .names import meaning

__all__ = ["Gaps", "find_pairs", "is_gap"]

TELLING = frozenset({"loss", "component", "eval", "grad_norm"})
MOST = 100
_NUMBER = re.compile(rb"(?<![A-Za-z_.#-])" + numbers.NUMBER)
_SPACE = re.compile(rb"\s+")
# a number, whatever it is wrapped in
_VALUE = re.compile(rb"(?i)(?:[\s\[({'\"<~$]|(?:torch|np|numpy|math|tensor|array|float\d*)[.(])*[-+]?(?:#|nan|inf)")
_CUT = re.compile(rb"(?i)\s*[-+]?(?:na?|inf?)\s*")
_NOTHING = re.compile(
    rb"(?i)\s*(?:[-\xe2\x80\x93\x94?*.#!_/\\]*|n\.?/?a\.?|none|null|nil|undef(?:ined)?|\W*#?num\W*|#\w+!?)\s*"
)
_WORD = re.compile(rb"\s*[A-Za-z]{2,}")


class Gaps:
    """Learns what stands before the values of a log, and finds the lines that lack them."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._prefixes: tuple[bytes, ...] = ()

    def learn(self, line: bytes, layout: Layout) -> None:
        """Keep what stands before each loss and norm of a record."""
        if len(self._names) >= MOST:
            return
        for name, slot in layout.values.items():
            before = _shape(line[: slot.start])
            if meaning(name).role in TELLING and before[-1:] not in (b"#", b"") and before not in self._names:
                self._names[before] = name
                self._prefixes = tuple(self._names)

    def find(self, line: bytes, *, cut: bool = False) -> str:
        """The loss or norm that a line lacks; one that was ``cut`` while it was written lacks it if it began as NaN."""
        if not self._prefixes:
            return ""
        text = _shape(line)
        if not text.startswith(self._prefixes):
            return ""
        for prefix, name in self._names.items():
            if not text.startswith(prefix):
                continue
            rest = text[len(prefix) :]
            spaced = prefix[-1:].isalnum()  # "loss 2.5": a word behind it may go on with a sentence
            if cut and b" " not in rest.strip() and b"," not in rest:
                if _CUT.fullmatch(rest):
                    return name
            elif spaced and (rest[:1] not in b" ,;|)]}" or (_WORD.match(rest) and not is_gap(rest.split()[0]))):
                continue
            elif not _VALUE.match(rest):
                return name
        return ""


def is_gap(text: bytes | str) -> bool:
    """Whether a text stands for a value that is not there.

    >>> [is_gap(t) for t in ("", "--", "n/a", "None", "#NUM!", "best so far")]
    [True, True, True, True, True, False]
    """
    return _NOTHING.fullmatch(text.encode("utf-8", "replace") if isinstance(text, str) else text) is not None


def _shape(text: bytes) -> bytes:
    return _NUMBER.sub(b"#", _SPACE.sub(b" ", text)).strip()
